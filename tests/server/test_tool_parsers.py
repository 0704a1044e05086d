"""Calls in the text of models: the same for all cuts, as the model wrote them, and nothing lost."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.errors import ConfigError
from heddle.server.pieces import (
    CallArguments,
    CallBegins,
    Content,
    FirstCall,
    Piece,
    PieceParser,
)
from heddle.server.tool_parsers import (
    CallText,
    find_tool_parser,
    new_call_id,
    suggest_tool_parser,
    tool_parser_names,
)
from heddle.server.tool_parsers.deepseek_v3 import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEPARATOR,
)
from heddle.server.tool_parsers.forced import REQUIRED, only
from tests.support.pieces import cut, joined, parse

Call = tuple[str, str]
"""Name and arguments."""


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in calls
    )


def llama(calls: Sequence[Call]) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {text}}}' for name, text in calls)


def tagged_llama(calls: Sequence[Call]) -> str:
    return "<|python_tag|>" + llama(calls)


def deepseek(calls: Sequence[Call]) -> str:
    each = (
        f"{CALL_BEGIN}function{SEPARATOR}{name}\n```json\n{text}\n```{CALL_END}"
        for name, text in calls
    )
    return CALLS_BEGIN + "\n".join(each) + CALLS_END


def newer_deepseek(calls: Sequence[Call]) -> str:
    each = (f"{CALL_BEGIN}{name}{SEPARATOR}{text}{CALL_END}" for name, text in calls)
    return CALLS_BEGIN + "".join(each) + CALLS_END


def required(calls: Sequence[Call]) -> str:
    each = (f'{{"name": "{name}", "parameters": {text}}}' for name, text in calls)
    return "[" + ", ".join(each) + "]"


WRITERS = {
    "hermes": (hermes, "hermes"),
    "llama3_json": (llama, "llama3_json"),
    "llama3_json, tag": (tagged_llama, "llama3_json"),
    "deepseek_v3": (deepseek, "deepseek_v3"),
    "deepseek_v3.1": (newer_deepseek, "deepseek_v3"),
    "required": (required, "required"),
}
TAKES_TEXT = ("hermes", "llama3_json, tag", "deepseek_v3", "deepseek_v3.1")


def new_parser(name: str) -> PieceParser:
    ids = (f"call_{number}" for number in itertools.count())
    if name == "required":
        return CallText(REQUIRED, lambda: next(ids))
    return find_tool_parser(name).create(lambda: next(ids))


def called(*calls: Call, first: int = 0) -> list[Piece]:
    """What these calls are, as pieces."""
    return [
        piece
        for index, (name, arguments) in enumerate(calls, first)
        for piece in (
            CallBegins(index, f"call_{index}", name),
            CallArguments(index, arguments),
        )
    ]


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=4,
)
objects = st.dictionaries(st.text(max_size=6), json_values, max_size=3)
written = st.builds(
    lambda value, indent, is_ascii: json.dumps(value, indent=indent, ensure_ascii=is_ascii),
    objects,
    st.sampled_from([None, 0, 2]),
    st.booleans(),
)
names = st.from_regex(r"[a-zA-Z0-9_-]{1,12}", fullmatch=True)
calls = st.lists(st.tuples(names, written), min_size=1, max_size=2)
places = st.lists(st.integers(0, 400), max_size=30)
words = st.text("abc .,", max_size=12).map(str.strip)

BITS = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<tool",
        "_call>",
        "</",
        "<|python_tag|>",
        "<|",
        ";",
        "[",
        "]",
    ),
    *(CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR, "<\uff5ctool\u2581", "function"),
    *('{"name": "f", ', '"arguments": {"a": [1, "}"]}', '"parameters":{', "}", "{", '"', "\\", ","),
    *("\n", " ", "```json\n", "\n```", "text", "1.5e3", '"name": ', '"f"', ": ", "\U0001f9f5"),
    *(write([("f", '{"a": "<tool_call>"}'), ("g", "{}")]) for write, _ in WRITERS.values()),
)
scraps = st.lists(st.sampled_from(BITS), max_size=9).map("".join)


@pytest.mark.parametrize("name", [*tool_parser_names(), "required"])
@given(text=scraps, places=places)
def test_all_cuts_of_a_text_give_the_same(name: str, text: str, places: list[int]) -> None:
    whole = parse(new_parser(name), text)
    assert parse(new_parser(name), *cut(text, places)) == whole
    assert parse(new_parser(name), *text) == whole


@pytest.mark.parametrize("name", [*tool_parser_names(), "required"])
@given(text=scraps)
def test_a_text_without_a_call_is_content_to_the_last_character(name: str, text: str) -> None:
    found = parse(new_parser(name), text)
    if not any(isinstance(piece, CallBegins) for piece in found):
        assert found == ([Content(text)] if text else [])
    else:
        kept = "".join(getattr(piece, "text", "") for piece in found)
        assert is_subsequence(kept, text)


def is_subsequence(part: str, whole: str) -> bool:
    rest = iter(whole)
    return all(character in rest for character in part)


@pytest.mark.parametrize("form", WRITERS)
@settings(max_examples=30)
@given(calls=calls, places=places)
def test_calls_are_what_the_model_wrote(form: str, calls: list[Call], places: list[int]) -> None:
    write, name = WRITERS[form]
    assert parse(new_parser(name), *cut(write(calls), places)) == called(*calls)


@pytest.mark.parametrize("form", TAKES_TEXT)
@settings(max_examples=30)
@given(calls=calls, before=words, after=words)
def test_text_around_calls_is_content(
    form: str, calls: list[Call], before: str, after: str
) -> None:
    write, name = WRITERS[form]
    expected = called(*calls)
    if before:
        expected.insert(0, Content(before))
    if after:
        expected.append(Content(after))
    assert parse(new_parser(name), f"{before}\n{write(calls)}\n{after}") == expected


@pytest.mark.parametrize("form", WRITERS)
def test_arguments_come_as_they_are_written(form: str) -> None:
    write, name = WRITERS[form]
    text = write([("search", '{"query": "loom", "n": [1, {"a": "\\"}"}]}')])
    parser = new_parser(name)
    end = text.index('"loom')
    pieces = joined(parser.push(text[: end + 4]))
    assert pieces == [CallBegins(0, "call_0", "search"), CallArguments(0, '{"query": "loo')]
    pieces += parser.push(text[end + 4 : text.index('"n"')])
    assert joined(pieces)[-1] == CallArguments(0, '{"query": "loom", ')


@pytest.mark.parametrize("form", WRITERS)
def test_an_answer_that_is_cut_short_keeps_what_it_called(form: str) -> None:
    write, name = WRITERS[form]
    text = write([("f", '{"a": 1, "b": 22}')])
    begun = text.index('{"a"') + 1
    for end in range(len(text)):
        found = parse(new_parser(name), text[:end])
        if end < begun:
            assert found == ([Content(text[:end])] if end else [])
        else:
            given = text[begun - 1 : end][: len('{"a": 1, "b": 22}')]
            assert found == called(("f", given))


def test_arguments_before_the_name_wait_for_it() -> None:
    parser = new_parser("hermes")
    assert parser.push('<tool_call>{"arguments": {"a": 1}, "id": 7, "name": "f"') == [
        CallBegins(0, "call_0", "f"),
        CallArguments(0, '{"a": 1}'),
    ]
    assert parser.push("}</tool_call>") + parser.finish() == []


@pytest.mark.parametrize(
    "body",
    [
        "text",
        "{}",
        '{"name": "f"}',
        '{"name": 3, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "f", "arguments": "{}"}',
        '{"name": "f", "name": "g", "arguments": {}}',
        '{"name": "f" "arguments": {}}',
        '{"name": f, "arguments": {}}',
        '{"arguments": {}}',
        '["f", {}]',
    ],
)
def test_what_is_no_call_is_content_and_the_next_call_counts(body: str) -> None:
    text = f"So:\n<tool_call>{body}</tool_call>"
    assert parse(new_parser("hermes"), text) == [Content(text)]
    more = text + hermes([("g", "{}")])
    assert parse(new_parser("hermes"), *more) == [Content(text), *called(("g", "{}"))]
    assert parse(new_parser("llama3_json"), body) == [Content(body)]


@pytest.mark.parametrize(
    ("kept", "rest"), [('{"a": ', "'x'}}</tool_call>"), ('{"a": "x', '\n y"}}</tool_call>')]
)
def test_a_call_that_breaks_ends_and_the_rest_is_content(kept: str, rest: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {kept}{rest}'
    assert parse(new_parser("hermes"), text) == [*called(("f", kept)), Content(rest)]


def test_a_call_counts_without_its_closing_mark() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}'
    assert parse(new_parser("hermes"), call + call) == called(("f", "{}"), ("f", "{}"))
    found = parse(new_parser("hermes"), call + "</tool_so")
    assert found == [*called(("f", "{}")), Content("</tool_so")]


def test_a_json_answer_of_llama_is_content() -> None:
    text = '{"name": "Jacquard", "born": 1752}'
    assert parse(new_parser("llama3_json"), text, "\n") == [Content(text + "\n")]
    call = '{"type": "function", "name": "f", "parameters": {"a": 1}};'
    assert parse(new_parser("llama3_json"), call) == called(("f", '{"a": 1}'))


def test_one_function_takes_the_whole_answer() -> None:
    text = '\n{"a": {"name": "g", "parameters": {}}}\n'
    parser = CallText(only("f"), lambda: "call_0")
    assert parse(parser, *text) == called(("f", text.strip()))


def test_calls_after_the_first_are_dropped() -> None:
    parser = FirstCall(new_parser("hermes"))
    text = hermes([("f", '{"a": 1}'), ("g", "{}")]) + "end"
    assert parse(parser, *text) == [*called(("f", '{"a": 1}')), Content("end")]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('<tool_call>\n{"name": ..., "arguments": ...}', "hermes"),
        ('{{ "<|python_tag|>" }}{"name": ..., "parameters": ...}', "llama3_json"),
        (f"{{{{ '{CALLS_BEGIN}{CALL_BEGIN}' }}}}", "deepseek_v3"),
    ],
)
def test_a_template_suggests_its_format(template: str, name: str) -> None:
    assert suggest_tool_parser(template) is find_tool_parser(name)


@pytest.mark.parametrize(
    "template", ["", "plain", "<tool_call>\n<function=f>", "<tool_call>f<arg_key>"]
)
def test_other_templates_suggest_nothing(template: str) -> None:
    assert suggest_tool_parser(template) is None


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'hermse' is not known; legal here: hermes, llama3_json"):
        find_tool_parser("hermse")


def test_marks_of_a_format_are_all_that_stands_around_calls() -> None:
    marks = {CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR, "```json", "```"}
    assert find_tool_parser("deepseek_v3").marks == marks
    assert find_tool_parser("hermes").marks == {"<tool_call>", "</tool_call>"}


def test_ids_are_random() -> None:
    found = {new_call_id() for _ in range(100)}
    assert len(found) == 100
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", each) for each in found)
