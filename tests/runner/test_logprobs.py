from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heddle.runner.logprobs import finite_rows, prompt_logprobs, token_logprobs, widen


@given(
    st.lists(st.sampled_from([-2.0, 0.0, 0.25, 1.0]), min_size=3, max_size=40),
    st.integers(0, 20),
    st.data(),
)
def test_values_equal_a_plain_log_softmax(
    row: list[float], count: int, data: st.DataObject
) -> None:
    token = data.draw(st.integers(0, len(row) - 1))
    found = token_logprobs(torch.tensor(row, dtype=torch.float64), token, count)
    total = math.log(sum(math.exp(x) for x in row))
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:count]
    assert found.token_id == token
    assert found.logprob == pytest.approx(row[token] - total, abs=1e-12)
    assert found.rank == 1 + sum(x > row[token] for x in row)
    assert list(found.top_token_ids) == order
    assert list(found.top_logprobs) == pytest.approx([row[i] - total for i in order], abs=1e-12)


def test_chosen_value_is_the_same_float_in_both_places() -> None:
    row = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    best = int(row.argmax())
    found = token_logprobs(row, best, 5)
    assert found.rank == 1
    assert found.top_token_ids[0] == best
    assert found.top_logprobs[0] == found.logprob


def test_prompt_rows_equal_single_rows_across_slices() -> None:
    logits = torch.randn(70, 50, generator=torch.Generator().manual_seed(2))
    targets = [(7 * i) % 50 for i in range(70)]
    found = prompt_logprobs(logits, targets, 3)
    assert len(found) == 70
    assert found == tuple(token_logprobs(logits[i], targets[i], 3) for i in range(70))
    assert prompt_logprobs(logits[:0], [], 3) == ()


def test_prompt_row_that_is_not_finite_gives_nothing() -> None:
    logits = torch.zeros(40, 5)
    logits[37, 2] = math.nan
    assert prompt_logprobs(logits, [0] * 40, 1) == ()
    with pytest.raises(ValueError, match="3 targets for 40 rows"):
        prompt_logprobs(logits, [0] * 3, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_finite_check_sees_one_bad_number(bad: float) -> None:
    logits = torch.randn(3, 97)
    logits[1, 96] = bad
    assert finite_rows(logits).tolist() == [True, False, True]
    assert finite_rows(logits.to(torch.bfloat16)).tolist() == [True, False, True]


def test_narrow_types_are_widened_and_wide_ones_kept() -> None:
    assert widen(torch.zeros(1, dtype=torch.bfloat16)).dtype is torch.float32
    for dtype in (torch.float32, torch.float64):
        assert widen(torch.zeros(1, dtype=dtype)).dtype is dtype
