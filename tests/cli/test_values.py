from __future__ import annotations

import argparse

import pytest

from heddle.cli.values import (
    heads,
    integer,
    json_object,
    number,
    overrides,
    size,
    size_or_auto,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("4096", 4096),
        ("32k", 32_000),
        ("32K", 32_768),
        ("25.6k", 25_600),
        ("1.5m", 1_500_000),
        ("2M", 2_097_152),
        ("1g", 1_000_000_000),
        ("1G", 1_073_741_824),
        ("1t", 10**12),
        ("1T", 2**40),
        ("0.001k", 1),
        ("4.35k", 4350),
    ],
)
def test_sizes_read_as_vllm_users_write_them(text, value):
    assert size(text) == value


@pytest.mark.parametrize(
    "text", ["", "k", "-1", "1.5", "1.5K", "0.0001k", "1kb", "1 k", "1e3", "inf"]
)
def test_what_is_not_a_count_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"is (not|finer)"):
        size(text)


def test_numbers_are_converted_or_refused_in_plain_words():
    assert (integer("-2"), number("0.5"), number("1e-3")) == (-2, 0.5, 0.001)
    for convert, text in ((integer, "two"), (integer, "1.5"), (integer, ""), (number, "hot")):
        with pytest.raises(argparse.ArgumentTypeError, match=f"^'{text}' is not a .*such as"):
            convert(text)


def test_auto_is_none():
    assert size_or_auto("auto") is None
    assert size_or_auto("-1") is None
    assert size_or_auto("1k") == 1000


def test_heads_are_two_positive_counts():
    assert heads("64/8") == (64, 8)
    for text in ("64", "64/0", "0/8", "64/8/2", "a/b", "-4/2"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not QUERY/KV"):
            heads(text)


@pytest.mark.parametrize("text", ["", "7", "[1]", "ngram", '{"a": 1', "null"])
def test_only_a_json_object_is_one(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a JSON object such as"):
        json_object(text)
    assert json_object(' {"a": [1, "x"]}') == {"a": [1, "x"]}


def test_overrides_are_one_text_and_nothing_else_is():
    assert overrides('{"b": 1, "a": null}') == '{"a":null,"b":1}'
    assert overrides("") == ""
    with pytest.raises(argparse.ArgumentTypeError, match=r"hf_overrides='\{x' is not legal; it is"):
        overrides("{x")
