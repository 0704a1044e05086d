"""The tiny model that stands for a family of `docs/families.md` in tests."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from heddle.layout.kinds import kinds_of
from heddle.models.config_json import load_model_config
from heddle.models.families import Family
from tests.support.tiny import TINY_NAMES, tiny_config


def twins_of(family: Family) -> tuple[str, ...]:
    """Names of the tiny models of a family's class and kinds of layers."""
    return _names().get((family.architecture, kinds_of(family.specimen)), ())


@functools.cache
def _names() -> dict[tuple[str, tuple[str, ...]], tuple[str, ...]]:
    """Names of tiny models by (class, kinds of layers)."""
    found: dict[tuple[str, tuple[str, ...]], tuple[str, ...]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in TINY_NAMES:
            tiny_config(name).save_pretrained(folder)
            model = load_model_config(Path(folder))
            key = model.architecture, kinds_of(model)
            found[key] = (*found.get(key, ()), name)
    return found
