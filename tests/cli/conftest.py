from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.byte_tokenizer import TEMPLATE, printable, save_folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of printable characters and a chat template."""
    from tests.support.tiny import build_tiny  # imports transformers: seconds

    folder = build_tiny(tmp_path_factory.mktemp("cli"), "llama-9-3")
    return save_folder(folder, printable(), chat_template=TEMPLATE)
