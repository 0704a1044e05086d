"""Requests whose new rows are dealt to PCP ranks: two gathers, whatever the lengths.

1. The last `W - 1` inputs of every segment are gathered, so that each rank finds the rows before
   its own segments, through segments shorter than that if need be.
2. Each rank runs its segments from zero; their maps are gathered.
3. Every rank applies the maps of a request in position order from the cached state. It meets the
   state before each of its own segments, completes their readings, and ends with the new state:
   equal bits on all ranks, which apply the same maps in the same order.

Legend: `P` PCP size, `S` segments that a rank sends, `R` scanned requests, `C` channels, `W` taps,
`h` heads, `K` and `V` key and value width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from heddle.attention.recurrent.convolution import Convolution
from heddle.attention.recurrent.segment import Segment, SegmentMap, run_segment
from heddle.attention.recurrent.store import StateStore
from heddle.attention.recurrent.terms import Terms
from heddle.comm.base import Communicator
from heddle.step.recurrent import RecurrentStep


class ScannedRows:
    """All scanned requests of a step on one rank; index tensors are made once."""

    def __init__(self, step: RecurrentStep, store: StateStore, pcp: Communicator) -> None:
        self._step = step
        self._store = store
        self._pcp = pcp
        self._sources = self._index([run.source for run in step.scanned])
        self.targets = self._index([run.target for run in step.scanned])  # [R]
        self._histories: dict[int, HistoryIndex] = {}

    # -- convolution --------------------------------------------------------------------------

    def convolve(
        self, layer: int, convolution: Convolution, channels: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Fill this rank's scanned rows of `out`.

        Args:
            layer: index of the layer.
            convolution: its weights.
            channels: `[M, C]` before.
            out: `[M, C]` after.
        Returns:
            `[R, W - 1, C]`: what each request remembers after its last row.
        """
        index = self._history_index(convolution.num_history)
        cached = self._store.histories(layer, self._sources)
        known = torch.cat([cached.flatten(0, 1), self._gather_ends(channels, index.num_history)])
        for segment, before in zip(self._step.own, index.before, strict=True):
            rows = slice(segment.start, segment.end)
            out[rows] = convolution(torch.cat([known[before], channels[rows]]))
        return known[index.after]

    def _gather_ends(self, channels: torch.Tensor, num_history: int) -> torch.Tensor:
        """`[P * S * (W - 1), C]`: the last rows of every segment; shorter ones end with them."""
        width = channels.shape[1]
        ends = channels.new_zeros(self._step.num_segments, num_history, width)
        for segment in self._step.own:
            count = min(num_history, segment.end - segment.start)
            if count:
                ends[segment.number, -count:] = channels[segment.end - count : segment.end]
        return self._pcp.all_gather(ends).reshape(-1, width)

    def _history_index(self, num_history: int) -> HistoryIndex:
        if num_history not in self._histories:
            self._histories[num_history] = HistoryIndex(self._step, num_history, self._store.device)
        return self._histories[num_history]

    # -- states -------------------------------------------------------------------------------

    def scan(self, layer: int, terms: Terms, chunk_size: int, out: torch.Tensor) -> torch.Tensor:
        """Fill this rank's scanned rows of `out [M, h, V]`; returns the new states,
        `[R, h, K, V]`.
        """
        states = self._store.states(layer, self._sources)
        segments = [
            run_segment(terms.pick(slice(own.start, own.end)), chunk_size) for own in self._step.own
        ]
        maps = self._gather_maps(segments, terms)
        before: dict[tuple[int, int], torch.Tensor] = {}
        new_states = []
        for run, (scanned, state) in enumerate(zip(self._step.scanned, states, strict=True)):
            for place, (rank, number, _) in enumerate(scanned.segments):
                before[run, place] = state
                state = SegmentMap.unpack(maps[rank, number], *states.shape[2:]).apply(state)
            new_states.append(state)
        for own, segment in zip(self._step.own, segments, strict=True):
            out[own.start : own.end] = segment.read(before[own.run, own.place])
        return torch.stack(new_states)

    def _gather_maps(self, segments: Sequence[Segment], terms: Terms) -> torch.Tensor:
        """`[P, S, h, K * V + F]`: the map of every segment; places without one are never read."""
        heads, width = terms.value.shape[1], terms.map_width
        sent = terms.value.new_zeros(self._step.num_segments, heads, width)
        for own, segment in zip(self._step.own, segments, strict=True):
            sent[own.number] = segment.map.pack()
        return self._pcp.all_gather(sent)

    def _index(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._store.device)


class HistoryIndex:
    """Which known rows stand before each segment and after each request.

    Known rows are the remembered inputs of the requests, `[R * (W - 1)]`, then the gathered ends of
    segments, `[P * S * (W - 1)]`. In position order a request's rows are the former, then of each
    segment the latter, as many as it has; what stands at any point are the last `W - 1` so far.
    """

    def __init__(self, step: RecurrentStep, num_history: int, device: torch.device) -> None:
        self.num_history = num_history
        first_end = len(step.scanned) * num_history
        before: dict[tuple[int, int], list[int]] = {}
        after = []
        for run, scanned in enumerate(step.scanned):
            rows = list(range(run * num_history, (run + 1) * num_history))
            for place, (rank, number, num_rows) in enumerate(scanned.segments):
                before[run, place] = rows
                end = first_end + (rank * step.num_segments + number + 1) * num_history
                rows = rows + list(range(end - min(num_rows, num_history), end))
                rows = rows[len(rows) - num_history :]
            after.append(rows)
        self.before = [
            torch.tensor(before[own.run, own.place], dtype=torch.int64, device=device)
            for own in step.own
        ]
        self.after = torch.tensor(after, dtype=torch.int64, device=device)  # [R, W - 1]
