"""Well-known models by lower-case dashed names: the shapes of their `config.json`, no weights.

A folder holds the fields that decide shapes, as their authors publish them. Several releases of one
shape have a name each.
"""

from __future__ import annotations

import difflib
from pathlib import Path

FOLDER = Path(__file__).parent / "catalogue"


def catalogue_names() -> list[str]:
    """All names, sorted."""
    return sorted(path.parent.name for path in FOLDER.glob("*/config.json"))


def catalogue_folder(name: str) -> Path | None:
    """The folder of a model; None where the catalogue does not have it.

    Args:
        name: in any case.
    """
    wanted = name.lower()
    return FOLDER / wanted if wanted in catalogue_names() else None


def catalogue_hint(name: str) -> str:
    """Words that name the nearest model of the catalogue; empty where none is near.

    Example:
        >>> catalogue_hint("DeepSeek-V33")
        ' (nearest: deepseek-v3)'
    """
    near = difflib.get_close_matches(name.lower(), catalogue_names(), n=1)
    return f" (nearest: {near[0]})" if near else ""
