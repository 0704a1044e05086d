"""The two forms of latent attention are the same function."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from heddle.attention.backends import create_backend
from heddle.attention.kinds.mla import MLAKind
from heddle.layout.heads import HeadRun


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 9), st.integers(0, 10**6))
def test_absorbed_equals_per_head(rows: int, heads: int, keys: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    kind = MLAKind(
        draw(rows, heads, 6), draw(rows, heads, 4), draw(rows, 14), draw(heads, 6, 10),
        draw(heads, 10, 5), 0.3,
    )  # fmt: skip
    stored = draw(keys, 1, 14)
    runs = [HeadRun(0, 0, heads)]
    backend = create_backend("reference")
    key, value = kind.stored(stored)
    absorbed = backend.attend(kind.travelling_query, key, value, runs, keys, kind.scale)
    key, value = kind.expand(stored)
    per_head = backend.attend(
        kind.staying_query, key, value, kind.staying_runs(runs), keys, kind.scale
    )
    torch.testing.assert_close(kind.finish(absorbed.out), per_head.out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(absorbed.lse, per_head.lse, rtol=1e-12, atol=1e-12)


def test_each_lane_reads_its_own_expanded_head_and_pads_none() -> None:
    kind = MLAKind(*(torch.zeros(1, 3, 2),) * 2, torch.zeros(1, 6), *(torch.zeros(3, 2, 4),) * 2, 1)
    assert kind.staying_runs([HeadRun(0, 0, 2)]) == [HeadRun(0, 0, 1), HeadRun(1, 1, 2)]


def test_a_partial_keeps_its_width_through_the_up_projection() -> None:
    """It may merge with a self part, so a 16-bit model must not round it here."""
    generator = torch.Generator().manual_seed(3)
    value_up = torch.randn(3, 4, 2, generator=generator).bfloat16()
    narrow = torch.zeros(1, 3, 2, dtype=torch.bfloat16)
    kind = MLAKind(narrow, narrow, torch.zeros(1, 6).bfloat16(), narrow.mT[0][None], value_up, 1)
    partial = torch.randn(5, 3, 4, generator=generator)
    found = kind.finish(partial)
    assert found.dtype == torch.float32
    expected = torch.stack(
        [partial[:, head].double() @ value_up[head].double() for head in range(3)], dim=1
    )
    assert (found - expected).abs().max() <= 1e-6
