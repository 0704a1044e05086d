from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model without a tokenizer, window 512."""
    from tests.support.tiny import build_tiny  # imports transformers: seconds

    return build_tiny(tmp_path_factory.mktemp("verify"), "llama-9-3")
