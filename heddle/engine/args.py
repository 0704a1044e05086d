"""Flat keyword arguments to the nested configuration, and a helpful refusal for unknown names."""

from __future__ import annotations

import dataclasses
import difflib
import os
import typing
from typing import Any

from heddle.config import AdapterConfig, CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from heddle.config.adapters import adapter_modules
from heddle.config.faults import fault_rules
from heddle.config.overrides import overrides_text
from heddle.config.speculative import speculative_config
from heddle.errors import ConfigError

_SECTIONS: dict[str, type] = {
    "parallel": ParallelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "adapters": AdapterConfig,
}
_COMMAND_LINE_NAMES = {
    "cp_kv_cache_interleave_size": "kv_interleave_size",
    "dcp_kv_cache_interleave_size": "kv_interleave_size",
    "num_gpu_blocks_override": "num_blocks_override",
    "attention_backend": "backend",
    "distributed_executor_backend": "executor",
    "step_timeout": "step_timeout_seconds",
    "startup_timeout": "startup_timeout_seconds",
    "cpu_distributed_timeout_seconds": "group_timeout_seconds",
    "speculative_config": "speculative",
    "scheduling_policy": "policy",
    "target_itl": "target_itl_ms",
}


_KINDS: dict[object, tuple[str, tuple[type, ...]]] = {
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    bool: ("true or false", (bool,)),
}
"""Field type -> what a message calls it, and the types of values that fit. Words that a field does
not list are judged by whoever knows the legal ones."""


def engine_config(model: str | os.PathLike[str], **arguments: Any) -> EngineConfig:
    """Sort arguments into their sections.

    Args:
        model: `demo`, a folder, a `.gguf` file or a hub id.
        arguments: any field of the engine's configuration by its own name, or by the name of its
            flag with underscores.
    Raises:
        TypeError: an unknown name, with the nearest known one; or one setting given twice.
        ConfigError: a value of the wrong type, or a word that its field does not list.
    """
    path = os.fspath(model) if isinstance(model, os.PathLike) else model
    if not isinstance(path, str):
        raise ConfigError(f"model={model!r} is not legal; it is a name or a path")
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
        if name == "executor":
            value = executor_name(value)
        kind = _SECTIONS.get(places[name], EngineConfig)
        _check_type(given, value, typing.get_type_hints(kind)[name])
        section_arguments[name] = value
    adapters = sorted_arguments["adapters"]
    if "lora_modules" in adapters:
        adapters["lora_modules"] = adapter_modules(adapters["lora_modules"])
    own_arguments = sorted_arguments[""]
    own_arguments["hf_overrides"] = overrides_text(own_arguments.get("hf_overrides"))
    own_arguments["faults"] = fault_rules(own_arguments.get("faults"))
    own_arguments["speculative"] = speculative_config(own_arguments.get("speculative"))
    return EngineConfig(
        model=path,
        **{section: kind(**sorted_arguments[section]) for section, kind in _SECTIONS.items()},
        **own_arguments,
    )


def executor_name(word: Any) -> Any:
    """The name here of an executor; `mp` is how vLLM calls processes of one host.

    Example:
        >>> executor_name("mp")
        'processes'
    """
    return "processes" if word == "mp" else word


def _check_type(name: str, value: object, hint: object) -> None:
    """Whole numbers and switches are not taken for one another, though Python would."""
    members = typing.get_args(hint) or (hint,)
    if value is None and type(None) in members:
        return
    if typing.get_origin(hint) is typing.Literal and value not in members:
        raise ConfigError(f"{name}={value!r} is not legal; legal here: {', '.join(members)}")
    for member in members:
        if member in _KINDS and type(value) not in _KINDS[member][1]:
            raise ConfigError(f"{name}={value!r} is not legal; it is {_KINDS[member][0]}")


def _unknown(name: str, known: list[str]) -> str:
    if name == "gpu_memory_utilization":  # same purpose, no likeness
        return f"LLM() got an unknown argument {name!r}; set the pool with 'kv_cache_memory_bytes'"
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.55)
    hint = f"; the nearest known one is {nearest[0]!r}" if nearest else ""
    return f"LLM() got an unknown argument {name!r}{hint}"
