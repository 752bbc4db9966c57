"""Accuracy: what sparse attention finds and says, beside the dense model."""
