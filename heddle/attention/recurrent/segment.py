"""A run of tokens as an affine map of the state before it.

From a zero state a segment gives readings `y_t` and leaves `Psi`. Whatever state X it really starts
from, linearity adds the rest:

    readings   y_t + r_t^T X          r_t = Phi_(..t)^T q_t, the segment's reach
    state      Phi X + Psi

Under the delta rule Phi is a matrix. It is the state that the same keys make of the identity when
all values are zero, so one scan over values `[v | 0]` from the state `[0 | I]` gives `y`, `r`,
`Psi` and `Phi` together. Elsewhere Phi is a number, the product of all decays.

Legend: `T` tokens, `h` heads, `K` and `V` key and value width, `F` elements of Phi per head.

Source: derived here from the updates in `heddle.attention.recurrent`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from heddle.attention.recurrent.chunked import scan
from heddle.attention.recurrent.terms import Terms


@dataclass(frozen=True, slots=True)
class SegmentMap:
    """`X -> Phi X + Psi`."""

    psi: torch.Tensor  # [h, K, V]
    phi: torch.Tensor  # [h, K, K], or [h, 1, 1] for a number

    def apply(self, state: torch.Tensor) -> torch.Tensor:
        """`[h, K, V]` before the segment -> after it."""
        if self.phi.shape[-1] == 1:
            return self.phi * state + self.psi
        return torch.baddbmm(self.psi, self.phi, state)

    def pack(self) -> torch.Tensor:
        """`[h, K * V + F]`, as it travels."""
        return torch.cat([self.psi.flatten(1), self.phi.flatten(1)], dim=1)

    @classmethod
    def unpack(cls, packed: torch.Tensor, key_dim: int, value_dim: int) -> SegmentMap:
        """The map of a packed one."""
        psi, phi = packed.tensor_split((key_dim * value_dim,), dim=1)
        size = 1 if phi.shape[1] == 1 else key_dim
        return cls(psi.reshape(-1, key_dim, value_dim), phi.reshape(-1, size, size))


@dataclass(frozen=True, slots=True)
class Segment:
    """Readings from a zero state, and what they and the state lack."""

    out: torch.Tensor  # [T, h, V]
    reach: torch.Tensor  # [T, h, K]
    map: SegmentMap

    def read(self, state: torch.Tensor) -> torch.Tensor:
        """`[T, h, V]`: the readings when the segment starts from `state [h, K, V]`."""
        return self.out + torch.einsum("thk,hkv->thv", self.reach, state)


def run_segment(terms: Terms, chunk_size: int) -> Segment:
    """Run a segment from zero.

    Args:
        terms: `[T, h, ...]` in the dtype of the state; T may be 0, which is the identity.
        chunk_size: see `scan_chunks`.
    """
    terms = terms.batched()
    if terms.beta is not None:
        return _delta_segment(terms, chunk_size)
    _, _, heads, key_dim = terms.key.shape
    zeros = terms.value.new_zeros(1, heads, key_dim, terms.value.shape[-1])
    out, psi = scan(terms, zeros, chunk_size)
    total = terms.log_decay[0].double().cumsum(0)  # [T, h], in float64 as in `scan_chunks`
    phi = terms.log_decay[0].double().sum(0).to(zeros.dtype).exp()[:, None, None]
    reach = terms.query[0] * total.to(zeros.dtype).exp()[..., None]
    return Segment(out[0], reach, SegmentMap(psi[0], phi))


def _delta_segment(terms: Terms, chunk_size: int) -> Segment:
    heads, key_dim = terms.key.shape[2:]
    width = terms.value.shape[-1]
    start = terms.value.new_zeros(1, heads, key_dim, width + key_dim)
    start[..., width:] = torch.eye(key_dim, dtype=start.dtype, device=start.device)
    wide = terms.with_value(functional.pad(terms.value, (0, key_dim)))
    out, state = scan(wide, start, chunk_size)
    return Segment(
        out[0, ..., :width],
        out[0, ..., width:],
        SegmentMap(state[0, ..., :width], state[0, ..., width:]),
    )
