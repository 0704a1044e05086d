"""Flat keyword arguments to the nested configuration, and a helpful refusal for unknown names."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from heddle.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig

_SECTIONS: dict[str, type] = {
    "parallel": ParallelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
}
_COMMAND_LINE_NAMES = {
    "cp_kv_cache_interleave_size": "kv_interleave_size",
    "dcp_kv_cache_interleave_size": "kv_interleave_size",
    "num_gpu_blocks_override": "num_blocks_override",
    "attention_backend": "backend",
    "step_timeout": "step_timeout_seconds",
    "startup_timeout": "startup_timeout_seconds",
    "cpu_distributed_timeout_seconds": "group_timeout_seconds",
}


def engine_config(model: str, **arguments: Any) -> EngineConfig:
    """Sort arguments into their sections.

    Args:
        model: `demo`, a folder, a `.gguf` file or a hub id.
        arguments: any field of the engine's configuration by its own name, or by the name of its
            flag with underscores.
    Raises:
        TypeError: an unknown name, with the nearest known one; or one setting given twice.
    """
    own = {field.name for field in dataclasses.fields(EngineConfig)} - {"model", *_SECTIONS}
    places = dict.fromkeys(own, "")
    for section, kind in _SECTIONS.items():
        for field in dataclasses.fields(kind):
            places.setdefault(field.name, section)  # the window is set once, for the whole engine
    sorted_arguments: dict[str, dict[str, Any]] = {"": {}, **{name: {} for name in _SECTIONS}}
    for given, value in arguments.items():
        name = _COMMAND_LINE_NAMES.get(given, given)
        if name not in places:
            raise TypeError(_unknown(given, [*places, *_COMMAND_LINE_NAMES]))
        section_arguments = sorted_arguments[places[name]]
        if name in section_arguments:
            raise TypeError(f"{given} and another name of {name} are both given; give one")
        section_arguments[name] = value
    return EngineConfig(
        model=model,
        **{section: kind(**sorted_arguments[section]) for section, kind in _SECTIONS.items()},
        **sorted_arguments[""],
    )


def _unknown(name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"LLM() got an unknown argument {name!r}; the nearest known one is {nearest[0]!r}"
