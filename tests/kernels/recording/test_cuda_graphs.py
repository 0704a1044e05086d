"""Graphs of CUDA, where there is a device, and the refusal where there is none.

Everything else of graphs is tested on a CPU, with graphs that are noted (`tests.support`).
"""

from __future__ import annotations

import pytest
import torch

from heddle.kernels.recording.cuda_graphs import CudaGraphApi, refusal
from heddle.kernels.recording.graph_pieces import GraphPieces
from heddle.kernels.recording.graphs import Graphs
from heddle.kernels.recording.noting import as_one_call
from tests.support.graph_step import make_step, rows


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")


def test_only_work_on_a_cuda_device_is_captured():
    assert refusal(torch.device("cuda")) is None
    assert "ranks compute on cpu" in refusal(torch.device("cpu"))


@pytest.mark.gpu
def test_replays_give_the_bits_of_the_plain_step(cuda):
    """Steps of two to four rows share a graph; the caller's tensors are spoiled after each."""
    step, plain = make_step(cuda), make_step(cuda)
    graphs = Graphs(CudaGraphApi(cuda), row_counts=(4,))
    for number in range(9):
        lengths = [20 + number, 1 + number, 30 + number, 5][: 2 + number % 3]
        assert graphs.num_rows(len(lengths), lambda: None) == 4
        hidden, slots = rows(4, number, cuda), step.plan(lengths, 4)
        with torch.inference_mode():
            expected = plain.compute(hidden, plain.plan(lengths, 4))
            found = graphs.run(
                "step",
                [hidden, slots],
                lambda hidden=hidden, slots=slots: step.compute(hidden, slots),
            )
            assert torch.equal(found, expected)
        if number > 2:  # those of the capture are the buffers of the graph
            hidden.fill_(torch.nan)
            slots.fill_(-1)
    assert (graphs.num_captured, graphs.num_repeated) == (1, 6)
    assert graphs.use_since(0).num_bytes > 0
    for one, other in zip(step.pools, plain.pools, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_a_call_that_no_graph_may_hold_is_made_between_two_graphs(cuda):
    calls = []

    @as_one_call
    def doubled(x):
        calls.append(x.tolist())
        return x * 2

    x = torch.tensor([1.0], device=cuda)
    pieces = GraphPieces([x], CudaGraphApi(x.device))
    with torch.inference_mode():
        assert pieces.capture(lambda: doubled(x + 1) + 1).tolist() == [5.0]
        assert pieces.repeat([torch.tensor([4.0], device=cuda)]).tolist() == [11.0]
    assert pieces.num_graphs == 2
    assert calls == [[2.0], [5.0]]


@pytest.mark.gpu
def test_an_error_within_a_capture_leaves_the_device_usable(cuda):
    x = torch.ones(3, device=cuda)
    pieces = GraphPieces([x], CudaGraphApi(cuda))

    def fails():
        (x + 1).neg_()
        raise KeyError("ours")

    with torch.inference_mode(), pytest.raises(KeyError, match="ours"):
        pieces.capture(fails)
    assert (x + 1).tolist() == [2.0, 2.0, 2.0]
