from __future__ import annotations

import pytest

from heddle.config.speculative import SpeculativeConfig, speculative_config
from heddle.errors import ConfigError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "eagle"}, "method=eagle is not known; legal here: ngram"),
        ({"num_speculative_tokens": 0}, r"num_speculative_tokens=0 .*\(nearest: 1\)"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens=True .* whole number"),
        ({"prompt_lookup_min": 2.0}, "prompt_lookup_min=2.0 .* whole number"),
        (
            {"prompt_lookup_min": 5, "prompt_lookup_max": 3},
            r"prompt_lookup_min=5 .* prompt_lookup_max=3 \(nearest: 3\)",
        ),
        ({"prompt_lookup_max": 65}, r"prompt_lookup_max=65 .* at most 64 \(nearest: 64\)"),
        ({"prompt_lookup_max": 10**20}, r"prompt_lookup_max=1.* at most 64 \(nearest: 64\)"),
    ],
)
def test_a_value_that_is_not_legal_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig(**fields)  # type: ignore[arg-type]


def test_the_longest_lookup_is_legal() -> None:
    assert SpeculativeConfig(prompt_lookup_max=64).prompt_lookup_max == 64


def test_a_mapping_becomes_the_class() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 3}
    expected = SpeculativeConfig(num_speculative_tokens=7, prompt_lookup_max=3)
    assert speculative_config(given) == expected
    assert speculative_config(expected) is expected
    assert speculative_config({}) == SpeculativeConfig()
    assert speculative_config(None) is None


@pytest.mark.parametrize("given", ["ngram", 4, ["ngram"], True])
def test_what_is_no_mapping_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match=r"speculative_config=.* maps names to values"):
        speculative_config(given)


def test_an_unknown_key_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"has no 'num_speculative_token'.*nearest: num_spec"):
        speculative_config({"num_speculative_token": 3})
    with pytest.raises(ConfigError, match="has no 'draft_tensor_parallel_size'"):
        speculative_config({"draft_tensor_parallel_size": 1})
