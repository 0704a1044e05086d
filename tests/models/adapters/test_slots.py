"""What ranks make of an adapter is what one matrix makes of it, whatever is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from heddle.attention.adapter_rows import AdapterRows
from heddle.comm.solo import SoloCommunicator
from heddle.models.adapters.slots import AdapterSlots, LowRankPart
from heddle.models.adapters.store import AdapterStore
from heddle.models.layers.linear import ColumnPart, Linear, load_columns, load_rows
from heddle.models.layers.shard import Shard
from heddle.models.weights.loader import WeightLoader
from heddle.models.weights.memory import MemorySource
from tests.support.adapters import low_rank, save_adapter
from tests.support.checkpoints import CPU
from tests.support.tiny import DenseAttention

SLOTS = np.array([1, -1, 0, 1, 1, 0, -1])
SCALES = {0: 4 / 2, 1: 4 / 3}


def random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.fixture
def folders(tmp_path):
    """Adapter 0 changes both matrices, adapter 1 only `b`."""
    first = low_rank("a", 7, 5) | low_rank("b", 4, 5, seed=1)
    return {
        0: save_adapter(tmp_path / "0", first | low_rank("o", 5, 7, seed=3)),
        1: save_adapter(
            tmp_path / "1", low_rank("b", 4, 5, 3, seed=2) | low_rank("o", 5, 7, 3, seed=4)
        ),
    }


def change_of(module: str, num_outputs: int, num_inputs: int, seeds: dict[int, int]):
    """`[M, out]` that adapters add to rows of `x`, from their definition."""

    def apply(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(len(x), num_outputs, dtype=torch.float64)
        for slot, seed in seeds.items():
            tensors = low_rank(module, num_outputs, num_inputs, 2 + slot, seed)
            down, up = (tensors[f"{module}.lora_{side}"].double() for side in "AB")
            rows = torch.tensor(slot == SLOTS)
            out[rows] = SCALES[slot] * (x[rows] @ down.T) @ up.T
        return out

    return apply


def with_adapters(load, tensors, folders) -> Linear:
    found: list[AdapterSlots] = []
    loader = WeightLoader(MemorySource(tensors), torch.float64, CPU, adapter_slots=found)
    linear = load(loader)
    store = AdapterStore(found, torch.float64, CPU)
    for slot, folder in folders.items():
        store.change(slot, str(folder))
    return linear


class Step(DenseAttention):
    adapters = AdapterRows.of(SLOTS)


def test_fused_parts_have_their_own_updates_and_spare_room_stays_zero(folders) -> None:
    tensors = {"a.weight": random(7, 5), "b.weight": random(4, 5)}
    parts = [ColumnPart("a", 7, (0, 2), 3, more=((5, 7),)), ColumnPart("b", 4, (1, 4), 3)]
    linear = with_adapters(lambda loader: load_columns(loader, parts, 5), tensors, folders)
    x = random(7, 5)
    first = x @ tensors["a.weight"].T + change_of("a", 7, 5, {0: 0})(x)
    second = x @ tensors["b.weight"].T + change_of("b", 4, 5, {0: 1, 1: 2})(x)
    out = linear(x, Step())
    assert (out[:, [2, 5]] == 0).all()
    assert (out[:, :2] - first[:, :2]).abs().max() < 1e-13
    assert (out[:, 3:5] - first[:, 5:]).abs().max() < 1e-13
    assert (out[:, 6:] - second[:, 1:]).abs().max() < 1e-13


@pytest.mark.parametrize("size", [1, 2, 3])
def test_parts_of_cut_inputs_add_up(folders, size: int) -> None:
    weight, x, total = random(5, 7), random(7, 7), torch.zeros(7, 5, dtype=torch.float64)
    for rank in range(size):
        shard = Shard(rank, size, SoloCommunicator())
        start, end = shard.cut(7)
        part = with_adapters(
            lambda loader, shard=shard: load_rows(loader, shard, "o", 5, 7, shard.cut(7)),
            {"o.weight": weight},
            folders,
        )
        total += part(x[:, start:end], Step())
    expected = x @ weight.T + change_of("o", 5, 7, {0: 3, 1: 4})(x)
    assert (total - expected).abs().max() < 1e-13


def test_a_block_that_does_not_pass_the_step_is_told() -> None:
    slots = AdapterSlots([])
    linear = Linear.of(random(2, 2), adapters=slots)
    linear(random(1, 2))
    slots.put(0, [LowRankPart(random(2, 1), ((0, random(1, 2)),))])
    with pytest.raises(AssertionError, match="passes the step"):
        linear(random(1, 2))
    slots.clear(0)
    linear(random(1, 2))
