"""A cut vocabulary gives the rows and scores of a whole one."""

from __future__ import annotations

import pytest
import torch

from heddle.comm.base import Communicator
from heddle.kernels.linear.panels import Panels
from heddle.kernels.registry import Kernels, create_kernels
from heddle.models.layers.embedding import VocabularyShard, load_vocabulary
from heddle.models.layers.shard import Shard
from heddle.models.weights.loader import WeightLoader
from heddle.models.weights.memory import MemorySource
from tests.support.checkpoints import CPU, run_tp

VOCAB_SIZE, WIDTH = 11, 4
TABLE = torch.randn(VOCAB_SIZE, WIDTH, generator=torch.Generator().manual_seed(2))


def load(rank: int, size: int, tp: Communicator, kernels: Kernels | None = None) -> VocabularyShard:
    loader = WeightLoader(MemorySource({"t.weight": TABLE}), torch.float32, CPU, kernels=kernels)
    return load_vocabulary(loader, Shard(rank, size, tp), "t", VOCAB_SIZE, WIDTH)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_lookup_moves_rows_bit_for_bit(size: int) -> None:
    token_ids = torch.tensor([0, 10, 5, 5, 3, 7, 9, 1])
    results = run_tp(size, lambda rank, tp: load(rank, size, tp).embed(token_ids))
    assert len(results) == size
    for rows in results:
        assert torch.equal(rows, TABLE[token_ids])


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_logits_are_whole_and_in_order_on_every_rank(size: int, num_rows: int) -> None:
    hidden = torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(3))
    results = run_tp(size, lambda rank, tp: load(rank, size, tp).logits(hidden))
    for logits in results:
        assert logits.shape == (num_rows, VOCAB_SIZE)
        assert torch.allclose(logits, hidden @ TABLE.T, rtol=0, atol=1e-6)
        assert torch.equal(logits, results[0])


@pytest.mark.parametrize("size", [1, 3])
def test_packed_tables_serve_lookups_and_logits(size: int) -> None:
    kernels = create_kernels("numba")
    token_ids = torch.tensor([10, 0, 5, 3])
    hidden = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(3))

    def body(rank: int, tp: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        table = load(rank, size, tp, kernels)
        assert isinstance(table.weight, Panels)
        return table.embed(token_ids), table.logits(hidden)

    for rows, logits in run_tp(size, body):
        assert torch.equal(rows, TABLE[token_ids])
        assert torch.allclose(logits, hidden @ TABLE.T, rtol=0, atol=1e-6)
