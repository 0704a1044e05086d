from __future__ import annotations

import string
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support.byte_tokenizer import SPECIAL, TEMPLATE, save_folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of printable characters and a chat template."""
    from tests.support.tiny import build_tiny  # imports transformers: seconds

    folder = build_tiny(tmp_path_factory.mktemp("cli"), "llama-9-3")
    printable = string.digits + string.ascii_letters + string.punctuation + "\u0120\u010a"
    vocabulary = {piece: number for number, piece in enumerate([*SPECIAL, *printable])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return save_folder(folder, tokenizer, chat_template=TEMPLATE)
