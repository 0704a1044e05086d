from __future__ import annotations

import math

import pytest

from heddle.errors import ConfigError, NumericsError
from heddle.verify import tasks
from heddle.verify.prompts import shipped_text
from heddle.verify.tasks import (
    FACT,
    QUESTION,
    accuracy,
    draw_passkeys,
    is_found,
    largest_difference,
    passkeys_that_fit,
    perplexity,
    perplexity_prompt,
    relative_difference,
)


@pytest.mark.parametrize(("length", "count"), [(69, 1), (80, 3), (500, 16), (30_000, 4)])
def test_keys_lie_from_the_start_to_the_question_and_are_drawn_alike(length, count):
    drawn = draw_passkeys(shipped_text(), length=length, count=count)
    assert drawn == draw_passkeys(shipped_text(), length=length, count=count)
    assert len(drawn) == count
    for passkey in drawn:
        assert len(passkey.prompt) == length
        assert passkey.prompt.count(f"{FACT}{passkey.key}. ") == 1
        assert passkey.prompt.endswith(QUESTION)
        assert sum(character.isdigit() for character in passkey.prompt) == len(passkey.key) == 5
        assert len(set(passkey.key)) == 5
    depths = [passkey.prompt.index(FACT) for passkey in drawn]
    assert depths == sorted(depths)
    assert depths[0] == 0
    if length >= 500:
        assert depths[-1] > length - 100


def test_another_seed_draws_other_keys():
    first, second = (draw_passkeys("a word ", length=90, count=4, seed=seed) for seed in "ab")
    assert [passkey.key for passkey in first] != [passkey.key for passkey in second]


def test_a_key_that_does_not_fit_is_refused():
    least = tasks._MIN_LENGTH
    assert len(draw_passkeys("a word ", length=least, count=2)[0].prompt) == least
    with pytest.raises(ConfigError, match=f"nearest: {least}"):
        draw_passkeys("a word ", length=least - 1)


@pytest.mark.parametrize(("bytes_of_token", "window"), [(1, 4096), (1, 300), (2, 300), (1, 80)])
def test_prompts_are_as_long_as_the_window_lets_them(bytes_of_token, window):
    def encode(text):
        return range(math.ceil(len(text) / bytes_of_token))

    drawn = passkeys_that_fit(shipped_text(), encode, max_model_len=window)
    assert len(drawn) == 16
    room = window - tasks.ANSWER_TOKENS
    lengths = {len(passkey.prompt) for passkey in drawn}
    assert lengths == {min(2048, room * bytes_of_token)}
    with pytest.raises(ConfigError, match="larger max_model_len"):
        passkeys_that_fit(shipped_text(), encode, max_model_len=4)


def test_an_answer_is_found_by_its_first_five_digits():
    assert is_found(" 01234.", "01234")
    assert not is_found("0123", "01234")
    assert not is_found("x01234", "01234")
    assert accuracy(["12345.", "54321", ""], ["12345", "54320", "98765"]) == pytest.approx(1 / 3)


def test_perplexity_of_a_uniform_guess_is_the_number_of_words():
    assert perplexity([math.log(1 / 7)] * 5) == pytest.approx(7)
    for impossible in (-math.inf, -1e6, math.nan):
        with pytest.raises(NumericsError, match="mean log-probability"):
            perplexity([impossible, -1.0])


def test_a_perplexity_takes_what_fits_and_at_most_512():
    assert perplexity_prompt(range(9000), max_model_len=4096) == tuple(range(512))
    assert perplexity_prompt(range(9000), max_model_len=64) == tuple(range(63))
    assert perplexity_prompt(range(9000), max_model_len=3) == (0, 1)
    with pytest.raises(ConfigError, match="nearest: 3"):
        perplexity_prompt(range(9000), max_model_len=2)


def test_rounding_is_allowed_and_more_where_types_are_narrow():
    assert relative_difference(9.0, 10.0) == relative_difference(11.0, 10.0) == 0.1
    assert largest_difference("float32", "float32") == largest_difference("float64", "float64")
    assert largest_difference("float32", "float32") == 1e-5
    assert largest_difference("bfloat16", "bfloat16") == 1e-2
    assert largest_difference("float32", "fp8_e4m3") == 1e-2
