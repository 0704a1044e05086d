"""`--config FILE`: flags of a command in YAML, under their long names.

    model: demo
    tensor-parallel-size: 2
    api-key: [one, two]

A flag on the command line and a `HEDDLE_` variable win over the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from heddle.errors import ConfigError, quoted


def read_config(path: str) -> dict[str, Any]:
    """The entries of a file, by name as it is written there.

    Raises:
        ConfigError: it cannot be read, is no mapping, or nests.
    """
    import yaml  # loaded for those who use it

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        place = " ".join(str(error).split())[:300]
        raise ConfigError(f"--config {path} is not YAML: {place}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"--config {path}: a mapping of flags is expected")
    for name, value in found.items():
        if not isinstance(name, str):
            raise ConfigError(f"--config {path}: {quoted(name)} is not the name of a flag")
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(each, str | int | float | bool) for each in values):
            raise ConfigError(f"--config {path}: {name}: a word, a number or a list is expected")
    return found


def words_of(value: Any) -> list[str]:
    """A value of the file, as it would be typed."""
    values = value if isinstance(value, list) else [value]
    return [str(each).lower() if isinstance(each, bool) else str(each) for each in values]
