"""What the gate means, in plain torch: `silu(first half) * second half`.

Legend: `M` rows, `i` inner width.
Source: gated units, arXiv 2002.05202.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`[..., 2i]`, gate outputs, then up outputs -> `[..., i]`, a fresh tensor."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
