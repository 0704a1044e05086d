"""Chunks of any size equal the recurrence, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heddle.attention.recurrent.chunked import MAX_PAIRS, scan, scan_chunks
from heddle.attention.recurrent.reference import scan_tokens
from heddle.attention.recurrent.terms import Terms
from tests.support.recurrence import draw_sequence, recurrence, split_heads

HEADS, KEY, VALUE = 3, 5, 4


def draw(seed: int, tokens: int, is_delta: bool, dtype: torch.dtype = torch.float64):  # type: ignore[no-untyped-def]
    """Terms `[T, ...]` with the readings and states that the oracle finds."""
    sequence = draw_sequence(np.random.default_rng(seed), tokens, HEADS, KEY, VALUE, is_delta)
    parts = split_heads(sequence.channels, HEADS, KEY, VALUE)
    beta = None if sequence.beta is None else torch.tensor(sequence.beta)
    terms = Terms(*map(torch.tensor, parts), torch.tensor(sequence.log_decay), beta)
    out, states = recurrence(sequence, HEADS, KEY, VALUE)
    return terms.to(dtype), torch.tensor(out), [torch.tensor(state) for state in states]


@given(
    tokens=st.integers(1, 20),
    before=st.integers(0, 5),
    chunk_size=st.integers(1, 9),
    is_delta=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_chunk_size_from_any_state_equals_the_recurrence(
    tokens: int, before: int, chunk_size: int, is_delta: bool, seed: int
) -> None:
    terms, out, states = draw(seed, before + tokens, is_delta)
    run = terms.pick(slice(before, None)).batched()
    for result in (
        scan_chunks(run, states[before][None], chunk_size),
        scan_tokens(run, states[before][None]),
        scan(run, states[before][None], chunk_size),
    ):
        assert (result[0][0] - out[before:]).abs().max() <= 1e-12
        assert (result[1][0] - states[-1]).abs().max() <= 1e-12


@pytest.mark.parametrize("is_delta", [False, True])
def test_runs_of_a_batch_do_not_meet(is_delta: bool) -> None:
    drawn = [draw(seed, 7, is_delta) for seed in range(3)]
    terms = [item[0] for item in drawn]
    joined = Terms(
        *(torch.cat([getattr(t, name) for t in terms]) for name in ("query", "key", "value")),
        torch.cat([t.log_decay for t in terms]),
        torch.cat([t.beta for t in terms if t.beta is not None]) if is_delta else None,
    ).pick(torch.arange(21).view(3, 7))
    out, state = scan_chunks(joined, torch.zeros(3, HEADS, KEY, VALUE, dtype=torch.float64), 4)
    for run, (_, expected, states) in enumerate(drawn):
        assert (out[run] - expected).abs().max() <= 1e-12
        assert (state[run] - states[-1]).abs().max() <= 1e-12


def test_strong_decays_neither_overflow_nor_turn_into_nan() -> None:
    terms, _, _ = draw(1, 64, True, torch.float32)
    strong = Terms(terms.query, terms.key, terms.value, terms.log_decay * 400, terms.beta)
    zero = torch.zeros(1, HEADS, KEY, VALUE)
    out, state = scan_chunks(strong.batched(), zero, 32)
    expected, expected_state = scan_tokens(strong.batched(), zero)
    assert out.isfinite().all()
    assert (out - expected).abs().max() <= 1e-4
    assert (state - expected_state).abs().max() <= 1e-5


@pytest.mark.parametrize("is_delta", [False, True])
def test_runs_longer_than_a_stretch(is_delta: bool) -> None:
    """Chunks so large that only one is held at once; the last stretch is a short one."""
    chunk_size = 1 + int(MAX_PAIRS**0.5)
    terms, out, states = draw(2, 2 * chunk_size + 9, is_delta)
    zero = states[0][None]
    found, state = scan(terms.batched(), zero, chunk_size)
    assert (found[0] - out).abs().max() <= 1e-12
    assert (state[0] - states[-1]).abs().max() <= 1e-12


@pytest.mark.parametrize("is_delta", [False, True])
def test_float32_chunks_are_as_exact_as_float32_tokens(is_delta: bool) -> None:
    """Long runs: the error of chunks is at most twice that of token after token."""
    terms, out, _ = draw(3, 300, is_delta, torch.float32)
    zero = torch.zeros(1, HEADS, KEY, VALUE)
    by_tokens = (scan_tokens(terms.batched(), zero)[0][0] - out).abs().max()
    by_chunks = (scan_chunks(terms.batched(), zero, 64)[0][0] - out).abs().max()
    assert by_chunks <= 2 * by_tokens + torch.finfo(torch.float32).eps * out.abs().max()
