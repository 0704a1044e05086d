"""Tiny checkpoints, written once per session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.support.tiny import build_tiny


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny checkpoint, by name; treat it as read-only."""
    folder = tmp_path_factory.mktemp("tiny")
    return cache(lambda name: build_tiny(folder, name))
