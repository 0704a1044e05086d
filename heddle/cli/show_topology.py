"""What `heddle show` asks the planner about: a topology, of a model's files or of an assumed one.

Settings are resolved as an engine resolves them, on a machine with room for everything, so what is
shown is what would run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from heddle.comm.shared_memory.segment import refusal
from heddle.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, RopeConfig
from heddle.engine.measured_costs import choose_costs
from heddle.errors import ModelFileError
from heddle.layout.resolve import resolve
from heddle.models.config_json import load_model_config
from heddle.models.sources import DEMO, resolve_model_path
from heddle.planner.catalogue import catalogue_folder
from heddle.step.topology import Topology

ASSUMED_HEADS = (8, 2)
_HEAD_DIM = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownModel:
    """A model, and how much of it is known."""

    config: ModelConfig
    name: str | None
    """None: assumed."""
    has_given_heads: bool = False

    @property
    def heads(self) -> tuple[int, int]:
        """(query, kv)."""
        return self.config.num_query_heads, self.config.num_kv_heads

    @property
    def notes(self) -> list[str]:
        """What a reader must know about an assumed model; nothing for a real one."""
        if self.name is not None:
            return []
        query, kv = self.heads
        origin = "of --heads" if self.has_given_heads else "assumed, since there is no MODEL"
        heads = f"{query} query and {kv} kv heads of width {_HEAD_DIM}"
        return [f"{heads} are {origin}; layers and experts are shown of a MODEL"]

    def document(self) -> dict[str, Any]:
        """As data; an assumed model has no number of layers."""
        config, query, kv = self.config, *self.heads
        is_known = self.name is not None
        return {
            "name": self.name,
            "architecture": config.architecture if is_known else None,
            "num_layers": config.num_layers if is_known else None,
            "query_heads": query,
            "kv_heads": kv,
            "head_dim": config.head_dim,
        }


def find_model(name: str) -> ModelConfig:
    """Read the configuration of a model; weights are not read.

    Args:
        name: `demo`, a folder, a `.gguf` file, or a name of the planner's catalogue.
    Raises:
        ModelFileError: there is no such file or folder, or it is no model.
        UnsupportedError: the model cannot be run.
    """
    folder = None if Path(name).expanduser().exists() else catalogue_folder(name)
    return load_model_config(folder or local_path(name, "show"))


def local_path(name: str, command: str) -> Path:
    """A model's place on this machine; hubs are not asked.

    Args:
        name: `demo`, a folder or a `.gguf` file.
        command: that looks; for the message.
    Raises:
        ModelFileError: there is no such file or folder.
    """
    if name != DEMO and not Path(name).expanduser().exists():
        raise ModelFileError(
            f"model={name!r} is not found; {command} reads {DEMO}, a folder or a .gguf file, and "
            "fetches nothing from a hub"
        )
    return resolve_model_path(name)


def assume_model(heads: tuple[int, int] | None, parallel: ParallelConfig) -> ShownModel:
    """A model of full attention layers, for layouts that are shown without one.

    Args:
        heads: (query, kv) as given; None: `ASSUMED_HEADS`, or an even count with a head per TP
            rank.
        parallel: of the layout.
    """
    tp, (query, kv) = parallel.tensor_parallel_size, heads or ASSUMED_HEADS
    if heads is None:
        query = max(query, tp + tp % kv)
    config = ModelConfig(
        architecture="assumed",
        vocab_size=32000,
        hidden_size=query * _HEAD_DIM,
        intermediate_size=4 * query * _HEAD_DIM,
        num_layers=parallel.pipeline_parallel_size,
        num_query_heads=query,
        num_kv_heads=kv,
        head_dim=_HEAD_DIM,
        max_position_embeddings=1 << 20,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        tie_word_embeddings=True,
    )
    return ShownModel(config=config, name=None, has_given_heads=heads is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A topology, the rows of a step, and where the constants come from."""

    topology: Topology
    max_num_batched_tokens: int
    costs_reason: str


def create_topology(
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    block_size: int,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
) -> Shown:
    """The topology of an engine with this model and layout.

    Raises:
        TopologyError: the layout is not legal.
        ConfigError: a dtype is not known.
    """
    config = EngineConfig(
        model="",
        parallel=parallel,
        # A block of each group, whatever the windows: nothing is stored.
        cache=CacheConfig(
            block_size=block_size,
            kv_cache_dtype=kv_cache_dtype,
            num_blocks_override=1 + model.num_layers,
        ),
        dtype=dtype,
    )
    free = 1 << 50
    resolved = resolve(
        config,
        model,
        free_memory_bytes=free,
        num_cores=1,
        shared_memory_refusal=refusal(parallel.world_size, free),
        model_path="",
    )
    costs, reason = choose_costs(None, cpu_comm_backend=resolved.cpu_comm_backend)
    resolved = replace(resolved, link_costs=costs)
    return Shown(
        topology=Topology.from_resolved(resolved),
        max_num_batched_tokens=resolved.scheduler.max_num_batched_tokens,
        costs_reason=reason,
    )
