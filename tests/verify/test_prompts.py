from __future__ import annotations

import pytest

from heddle.errors import ConfigError
from heddle.verify.prompts import MIN_TEXT_TOKENS, certification_prompts, shipped_text


def prompts(**changes):
    options = {
        "vocab_size": 131,
        "max_model_len": 512,
        "pcp_sizes": [1, 2, 3],
        "num_tokens": 32,
        "text": "abc" * 1000,
    } | changes
    return certification_prompts(None, **options)


def test_the_shipped_text_is_long_enough_for_any_tokenizer():
    words = shipped_text().split()
    assert len(words) >= MIN_TEXT_TOKENS
    assert shipped_text().isascii()


def test_lengths_are_the_text_and_the_awkward_ones():
    found = prompts()
    assert [len(prompt) for prompt in found] == [512 - 32, 1, 2, 3, 5, 7]
    assert found[0][:3] == (97, 98, 99)
    assert all(0 <= token < 131 for prompt in found for token in prompt)


def test_bytes_are_folded_into_a_small_vocabulary():
    assert prompts(vocab_size=90, text="ab" * 10)[0][:2] == (97 - 90, 98 - 90)


def test_a_window_without_room_is_refused_with_one_that_has():
    with pytest.raises(ConfigError, match=r"nearest: 39\)") as caught:
        prompts(max_model_len=38)
    assert "max_model_len=38" in str(caught.value)
    assert len(prompts(max_model_len=39)[0]) == 7
