"""Graphs of CUDA: captured on a stream of their own, in one pool, replayed on the caller's.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

import contextlib

import torch


def refusal(device: torch.device) -> str | None:
    """Why passes on a device cannot be captured; None: they can.

    Args:
        device: on which ranks compute.
    """
    if device.type == "cuda":
        return None
    return f"ranks compute on {device.type} (CUDA devices found: {torch.cuda.device_count()})"


class CudaGraphApi:
    """A `GraphApi`; see `heddle.kernels.recording.graph_pieces`.

    Other threads may allocate and launch meanwhile. Graphs share memory, so they are replayed one
    at a time, and a result is used before the next replay.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._contexts = contextlib.ExitStack()

    @property
    def num_bytes(self) -> int:
        """See `GraphApi.num_bytes`."""
        segments = torch.cuda.memory_snapshot(self._pool)
        return sum(segment["total_size"] for segment in segments)

    def begin(self) -> None:
        """See `GraphApi.begin`; what was launched before is done first."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._contexts.enter_context(torch.cuda.stream(self._stream))
        self._graph = graph
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> torch.cuda.CUDAGraph:
        """See `GraphApi.end`; capturing computes nothing, so the graph is launched here."""
        graph = self._graph
        assert graph is not None, "begun before"
        graph.capture_end()
        self._graph = None
        self._contexts.close()
        graph.replay()
        return graph

    def abandon(self) -> None:
        """See `GraphApi.abandon`."""
        if self._graph is not None:
            # A capture that has failed says so once more when it ends.
            with contextlib.suppress(RuntimeError):
                self._graph.capture_end()
            self._graph = None
        self._contexts.close()
