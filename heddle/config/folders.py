"""Where Heddle keeps files between runs."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/heddle`, where that variable is unset `~/.cache/heddle`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "heddle"
