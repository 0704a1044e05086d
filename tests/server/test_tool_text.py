"""Under the parsers of tool calls: marks in text, and the grammar of JSON."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from heddle.server.pieces import Content, PlainText
from heddle.server.tool_parsers.json_object import JsonObject
from heddle.server.tool_parsers.marks import Marks, WithoutMarks
from tests.support.pieces import cut, parse

places = st.lists(st.integers(0, 400), max_size=30)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    st.lists(st.sampled_from(["ab", "abc", "b", "c", "<|a|>", "<|a", "|>", " "])).map("".join),
    st.sets(st.sampled_from(["ab", "abcd", "bc", "<|a|>", "<|"])),
    places,
)
@example("abcd", {"abcd", "bc"}, [3])
@example("abce", {"abcd", "bc"}, [3])
def test_marks_are_taken_out_for_all_cuts(text: str, marks: set[str], places: list[int]) -> None:
    whole = parse(WithoutMarks(Marks(marks), PlainText()), text)
    assert parse(WithoutMarks(Marks(marks), PlainText()), *cut(text, places)) == whole
    in_order = sorted(marks, key=len)
    pattern = "|".join(map(re.escape, in_order)) or r"(?!)"
    left = re.sub(pattern, "", text)
    assert whole == ([Content(left)] if left else [])


@given(st.data(), st.dictionaries(st.text(max_size=6), json_values, max_size=3))
def test_objects_are_those_of_json(data: st.DataObject, value: dict[str, Any]) -> None:
    text = json.dumps(value, ensure_ascii=False) + "}"
    for _ in range(data.draw(st.integers(0, 2))):
        place = data.draw(st.integers(0, len(text) - 1))
        text = (
            text[:place]
            + data.draw(st.sampled_from('{}[]",:\\ 01.e-+tun\n\x1f'))
            + text[place + 1 :]
        )
    machine = JsonObject()
    taken = next((i for i, character in enumerate(text) if not machine.step(character)), len(text))
    try:
        if text[:1] != "{":
            raise ValueError
        _, end = json.JSONDecoder(parse_constant=no_constant).raw_decode(text)
    except ValueError:
        assert not machine.is_done
    else:
        assert machine.is_done
        assert taken == end


def no_constant(name: str) -> None:
    raise ValueError(name)


@pytest.mark.parametrize("number", ["0", "-0", "10", "1.5", "1e5", "1E-5", "-1.25e+10"])
def test_numbers_of_json_are_taken(number: str) -> None:
    text = f'{{"a":{number}}}'
    machine = JsonObject()
    assert all(machine.step(character) for character in text)
    assert machine.is_done


@pytest.mark.parametrize(
    ("number", "place"),
    [("01", 1), ("1.", 2), (".5", 0), ("+1", 0), ("--1", 1), ("1e", 2), ("NaN", 0)],
)
def test_other_numbers_are_refused_at_once(number: str, place: int) -> None:
    machine = JsonObject()
    refused = [machine.step(character) for character in f'{{"a":{number}}}'].index(False)
    assert refused == len('{"a":') + place


@pytest.mark.parametrize("character", ["\n", "\t", "\x00", "\x1f"])
def test_control_characters_in_strings_are_refused(character: str) -> None:
    machine = JsonObject()
    assert [machine.step(each) for each in f'{{"a{character}'] == [True, True, True, False]


@pytest.mark.parametrize(("escape", "place"), [('\\u00e"', 5), ("\\ug", 2), ("\\x", 1), ("\\ ", 1)])
def test_other_escapes_are_refused_at_once(escape: str, place: int) -> None:
    machine = JsonObject()
    assert [machine.step(each) for each in f'{{"{escape}'].index(False) == 2 + place
