"""What `heddle doctor MODEL` finds out before anything is loaded: from headers and settings alone.

Every finding is collected, since a reader wants all reasons at once: what the files hold, whether
and how the model would run in this layout, what each rank would keep in memory, and what is
missing. Memory is counted on ranks that are built without any (`heddle.runner.weigh`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import psutil

from heddle.config import EngineConfig, ModelConfig, ResolvedConfig
from heddle.engine.capacity import Capacity
from heddle.engine.machine import resolve_here
from heddle.engine.tokenizer import Tokenizer, load_tokenizer
from heddle.errors import ConfigError, ModelFileError, TopologyError, UnsupportedError
from heddle.layout.layout_object import layout_object
from heddle.models.config_fields import Fields, read_json_object
from heddle.models.config_json import load_model_config
from heddle.models.config_quantization import named_method
from heddle.models.gguf_header import read_gguf_header
from heddle.models.weights.open import open_weights
from heddle.models.weights.source import WeightSource
from heddle.models.weights.stored import StoredWeights, describe_stored
from heddle.runner.weigh import distinct_ranks, process_bytes, weigh_rank

T = TypeVar("T")


class Findings:
    """Reasons against a model, gathered while the looking goes on."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.nearest: list[str] = []
        """Legal layouts near one that is refused, as flags."""

    def ask(self, look: Callable[[], T]) -> T | None:
        """What a look gives; None, and a reason is kept, where it is refused."""
        try:
            return look()
        except TopologyError as error:
            found = list(error.reasons)
            self.nearest += [str(layout) for layout in error.nearest]
        except (ConfigError, ModelFileError, UnsupportedError) as error:
            found = [str(error)]
        # A later look may meet the same obstacle again.
        self.reasons += [reason for reason in found if reason not in self.reasons]
        return None


def examine_model(config: EngineConfig, path: Path) -> dict[str, Any]:
    """The document of one model in one layout; nothing is loaded.

    Args:
        config: what would be started.
        path: of the model on this machine.
    """
    findings = Findings()
    model = findings.ask(lambda: load_model_config(path, config.hf_overrides, config.model_impl))
    stored = findings.ask(lambda: describe_stored(path))
    resolved = None if model is None else findings.ask(lambda: resolve_here(config))
    source = findings.ask(lambda: open_weights(path))
    memory = None
    if resolved is not None and source is not None:
        memory = findings.ask(lambda: _memory(resolved, source))
    tokenizer = findings.ask(lambda: load_tokenizer(str(path)))
    return {
        "name": config.model,
        "architecture": _architecture(path, model),
        "runs": _way(model) if model is not None and not findings.reasons else "not",
        "reasons": findings.reasons,
        "nearest": findings.nearest,
        "missing": _missing(path, tokenizer, stored),
        "checkpoint": None if stored is None else _checkpoint(path, stored),
        "window": None if resolved is None else resolved.scheduler.max_model_len,
        "longest_prompt": None if resolved is None else Capacity.of(resolved).longest_prompt,
        "dtype": None if resolved is None else resolved.dtype,
        "kv_cache_dtype": None if resolved is None else resolved.kv_cache_dtype,
        "layout": layout_object(
            config.parallel,
            block_size=config.cache.block_size,
            executor=config.executor if resolved is None else resolved.executor,
        ),
        "memory": memory,
        "needed_bytes": None
        if memory is None or resolved is None
        else _needed_bytes(memory, resolved.executor),
        "free_memory_bytes": int(psutil.virtual_memory().available),
        "choices": [] if resolved is None else list(resolved.reasons),
    }


def _way(model: ModelConfig) -> str:
    """Whose layers would run."""
    return "natively" if model.foreign is None else "through transformers"


def _memory(resolved: ResolvedConfig, source: WeightSource) -> list[dict[str, Any]]:
    """A row for ranks that hold alike parts."""
    base = process_bytes(resolved)
    found = [
        (ranks, weigh_rank(resolved, first, source))
        for first, ranks in distinct_ranks(resolved).items()
    ]
    return [
        {
            "ranks": ranks,
            "process_bytes": base,
            "weights_bytes": held.weights,
            "kv_pool_bytes": held.cache,
            "states_bytes": held.states,
            "exchange_bytes": held.exchange,
            "own_exchange_bytes": held.own_exchange,
            "activations_bytes": held.activations,
            "total_bytes": base + held.total,
        }
        for ranks, held in found
    ]


def _needed_bytes(memory: list[dict[str, Any]], executor: str) -> int:
    """All ranks together: boxes that many of them map count once, and ranks that are threads share
    one process.
    """
    needed = sum(len(row["ranks"]) * _unshared_bytes(row) for row in memory)
    if executor == "threads":
        num_ranks = sum(len(row["ranks"]) for row in memory)
        needed -= (num_ranks - 1) * int(memory[0]["process_bytes"])
    return needed


def _unshared_bytes(row: dict[str, Any]) -> int:
    return int(row["total_bytes"] - row["exchange_bytes"] + row["own_exchange_bytes"])


def _architecture(path: Path, model: ModelConfig | None) -> str | None:
    """As the files name it, whether it can be run or not."""
    if model is not None:
        return model.architecture
    try:
        if path.suffix == ".gguf":
            return str(read_gguf_header(path).entries["general.architecture"])
        names = read_json_object(path / "config.json").get("architectures")
    except (ModelFileError, KeyError):
        return None
    return str(names[0]) if isinstance(names, list) and names else None


def _missing(path: Path, tokenizer: Tokenizer | None, stored: StoredWeights | None) -> list[str]:
    """What a user may miss later, though the model may run without it."""
    found = []
    if tokenizer is None:
        found.append("a tokenizer: prompts and answers are token ids")
    elif not tokenizer.has_chat_template:
        found.append("a chat template: conversations are refused unless one is given")
    if stored is not None:
        found += [f"{name}: the index names it" for name in stored.missing_files]
    if path.suffix != ".gguf" and not (path / "generation_config.json").is_file():
        found.append("generation_config.json: only config.json says which tokens end a text")
    return found


def _checkpoint(path: Path, stored: StoredWeights) -> dict[str, Any]:
    """Files on disk, and how they say their weights are quantised."""
    document = asdict(stored)
    return {
        "format": document.pop("form"),
        "quantization": _quantization(path),
        "files": document.pop("num_files"),
        "bytes": document.pop("num_bytes"),
        "tensors": document.pop("num_tensors"),
        **document,
    }


def _quantization(path: Path) -> str | None:
    """The method that `config.json` names; "unknown" where it is quantised and names none."""
    if path.suffix == ".gguf":
        return None
    config = path / "config.json"
    try:
        fields = Fields(config, read_json_object(config))
    except ModelFileError:
        return None
    try:
        return named_method(fields)
    except ModelFileError:
        return "unknown"
