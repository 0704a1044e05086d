"""Cut products: parts side by side, partial sums that add up, one bias."""

from __future__ import annotations

import pytest
import torch

from heddle.comm.solo import SoloCommunicator
from heddle.kernels.linear.panels import Panels
from heddle.kernels.registry import create_kernels
from heddle.models.layers.linear import ColumnPart, load_columns, load_rows
from heddle.models.layers.shard import Shard
from heddle.models.weights.loader import WeightLoader
from heddle.models.weights.memory import MemorySource
from tests.support.checkpoints import CPU


def loader(tensors: dict[str, torch.Tensor]) -> WeightLoader:
    return WeightLoader(MemorySource(tensors), torch.float64, CPU)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64
    )


def test_parts_lie_side_by_side_and_spare_room_is_zero() -> None:
    first, second, bias = random(6, 3), random(4, 3) * 2, random(6)
    tensors = {"a.weight": first, "a.bias": bias, "b.weight": second}
    parts = [ColumnPart("a", 6, (2, 5), 4, has_bias=True), ColumnPart("b", 4, (0, 4), 4)]
    x = random(7, 3)
    out = load_columns(loader(tensors), parts, 3)(x)
    assert out.shape == (7, 8)
    assert (out[:, :3] - (x @ first[2:5].T + bias[2:5])).abs().max() < 1e-14
    assert (out[:, 3] == 0).all()
    assert (out[:, 4:] - x @ second.T).abs().max() < 1e-14


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_row_parts_of_all_ranks_add_up_with_one_bias(size: int) -> None:
    weight, bias, x = random(4, 7), random(4), random(3, 7)
    total = torch.zeros(3, 4, dtype=torch.float64)
    for rank in range(size):
        shard = Shard(rank, size, SoloCommunicator())
        start, end = shard.cut(7)
        source = loader({"o.weight": weight, "o.bias": bias})
        part = load_rows(source, shard, "o", 4, 7, (start, end), has_bias=True)
        total += part(x[:, start:end])
    assert (total - (x @ weight.T + bias)).abs().max() < 1e-13


def test_compiled_products_see_the_same_parts_spans_and_bias() -> None:
    tensors = {"a.weight": random(20, 33), "a.bias": random(20), "b.weight": random(18, 33)}
    parts = [
        ColumnPart("a", 20, (2, 5), 4, has_bias=True, more=((7, 10),)),
        ColumnPart("b", 18, (0, 18), 18),
    ]
    x = random(7, 33)
    plain = load_columns(loader(tensors), parts, 33)(x)
    packed = load_columns(packing(tensors), parts, 33)
    assert isinstance(packed.weight, Panels)
    found = packed(x.float())
    assert found.shape == (7, 26)
    assert (found - plain).abs().max() < 1e-5
    row = load_rows(packing(tensors), Shard(1, 2, SoloCommunicator()), "b", 18, 33, (16, 33))
    assert (row(x[:, 16:].float()) - x[:, 16:] @ tensors["b.weight"][:, 16:].T).abs().max() < 1e-5


def packing(tensors: dict[str, torch.Tensor]) -> WeightLoader:
    return WeightLoader(MemorySource(tensors), torch.float32, CPU, kernels=create_kernels("numba"))
