"""One tiny model for all servers of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.byte_tokenizer import TEMPLATE, printable, save_folder
from tests.support.tiny import build_tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = build_tiny(tmp_path_factory.mktemp("tiny"), "llama-8-2")
    return save_folder(path, printable(), eos_token="<|end|>", chat_template=TEMPLATE)
