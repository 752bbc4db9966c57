"""What `make gpu-check` runs: the GPU tests, then measurements of the device path. See docs/gpu.md."""
