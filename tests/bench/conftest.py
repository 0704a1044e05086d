from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model without a tokenizer."""
    from tests.support.tiny import build_tiny  # imports transformers: seconds

    return build_tiny(tmp_path_factory.mktemp("bench"), "llama-9-3")
