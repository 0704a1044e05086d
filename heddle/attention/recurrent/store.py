"""Recurrent states of one rank: a small pool of slots, one tensor per layer.

A slot holds the state of one sequence after some token, with the last inputs of the convolution.
Slot 0 reads as zeros, the state before any token, and is never written. Slots need not be cleared
when they change hands: a new sequence starts from slot 0.

Legend: `B` slots asked for, `h` heads of this rank, `K` and `V` key and value width, `W` taps, `C`
channels of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from heddle.layout.recurrent_heads import RecurrentLayout
from heddle.step.batch import StateCopy


class StateStore:
    """The states of the recurrent layers that a rank holds.

    Args:
        layout: the cut of a layer.
        tp_rank: whose part.
        layers: global indices of the layers.
        num_slots: slots of the pool, slot 0 included.
        dtype: of the model, and of the remembered inputs; states are float32, or wider where the
            model is.
        device: of the tensors.
    """

    def __init__(
        self,
        layout: RecurrentLayout,
        tp_rank: int,
        *,
        layers: Sequence[int],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.dtype = torch.promote_types(dtype, torch.float32)
        self.device = device
        # Slots that were never written stay uncommitted, so a large pool costs what is used.
        state, history = layout.state_shape(tp_rank), layout.history_shape(tp_rank)
        self._states = {
            layer: torch.empty((num_slots, *state), dtype=self.dtype, device=device)
            for layer in layers
        }
        self._histories = {
            layer: torch.empty((num_slots, *history), dtype=dtype, device=device)
            for layer in layers
        }
        for pool in self._pools():
            pool[0] = 0

    def states(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """`[B]` slots -> a copy of their states, `[B, h, K, V]`."""
        return self._states[layer].index_select(0, slots)

    def histories(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """`[B]` slots -> a copy of their last inputs, `[B, W - 1, C]`, the latest one last."""
        return self._histories[layer].index_select(0, slots)

    def write_states(self, layer: int, slots: torch.Tensor, states: torch.Tensor) -> None:
        """Store `[B, h, K, V]` in `[B]` slots, none of them 0 or named twice."""
        self._states[layer].index_copy_(0, slots, states)

    def write_histories(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Store `[B, W - 1, C]` in `[B]` slots, none of them 0 or named twice."""
        self._histories[layer].index_copy_(0, slots, rows)

    def copy(self, copies: Sequence[StateCopy]) -> None:
        """Copy slots, one after another in this order; slot 0 may be a source."""
        for copy in copies:
            assert copy.target != 0, "slot 0 is never written"
            for pool in self._pools():
                pool[copy.target] = pool[copy.source]

    def wipe(self, slots: Sequence[int]) -> None:
        """Overwrite slots with zeros, after a request that produced NaN."""
        for pool in self._pools():
            for slot in slots:
                pool[slot] = 0

    def _pools(self) -> tuple[torch.Tensor, ...]:
        return (*self._states.values(), *self._histories.values())
