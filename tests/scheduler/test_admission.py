from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.errors import PromptTooLong, RequestError
from heddle.scheduler.admission import kv_tokens_needed, resolve_room

SIZES = st.integers(1, 100)


@given(SIZES, SIZES, SIZES, st.none() | st.integers(0, 200))
def test_the_room_is_the_largest_completion_that_fits_both_bounds(prompt, window, usable, asked):
    fitting = [
        output
        for output in range(1, 201)
        if prompt + output <= window and prompt + output - 1 <= usable
    ]
    if not fitting:
        with pytest.raises(PromptTooLong):
            resolve_room(prompt, asked, window=window, usable_tokens=usable)
        return
    room = resolve_room(prompt, asked, window=window, usable_tokens=usable)
    assert room == (fitting[-1] if asked is None else min(asked, fitting[-1]))


@pytest.mark.parametrize("asked", [None, 0, 1, 10**9])
def test_over_the_pool_has_the_three_numbers(asked):
    with pytest.raises(PromptTooLong, match="needs 70, usable 64, window 96") as caught:
        resolve_room(70, asked, window=96, usable_tokens=64)
    assert caught.value.code == "kv_capacity_exceeded"
    assert "--kv-cache-memory-bytes" in str(caught.value)


@pytest.mark.parametrize(("prompt", "largest"), [(96, 0), (97, 0), (200, 0)])
def test_over_the_window_has_the_four_numbers(prompt, largest):
    with pytest.raises(PromptTooLong, match="maximum context length is 96 tokens") as caught:
        resolve_room(prompt, 7, window=96, usable_tokens=64)
    text = str(caught.value)
    assert caught.value.code == "context_length_exceeded"
    assert f"the prompt has {prompt} tokens and 7 completion tokens" in text
    assert f"the largest completion possible with this prompt is {largest} tokens" in text
    assert "the longest prompt 95 tokens" in text
    assert resolve_room(95, 7, window=96, usable_tokens=95) == 1


@pytest.mark.parametrize(
    ("prompt", "asked", "text"),
    [(0, 1, "0 tokens; at least 1"), (1, -1, "max_tokens=-1; must be at least 0")],
)
def test_senseless_sizes_are_refused(prompt, asked, text):
    with pytest.raises(RequestError, match=text):
        resolve_room(prompt, asked, window=9, usable_tokens=9)


def test_the_last_token_is_never_stored():
    assert [kv_tokens_needed(8, output) for output in (0, 1, 2, 57)] == [8, 8, 9, 64]
