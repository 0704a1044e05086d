"""Which tensors of a checkpoint make which parameter of a model of transformers.

Published names and names of modules differ for some models: the library keeps renamings, and
conversions that join or split tensors, for each of them. They are used here as they are there.

Source: `transformers.core_model_loading`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)


@dataclass(slots=True)
class Conversion:
    """Several tensors that become one parameter, or one that becomes several."""

    converter: Any
    sources: list[tuple[str, str]] = field(default_factory=list)
    """(name in the checkpoint, pattern that it matched), in the library's order."""


@dataclass(slots=True)
class NameMap:
    """Where the parameters of a model come from."""

    renamed: dict[str, str] = field(default_factory=dict)
    """Parameter -> name of the one tensor that holds it."""
    converted: dict[str, Conversion] = field(default_factory=dict)
    """First parameter of a conversion -> the conversion."""
    ignored: list[str] = field(default_factory=list)
    """Tensors that the library says may be left alone."""


def map_names(model: Any, names: Collection[str]) -> NameMap:
    """Sort the tensors of a checkpoint.

    Args:
        model: of `create_shapes`.
        names: of the checkpoint's tensors. One that belongs nowhere is in no list of the result.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    parameters = model.state_dict()
    found = NameMap()
    for name in sorted(names, key=dot_natural_key):
        prefix = model.base_model_prefix
        target, pattern = rename_source_key(name, renamings, converters, prefix, parameters)
        if target not in parameters:  # it may have the module's name already
            target, pattern = rename_source_key(name, [], [], prefix, parameters)
        if target not in parameters:
            if _may_be_ignored(model, name):
                found.ignored.append(name)
        elif pattern is None:
            found.renamed[target] = name
        else:
            entry = found.converted.setdefault(target, Conversion(deepcopy(by_pattern[pattern])))
            entry.sources.append((name, pattern))
    return found


def _may_be_ignored(model: Any, name: str) -> bool:
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    return any(re.search(pattern, name) for pattern in patterns)
