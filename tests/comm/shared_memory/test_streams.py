from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.comm.blocks import sum_in_order
from heddle.comm.shared_memory import streams as streams_module
from heddle.comm.shared_memory.calls import Boxes
from heddle.comm.shared_memory.streams import Streams
from tests.support.processes import LONG_SECONDS
from tests.support.shared_memory import in_threads

BOX = 48
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


@pytest.fixture(autouse=True)
def small_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "BOX_BYTES", BOX)


def run(method: str, tensors: list[torch.Tensor], parity: int) -> list[torch.Tensor]:
    """One call on every rank; a barrier stands for the numbers of rounds."""
    size = len(tensors)
    memory = torch.full((2, size, BOX), 255, dtype=torch.uint8)
    barrier = threading.Barrier(size, timeout=LONG_SECONDS)

    def body(place: int) -> torch.Tensor:
        streams = Streams(Boxes(memory[0], memory[1], place))
        result: torch.Tensor = getattr(streams, method)(
            tensors[place], parity, lambda: barrier.wait() and None
        )
        return result

    found = in_threads([lambda p=p: body(p) for p in range(size)])
    assert all(isinstance(one, torch.Tensor) for one in found), found
    return found  # type: ignore[return-value]


@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(2, 4),
    items=st.integers(1, 60),
    dtype=st.sampled_from(DTYPES),
    parity=st.integers(0, 1),
    seed=st.integers(0, 99),
)
def test_parts_make_the_whole(size, items, dtype, parity, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = [(torch.randn(size, items, generator=generator) * 50).to(dtype) for _ in range(size)]
    flat = [row.view(-1) for row in rows]
    for found in run("gather", flat, parity):
        assert torch.equal(found, torch.stack(flat))
    for place, found in enumerate(run("deal", rows, parity)):
        assert torch.equal(found, torch.stack([row[place] for row in rows]))
    for place, found in enumerate(run("scatter_sum", rows, parity)):
        assert torch.equal(found, sum_in_order([row[place] for row in rows]))
    for found in run("sum", flat, parity):
        assert torch.equal(found, sum_in_order(flat))
