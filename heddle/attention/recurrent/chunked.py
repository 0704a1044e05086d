"""The recurrence by products of matrices: a chunk of tokens at once.

Inside a chunk, with `G_i` the sum of log decays up to token i and `X` the state before it, token i
reads `exp(G_i) q_i^T X` and, from each token j <= i, `exp(G_i - G_j) (q_i . k_j) u_j^T`. Without
the delta rule `u_j = v_j`. With it, each token first takes back what the state already knows about
its key, a triangular system:

    u_i + b_i * sum over j < i of exp(G_i - G_j) (k_i . k_j) u_j = b_i (v_i - exp(G_i) X^T k_i)

Exponents are differences that are never above zero, so nothing overflows however long a run is. The
sums are kept in float64: G grows with the chunk and its differences are small, which in float32
would cost more digits than all the rest.

Legend: `B` runs, `T` tokens, `h` heads, `K` and `V` key and value width, `n` chunks of `L` tokens.

Source: gated delta, arXiv 2412.06464, with the UT transform of arXiv 2406.06484; Mamba-2,
arXiv 2405.21060.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from heddle.attention.recurrent.reference import scan_tokens
from heddle.attention.recurrent.terms import Terms

MAX_PAIRS = 1 << 18
"""Pairs of tokens of one head that are held at once."""


def scan(terms: Terms, state: torch.Tensor, chunk_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Run tokens from a state, any number of them, in bounded memory; see `scan_chunks`."""
    if terms.num_tokens <= 1:
        return scan_tokens(terms, state)
    # Chunks of a stretch are worked out together, which takes a matrix [L, L] per chunk and head.
    stretch = max(1, MAX_PAIRS // chunk_size**2) * chunk_size
    outs = []
    for start in range(0, terms.num_tokens, stretch):
        out, state = scan_chunks(terms.tokens(start, start + stretch), state, chunk_size)
        outs.append(out)
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1), state


def scan_chunks(
    terms: Terms, state: torch.Tensor, chunk_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run tokens from a state.

    Args:
        terms: `[B, T, h, ...]` in the dtype of the state, T at least 1.
        state: `[B, h, K, V]`; not modified.
        chunk_size: the most tokens taken at once; fewer where that makes chunks equal.
    Returns:
        Readings `[B, T, h, V]`, and the state after the last token.
    """
    num_tokens = terms.num_tokens
    num_chunks = -(-num_tokens // chunk_size)
    size = -(-num_tokens // num_chunks)
    query, key, value = (
        _chunks(tensor, num_chunks, size) for tensor in (terms.query, terms.key, terms.value)
    )
    total = _chunks(terms.log_decay[..., None], num_chunks, size)[..., 0].double().cumsum(-1)
    since_start = total.to(state.dtype).exp()[..., None]  # [B, h, n, L, 1]
    until_end = (total[..., -1:] - total).to(state.dtype).exp()[..., None]
    beta = None if terms.beta is None else _chunks(terms.beta[..., None], num_chunks, size)
    decay = _pair_decays(total, state.dtype)
    weights = (query @ key.transpose(-1, -2)) * decay
    reading = query * since_start
    leaving = (key * until_end).transpose(-1, -2)
    kept = since_start[..., -1:, :]  # [B, h, n, 1, 1]
    known: torch.Tensor | None = None
    if beta is not None:
        value, known = _delta_values(key, value, beta, decay, since_start)
    outs = []
    for i in range(num_chunks):
        new = value[:, :, i] if known is None else value[:, :, i] - known[:, :, i] @ state
        outs.append(reading[:, :, i] @ state + weights[:, :, i] @ new)
        state = state * kept[:, :, i] + leaving[:, :, i] @ new
    out = torch.cat(outs, dim=2)[:, :, :num_tokens]  # [B, h, T, V]
    return out.transpose(1, 2), state


def _chunks(tensor: torch.Tensor, num_chunks: int, size: int) -> torch.Tensor:
    """`[B, T, h, D]` -> `[B, h, n, L, D]`; pads are zeros: no decay, no key, nothing read."""
    pad = num_chunks * size - tensor.shape[1]
    padded = functional.pad(tensor, (0, 0, 0, 0, 0, pad)) if pad else tensor
    return (
        padded.reshape(len(tensor), num_chunks, size, *tensor.shape[2:])
        .permute(0, 3, 1, 2, 4)
        .contiguous()
    )


def _pair_decays(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`[..., L]` -> `[..., L, L]`: `exp(G_i - G_j)` for j <= i, else 0."""
    size = total.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1)
    pairs = (total[..., :, None] - total[..., None, :]).to(dtype)
    # Masked before the exponential: the upper half would overflow.
    return pairs.masked_fill_(later, float("-inf")).exp_()


def _delta_values(
    key: torch.Tensor,
    value: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    since_start: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Solve the triangular system for both of its right sides.

    Returns:
        `[..., L, V]`, the values written from a zero state, and `[..., L, K]`, the keys whose
        readings of the state before the chunk are to be taken back.
    """
    system = beta * (key @ key.transpose(-1, -2)) * decay
    right = torch.cat([value, key * since_start], dim=-1) * beta
    # unitriangular: the diagonal of `system` is not read.
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, known = solved.tensor_split((value.shape[-1],), dim=-1)
    return values, known
