"""Overrides have one text per meaning, merge as RFC 7396 says, and are refused when malformed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.config.overrides import merge_overrides, override_keys, overrides_text
from heddle.errors import ConfigError

LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers())
KEYS = st.sampled_from("abcd")
OBJECTS = st.recursive(
    st.dictionaries(KEYS, LEAVES, max_size=3),
    lambda inner: st.dictionaries(KEYS, LEAVES | inner, max_size=3),
    max_leaves=8,
)


def patched(target: Any, patch: Any) -> Any:
    """The pseudo code of RFC 7396, section 2."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = patched(result.get(name), value)
    return result


@given(OBJECTS, OBJECTS)
def test_a_merge_is_the_standards(config: dict[str, Any], patch: dict[str, Any]) -> None:
    before = json.dumps(config)
    assert merge_overrides(config, overrides_text(patch)) == patched(config, patch)
    assert json.dumps(config) == before


@given(OBJECTS)
def test_mapping_and_text_are_one(patch: dict[str, Any]) -> None:
    text = overrides_text(patch)
    assert overrides_text(json.dumps(patch, indent=1)) == overrides_text(text) == text
    assert (text == "") == (patch == {})
    reversed_patch = dict(reversed(patch.items()))
    assert overrides_text(reversed_patch) == text


def test_nothing_is_the_empty_text() -> None:
    assert [overrides_text(nothing) for nothing in (None, "", {}, "{}")] == [""] * 4
    assert override_keys("") == ()
    assert merge_overrides({"a": 1}, "") == {"a": 1}


@pytest.mark.parametrize(
    "given_value", ["{", "[1]", "3", 7, [("a", 1)], {1: 2}, {"a": float("nan")}, {"a": object()}]
)
def test_anything_but_an_object_is_refused_with_its_value(given_value: object) -> None:
    with pytest.raises(ConfigError, match=r"hf_overrides=.*JSON object of values of config\.json"):
        overrides_text(given_value)


def test_a_number_that_json_lacks_is_refused_in_text_too() -> None:
    with pytest.raises(ConfigError, match="NaN"):
        overrides_text('{"a": NaN}')
