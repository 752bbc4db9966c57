"""A tokenizer for the tiny models: a token per character, no downloads."""

from __future__ import annotations

import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.models import PADDING, VOCABULARY

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def by_character(chat: bool = True) -> PreTrainedTokenizerFast:
    """Token 0 pads, 1 begins, 2 ends, 3 is unknown; then printable ASCII, as much of it as the tiny models' vocabulary holds."""
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    characters = [*string.ascii_letters, *string.digits, " ", "\n", *string.punctuation][: VOCABULARY - len(special)]
    vocabulary = {token: idx for idx, token in enumerate([*special, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    built = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    assert built.pad_token_id == PADDING
    if chat:
        built.chat_template = TEMPLATE
    return built
