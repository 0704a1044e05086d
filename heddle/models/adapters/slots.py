"""Low-rank updates beside one product of a rank, several at once.

    out[rows of slot s] += scale_s * (x[rows] @ A_s) @ B_s

Of a matrix whose outputs are cut, a rank needs all of A and its columns of B. Where inputs are cut
it needs its rows of A and all of B, and what ranks make of it adds up to the whole, for the product
is linear: the sum over ranks that closes the layer is the only one needed.

Legend: `M` rows, `r` rank of the adapter, `n` rows of one adapter.

Source: LoRA, arXiv 2106.09685; rank-stabilised scale, arXiv 2312.03732.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from heddle.attention.adapter_rows import AdapterRows
from heddle.models.weights.source import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSite:
    """One matrix of the checkpoint within a product of this rank."""

    module: str
    """Its name without `.weight`."""
    num_outputs: int
    """Of the whole matrix."""
    num_inputs: int
    inputs: Span
    """Inputs that this rank holds."""
    pieces: tuple[tuple[int, Span], ...]
    """(place, outputs): which outputs of the matrix the product has from `place` on."""


@dataclass(frozen=True, slots=True, eq=False)
class LowRankPart:
    """One adapter at one site, as far as this rank needs it."""

    down: torch.Tensor  # [inputs of this rank, r]
    ups: tuple[tuple[int, torch.Tensor], ...]
    """(place, `[r, outputs]`), the scale included."""


class AdapterSlots:
    """The adapters of one product."""

    def __init__(self, sites: Sequence[AdapterSite]) -> None:
        self.sites = tuple(sites)
        self._parts: dict[int, tuple[LowRankPart, ...]] = {}

    @property
    def is_empty(self) -> bool:
        """No adapter changes this product."""
        return not self._parts

    def put(self, slot: int, parts: Sequence[LowRankPart]) -> None:
        """Fill a slot; nothing is kept of an adapter that leaves all sites alone."""
        if parts:
            self._parts[slot] = tuple(parts)

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        self._parts.pop(slot, None)

    def add(self, out: torch.Tensor, x: torch.Tensor, rows: AdapterRows) -> None:
        """Add what adapters make of their rows.

        Args:
            out: `[M, out]`, changed in place.
            x: `[M, in]`.
            rows: of the step.
        """
        for slot, places in rows.groups:
            for part in self._parts.get(slot, ()):
                inner = x[places] @ part.down
                for start, up in part.ups:
                    target = out[:, start : start + up.shape[1]]
                    if isinstance(places, slice):
                        target[places].addmm_(inner, up)
                    else:
                        target.index_add_(0, places, inner @ up)
