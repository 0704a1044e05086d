"""Reasoning is told apart from the answer, whoever writes its marks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.errors import ConfigError
from heddle.server.pieces import (
    CallArguments,
    CallBegins,
    Chained,
    Content,
    Piece,
    PieceParser,
    Reasoning,
    WithoutReasoning,
)
from heddle.server.reasoning_parsers import (
    ReasoningParser,
    find_reasoning_parser,
    register_reasoning_parser,
)
from heddle.server.tool_parsers import find_tool_parser
from tests.support.pieces import cut, parse

NAMES = ("deepseek_r1", "qwen3")
PROMPTS = ("", "assistant\n", "assistant\n<think>\n", "assistant\n<think>\n\n</think>\n\n")
BITS = ("<think>", "</think>", "<th", "</", "ink>", " ", "\n", "warp", "weft")


def new_parser(name: str, prompt: str = "") -> PieceParser:
    return find_reasoning_parser(name).create(prompt)


@pytest.mark.parametrize("name", NAMES)
@given(
    text=st.lists(st.sampled_from(BITS), max_size=9).map("".join),
    prompt=st.sampled_from(PROMPTS),
    places=st.lists(st.integers(0, 50), max_size=8),
)
def test_all_cuts_of_a_text_give_the_same(
    name: str, text: str, prompt: str, places: list[int]
) -> None:
    whole = parse(new_parser(name, prompt), text)
    assert parse(new_parser(name, prompt), *cut(text, places)) == whole
    assert parse(new_parser(name, prompt), *text) == whole


MARKED = "<think>\nwarp <b\n\n</think>\n\nweft </think> <think>\n"
INSIDE = MARKED.removeprefix("<think>\n")
BOTH: list[Piece] = [Reasoning("warp <b"), Content("weft </think> <think>\n")]


@pytest.mark.parametrize(
    ("name", "prompt", "text", "expected"),
    [
        ("deepseek_r1", "", MARKED, BOTH),
        ("deepseek_r1", "", INSIDE, BOTH),
        ("deepseek_r1", "<think>\n", INSIDE, BOTH),
        ("deepseek_r1", "</think>", INSIDE, [Content(INSIDE)]),
        ("deepseek_r1", "", "warp\n", [Reasoning("warp\n")]),
        ("qwen3", "", MARKED, BOTH),
        ("qwen3", "", f"\n{MARKED}", BOTH),
        ("qwen3", "<think>\n", INSIDE, BOTH),
        ("qwen3", "", INSIDE, [Content(INSIDE)]),
        ("qwen3", "<think>\n\n</think>\n\n", "weft", [Content("weft")]),
        ("qwen3", "<think>\n\n</think>\n\n", MARKED, [Content(MARKED)]),
        ("qwen3", "", "<think>warp </thi", [Reasoning("warp </thi")]),
        ("qwen3", "", "<thi", [Content("<thi")]),
        ("deepseek_r1", "", "<thi", [Reasoning("<thi")]),
        ("qwen3", "", "<think></think>weft", [Content("weft")]),
    ],
)
def test_who_opens_the_reasoning(name: str, prompt: str, text: str, expected: list[Piece]) -> None:
    assert parse(new_parser(name, prompt), text) == expected
    assert parse(new_parser(name, prompt), *text) == expected


def test_reasoning_comes_as_it_is_written() -> None:
    parser = new_parser("qwen3")
    assert parser.push("<think>\nwarp </th") == [Reasoning("warp")]
    assert parser.push("en") == [Reasoning(" </then")]
    assert parser.push(" </think>\n") == []
    assert parser.push("\nweft") == [Content("weft")]


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def test_calls_are_looked_for_behind_the_reasoning_alone() -> None:
    tools = find_tool_parser("hermes").create(lambda: "call_0")
    text = f"<think>\nI call {CALL}\n</think>\n\n{CALL}"
    assert parse(Chained(new_parser("qwen3"), tools), *text) == [
        Reasoning(f"I call {CALL}"),
        CallBegins(0, "call_0", "f"),
        CallArguments(0, '{"a": 1}'),
    ]


def test_reasoning_can_be_left_out() -> None:
    assert parse(WithoutReasoning(new_parser("deepseek_r1")), *INSIDE) == [BOTH[1]]
    assert parse(WithoutReasoning(new_parser("deepseek_r1")), "warp </thi") == []


def test_names_are_taken_once_and_unknown_ones_refused() -> None:
    with pytest.raises(ConfigError, match="'r1' is not known; legal here: deepseek_r1, qwen3"):
        find_reasoning_parser("r1")
    with pytest.raises(ConfigError, match="'qwen3' is registered already"):
        register_reasoning_parser(
            "qwen3", ReasoningParser(lambda _: new_parser("qwen3"), frozenset())
        )
