"""Requests whose new rows all lie on this rank: decodes, tiny prompts, and everything if pcp is 1.

Every PCP rank has the same rows of such a request and takes its own copy of the state forward.
Requests with equally many rows and kept states form a batch, so a step of decodes is one update.

Legend: `B` requests of a batch, `T` rows of each, `t` kept states of each, `C` channels, `W` taps,
`h` heads, `K` and `V` key and value width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from heddle.attention.recurrent.chunked import scan
from heddle.attention.recurrent.convolution import Convolution
from heddle.attention.recurrent.store import StateStore
from heddle.attention.recurrent.terms import Terms
from heddle.step.recurrent import DirectRun


class DirectBatch:
    """Runs of equal shape; index tensors are made once and serve every layer."""

    def __init__(self, runs: Sequence[DirectRun], store: StateStore) -> None:
        self._store = store
        self.num_rows = runs[0].end - runs[0].start
        self.num_kept = len(runs[0].targets)
        starts = self._index([run.start for run in runs])
        self.rows = starts[:, None] + torch.arange(self.num_rows, device=store.device)  # [B, T]
        self.sources = self._index([run.source for run in runs])
        self.targets = self._index([run.targets for run in runs])  # [B, t]

    def convolve(
        self, layer: int, convolution: Convolution, channels: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Fill this batch's rows of `out`.

        Args:
            layer: index of the layer.
            convolution: its weights.
            channels: `[M, C]` before.
            out: `[M, C]` after.
        Returns:
            `[B, t, W - 1, C]`: what each target slot remembers.
        """
        history = self._store.histories(layer, self.sources)
        window = torch.cat([history, channels[self.rows]], dim=1)  # [B, W - 1 + T, C]
        out[self.rows] = convolution(window)
        seen = window.unfold(1, convolution.num_history, 1)  # [B, T + 1, C, W - 1]
        return seen[:, -self.num_kept :].transpose(2, 3)

    def scan(self, layer: int, terms: Terms, chunk_size: int, out: torch.Tensor) -> torch.Tensor:
        """Fill this batch's rows of `out [M, h, V]`; returns `[B, t, h, K, V]`, the kept states."""
        own = terms.pick(self.rows)
        state = self._store.states(layer, self.sources)
        outs, kept = [], []
        for start, end in self._stretches():
            part, state = scan(own.tokens(start, end), state, chunk_size)
            outs.append(part)
            kept.append(state)
        out[self.rows] = torch.cat(outs, dim=1)
        return torch.stack(kept, dim=1)

    def _stretches(self) -> Iterator[tuple[int, int]]:
        """All rows up to the first kept state at once, then row by row."""
        start = 0
        for end in range(self.num_rows - self.num_kept + 1, self.num_rows + 1):
            yield start, end
            start = end

    def _index(self, numbers: Sequence[object]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._store.device)


def create_direct_batches(runs: Sequence[DirectRun], store: StateStore) -> tuple[DirectBatch, ...]:
    """Group runs of equally many rows and kept states."""
    groups: dict[tuple[int, int], list[DirectRun]] = {}
    for run in runs:
        groups.setdefault((run.end - run.start, len(run.targets)), []).append(run)
    return tuple(DirectBatch(group, store) for group in groups.values())
