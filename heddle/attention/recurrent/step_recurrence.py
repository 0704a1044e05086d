"""The recurrent layers of one step on one rank, the same flow for every method.

    channels --convolution, with the rows before--> terms --scan, from the states before--> readings

Which calls are made follows from the plan: a gather of segment ends and one of segment maps when
rows are dealt to PCP ranks, else nothing.

Legend: `M` local rows, `C` channels, `h` heads, `V` value width.
"""

from __future__ import annotations

import torch

from heddle.attention.recurrent.direct_rows import create_direct_batches
from heddle.attention.recurrent.scanned_rows import ScannedRows
from heddle.attention.recurrent.store import StateStore
from heddle.attention.recurrent.terms import RecurrentInputs, Terms
from heddle.comm.base import Communicator
from heddle.step.recurrent import RecurrentStep


class RankRecurrence:
    """Runs every recurrent layer of a step.

    Args:
        step: this rank's rows.
        store: the states; read and written.
        pcp: the ranks that rows are dealt to.
        chunk_size: tokens that the chunked form takes at once.
    """

    def __init__(
        self, step: RecurrentStep, store: StateStore, pcp: Communicator, chunk_size: int
    ) -> None:
        self._step = step
        self._store = store
        self._chunk_size = chunk_size
        self._direct = create_direct_batches(step.direct, store)
        self._scanned = ScannedRows(step, store, pcp) if step.num_segments else None

    def run(self, layer: int, inputs: RecurrentInputs) -> torch.Tensor:
        """One layer; see `StepOps.recurrent`."""
        return self._scan(layer, inputs.terms(self._convolve(layer, inputs)))

    def _convolve(self, layer: int, inputs: RecurrentInputs) -> torch.Tensor:
        """`[M, C]` after the convolution; pads hold zeros."""
        channels, convolution = inputs.channels, inputs.convolution
        if convolution is None:
            return channels
        out = torch.zeros_like(channels)
        # Written when all is read: one request's target may be another one's source.
        writes = [
            (part.targets.flatten(), part.convolve(layer, convolution, channels, out).flatten(0, 1))
            for part in self._direct
        ]
        if self._scanned is not None:
            rows = self._scanned.convolve(layer, convolution, channels, out)
            writes.append((self._scanned.targets, rows))
        for slots, rows in writes:
            self._store.write_histories(layer, slots, rows)
        return out

    def _scan(self, layer: int, terms: Terms) -> torch.Tensor:
        """`[M, h, V]` in the dtype of the state; pads hold zeros."""
        skip, terms = terms.skip, terms.to(self._store.dtype)
        out = torch.zeros_like(terms.value)
        size = self._chunk_size
        writes = [
            (part.targets.flatten(), part.scan(layer, terms, size, out).flatten(0, 1))
            for part in self._direct
        ]
        if self._scanned is not None:
            states = self._scanned.scan(layer, terms, size, out)
            writes.append((self._scanned.targets, states))
        for slots, states in writes:
            self._store.write_states(layer, slots, states)
        return out if skip is None else out.add_(skip)
