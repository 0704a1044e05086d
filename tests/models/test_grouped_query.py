"""The options of the block that no whole model shows by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from heddle.comm.base import Communicator
from heddle.config.model import TemperatureConfig
from heddle.models.base import RowInputs
from heddle.models.config_json import load_model_config
from heddle.models.grouped_query import query_factors
from heddle.models.registry import create_model
from heddle.models.weights.open import open_weights
from tests.support.checkpoints import CPU, head_layout, run_tp
from tests.support.comparison import POSITIONS, TOKEN_IDS
from tests.support.rank_attention import HeadMapAttention

Checkpoint = Callable[[str], Path]


@pytest.mark.parametrize("position", [0, 6, 7, 8, 15, 1_000_003])
def test_queries_grow_by_the_logarithm_of_whole_floors(position: int) -> None:
    config = TemperatureConfig(floor=8, scale=0.3)
    found = query_factors(config, torch.tensor([position]), torch.float64)
    expected = 1 + 0.3 * math.log(1 + (position + 1) // 8)
    assert found.shape == (1, 1, 1)
    assert found.item() == pytest.approx(expected, rel=1e-14)


def test_factors_are_computed_in_float32_for_narrower_rows() -> None:
    config = TemperatureConfig(floor=8192, scale=0.1)
    positions = torch.tensor([8191, 100_000, 1_000_000])
    wide = query_factors(config, positions, torch.float32)
    assert torch.equal(query_factors(config, positions, torch.bfloat16), wide.to(torch.bfloat16))


class SinkSpy(HeadMapAttention):
    """Keeps the sinks of the first layer."""

    found: torch.Tensor | None = None

    def gqa(self, layer, query, key, value, sinks=None):  # type: ignore[no-untyped-def]
        if layer == 0:
            self.found = sinks
        return super().gqa(layer, query, key, value, sinks)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_each_rank_holds_the_sinks_of_its_lanes(checkpoint: Checkpoint, tp_size: int) -> None:
    path = checkpoint("gpt-oss")
    config = load_model_config(path)
    heads = head_layout(config, tp_size)

    def body(rank: int, tp: Communicator) -> torch.Tensor:
        part = create_model(config, heads, rank, open_weights(path), torch.float32, CPU, tp)
        spy = SinkSpy(config, heads, rank)
        part.forward(RowInputs(TOKEN_IDS, POSITIONS), spy)
        assert spy.found is not None
        return spy.found

    stored = load_file(path / "model.safetensors")["model.layers.0.self_attn.sinks"]
    for rank, sinks in enumerate(run_tp(tp_size, body)):
        first, last = heads.query_range(rank)
        assert sinks.shape == (heads.lanes,)
        assert torch.equal(sinks[: last - first], stored[first:last])
        assert (sinks[last - first :] == 0).all()
