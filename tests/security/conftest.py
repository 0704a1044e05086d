"""Files that must not come into being."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security.gadgets import gadgets


@pytest.fixture
def trap(tmp_path: Path) -> Iterator[Path]:
    """A file that must not be made; the gadgets are shown to work first."""
    path = tmp_path / "made"
    for data in gadgets(path):
        pickle.loads(data)
        assert path.exists()
        path.unlink()
    yield path
    assert not path.exists()
