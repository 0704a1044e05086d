"""Pickles that make a file when somebody loads them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any


class Gadget:
    """Whoever unpickles it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def gadgets(path: Path) -> list[bytes]:
    """One of each protocol, lowest first."""
    return [pickle.dumps(Gadget(path), protocol) for protocol in range(6)]
