"""Prompts and conversations as clients send them, in every shape that there is."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.server.errors import ApiError
from heddle.server.prompts import (
    MAX_MESSAGES,
    MAX_PROMPTS,
    check_salt,
    parse_prompts,
    plain_messages,
    plain_tools,
    prompt_input,
)
from heddle.server.requests import Message, Tool

texts = st.text(min_size=1, max_size=12)
token_lists = st.lists(st.integers(), min_size=1, max_size=12)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=10,
)


def refusal(given: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_prompts(given)
    assert caught.value.status == 400
    return caught.value


@given(texts)
def test_a_text_is_one_prompt(text: str) -> None:
    assert parse_prompts(text) == [text]


@given(token_lists)
def test_a_list_of_ids_is_one_prompt(tokens: list[int]) -> None:
    assert parse_prompts(tokens) == [tuple(tokens)]


@given(st.lists(texts, min_size=1, max_size=6))
def test_a_list_of_texts_is_as_many_prompts(given: list[str]) -> None:
    assert parse_prompts(given) == given


@given(st.lists(token_lists, min_size=1, max_size=6))
def test_a_list_of_lists_is_as_many_prompts(given: list[list[int]]) -> None:
    assert parse_prompts(given) == [tuple(tokens) for tokens in given]


@given(
    st.lists(st.integers(), min_size=1, max_size=5),
    st.none() | st.booleans() | st.floats() | st.text() | st.lists(st.integers()),
)
def test_one_stranger_among_ids_is_named_by_its_place(good: list[int], stranger: Any) -> None:
    assert refusal([*good, stranger, *good]).param == f"prompt.{len(good)}"
    assert refusal([good, [*good, stranger]]).param == f"prompt.1.{len(good)}"


@given(st.lists(texts, min_size=1, max_size=5), st.none() | st.integers() | token_lists)
def test_one_stranger_among_texts_is_named_by_its_place(good: list[str], stranger: Any) -> None:
    assert refusal([*good, stranger]).param == f"prompt.{len(good)}"


@given(anything)
def test_any_value_is_prompts_or_refused_with_a_place(value: Any) -> None:
    found: list[str | tuple[int, ...]] | ApiError
    try:
        found = parse_prompts(value)
    except ApiError as refused:
        found = refused
    if isinstance(found, ApiError):
        assert found.status == 400
        assert (found.param or "").startswith("prompt")
        return
    assert found
    for prompt in found:
        assert prompt
        is_ids = isinstance(prompt, tuple) and all(type(token) is int for token in prompt)
        assert isinstance(prompt, str) or is_ids


@pytest.mark.parametrize(
    ("value", "param"),
    [([], "prompt"), ("", "prompt"), (["a", ""], "prompt.1"), ([[1], []], "prompt.1")],
)
def test_what_is_empty_is_named(value: Any, param: str) -> None:
    refused = refusal(value)
    assert refused.param == param
    assert "at least one" in refused.message


def test_ids_may_be_many_and_prompts_may_not() -> None:
    assert parse_prompts([5] * 100_000) == [(5,) * 100_000]
    assert len(parse_prompts(["a"] * MAX_PROMPTS)) == MAX_PROMPTS
    for value in (["a"] * (MAX_PROMPTS + 1), [[1]] * (MAX_PROMPTS + 1)):
        assert f"at most {MAX_PROMPTS}" in refusal(value).message


def test_a_prompt_keeps_its_salt_and_specials_are_added_to_text_alone() -> None:
    text = prompt_input("a", add_special_tokens=False, cache_salt="s")
    assert (text.text, text.token_ids, text.add_special_tokens, text.cache_salt) == (
        "a",
        None,
        False,
        "s",
    )
    ids = prompt_input((1, 2), add_special_tokens=True, cache_salt="s")
    assert (ids.text, ids.token_ids, ids.cache_salt) == (None, (1, 2), "s")


@pytest.mark.parametrize(
    ("salt", "is_legal"), [(None, True), ("a", True), ("a" * 128, True), ("a" * 129, False)]
)
def test_a_salt_has_its_length(salt: str | None, is_legal: bool) -> None:
    if is_legal:
        check_salt(salt)
        return
    with pytest.raises(ApiError, match="1 to 128") as caught:
        check_salt(salt)
    assert caught.value.param == "cache_salt"


def test_an_empty_salt_is_refused() -> None:
    with pytest.raises(ApiError, match="0 characters"):
        check_salt("")


def messages(*turns: dict[str, Any]) -> list[Message]:
    return [msgspec.convert(turn, Message) for turn in turns]


def test_turns_keep_order_text_and_names() -> None:
    found = plain_messages(
        messages(
            {"role": "system", "content": "be"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": ""}],
            },
            {"role": "user", "content": "", "name": "Ann"},
            {"role": "tool", "content": "4", "tool_call_id": "call_1"},
            {"role": "assistant", "content": None, "reasoning_content": "hm"},
        )
    )
    assert found == [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "a"},
        {"role": "user", "content": "", "name": "Ann"},
        {"role": "tool", "content": "4", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
    ]


@given(st.lists(st.text(max_size=5), max_size=5))
def test_text_parts_are_joined(parts: list[str]) -> None:
    content = [{"type": "text", "text": part} for part in parts]
    (turn,) = plain_messages(messages({"role": "user", "content": content}))
    assert turn["content"] == "".join(parts)


@pytest.mark.parametrize(
    ("turn", "param", "code"),
    [
        ({"role": "user"}, "messages.1.content", "invalid_value"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]},
            "messages.1.content.1",
            "unsupported_content",
        ),
        (
            {"role": "user", "content": [{"type": "text"}]},
            "messages.1.content.0.text",
            "invalid_value",
        ),
    ],
)
def test_content_that_is_not_served_is_named(turn: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        plain_messages(messages({"role": "user", "content": "a"}, turn))
    assert (caught.value.param, caught.value.code) == (param, code)


def test_a_conversation_has_a_length() -> None:
    turn = Message(role="user", content="a")
    assert len(plain_messages([turn] * MAX_MESSAGES)) == MAX_MESSAGES
    for turns, words in (([], "empty"), ([turn] * (MAX_MESSAGES + 1), f"at most {MAX_MESSAGES}")):
        with pytest.raises(ApiError, match=words) as caught:
            plain_messages(turns)
        assert caught.value.param == "messages"


@given(st.dictionaries(st.text(), st.integers() | st.text()))
def test_arguments_of_calls_are_objects_for_a_template(arguments: dict[str, Any]) -> None:
    for form in (arguments, json.dumps(arguments)):
        call = {"id": "c", "function": {"name": "f", "arguments": form}}
        (turn,) = plain_messages(messages({"role": "assistant", "tool_calls": [call]}))
        assert turn == {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
            ],
        }


@pytest.mark.parametrize("text", ["{", "[1]", "3", "null", "", "[" * 100_000])
def test_arguments_that_are_no_object_stay_text(text: str) -> None:
    call = {"function": {"name": "f", "arguments": text}}
    (turn,) = plain_messages(messages({"role": "assistant", "tool_calls": [call]}))
    assert turn["tool_calls"][0]["function"]["arguments"] == text


def test_a_call_without_arguments_has_none() -> None:
    call = {"function": {"name": "f"}}
    (turn,) = plain_messages(messages({"role": "assistant", "tool_calls": [call]}))
    assert turn["tool_calls"][0]["function"]["arguments"] == {}


def test_tools_are_told_to_a_template_without_what_they_leave_out() -> None:
    tool = msgspec.convert({"function": {"name": "f", "parameters": {"a": None}}}, Tool)
    assert plain_tools([tool]) == [
        {"type": "function", "function": {"name": "f", "parameters": {"a": None}}}
    ]
    assert plain_tools([]) is None
    assert plain_tools(None) is None
