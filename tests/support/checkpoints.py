"""One checkpoint per tiny model and test session, and this package's model built from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from heddle.comm.base import Communicator
from heddle.comm.solo import SoloCommunicator
from heddle.comm.threads import ThreadGroup, ThreadWorld
from heddle.config.model import ModelConfig
from heddle.layout.heads import HeadLayout
from heddle.models.base import Model
from heddle.models.config_json import load_model_config
from heddle.models.registry import create_model
from heddle.models.weights.open import open_weights
from heddle.models.weights.source import Span, WeightSource

R = TypeVar("R")
CPU = torch.device("cpu")


class CountingSource:
    """A `WeightSource` that notes how many elements of each tensor were read."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.elements_read: dict[str, int] = {}

    def names(self) -> tuple[str, ...]:
        return tuple(self._source.names())

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def location(self, name: str) -> str:
        return self._source.location(name)

    def read(
        self,
        name: str,
        rows: Span | None = None,
        cols: Span | None = None,
        depth: Span | None = None,
    ) -> torch.Tensor:
        part = self._source.read(name, rows, cols, depth)
        self.elements_read[name] = self.elements_read.get(name, 0) + part.numel()
        return part


def head_layout(config: ModelConfig, tp_size: int = 1, slice_size: int = 1) -> HeadLayout:
    return HeadLayout(
        num_query_heads=config.num_query_heads,
        num_kv_heads=config.num_kv_heads,
        tp_size=tp_size,
        slice_size=slice_size,
    )


def solo_model(path: Path, dtype: torch.dtype = torch.float32) -> tuple[Model, ModelConfig]:
    """The model of a checkpoint on one rank."""
    config = load_model_config(path)
    source = open_weights(path)
    model = create_model(config, head_layout(config), 0, source, dtype, CPU, SoloCommunicator())
    return model, config


def run_tp(tp_size: int, body: Callable[[int, Communicator], R]) -> list[R]:
    """Call `body(tp_rank, tp group)` on thread ranks, each with one torch thread."""

    def rank_body(world: ThreadWorld) -> R:
        group = world.group("tp", [list(range(tp_size))])
        with torch.inference_mode():
            return body(world.global_rank, group)

    return ThreadGroup(tp_size).run(rank_body)
