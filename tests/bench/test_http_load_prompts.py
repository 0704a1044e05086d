from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.bench.http_load_prompts import WORDS, send_times, text_prompts, token_prompts


@given(st.integers(0, 5), st.integers(1, 20), st.integers(0, 20), st.integers(0, 99))
def test_prompts_have_their_length_and_share_the_prefix(num, length, prefix, seed):
    sizes = {"num": num, "length": length, "prefix": prefix, "seed": seed}
    prompts = token_prompts([3, 5, 8], **sizes)
    assert len(prompts) == num
    assert all(len(prompt) == prefix + length for prompt in prompts)
    assert {each for prompt in prompts for each in prompt} <= {3, 5, 8}
    assert len({tuple(prompt[:prefix]) for prompt in prompts}) <= 1
    assert prompts == token_prompts([3, 5, 8], **sizes)
    texts = text_prompts(**sizes)
    assert all(len(text.split()) == prefix + length for text in texts)
    assert {word for text in texts for word in text.split()} <= set(WORDS)


def test_prompts_differ_behind_the_prefix_and_with_the_seed():
    sizes = {"num": 50, "length": 30, "prefix": 10}
    first = token_prompts(range(1000), **sizes, seed=1)
    assert len({tuple(prompt) for prompt in first}) == 50
    assert all(isinstance(each, int) for prompt in first for each in prompt)
    assert first != token_prompts(range(1000), **sizes, seed=2)
    assert len(set(text_prompts(**sizes, seed=1))) == 50


def test_ids_of_the_whole_pool_are_drawn():
    (prompt,) = token_prompts(range(4), num=1, length=200, prefix=0, seed=0)
    assert set(prompt) == {0, 1, 2, 3}


def test_words_are_many_and_each_is_there_once():
    assert len(WORDS) == len(set(WORDS)) > 60


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(burstiness):
    times = send_times(20_001, rate=8.0, burstiness=burstiness, seed=3)
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert gaps.min() >= 0.0
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_an_infinite_rate_sends_all_at_once():
    assert send_times(3, rate=float("inf"), burstiness=1.0, seed=0) == [0.0, 0.0, 0.0]
    assert send_times(0, rate=2.0, burstiness=1.0, seed=0) == []
    assert send_times(1, rate=2.0, burstiness=1.0, seed=0) == [0.0]
