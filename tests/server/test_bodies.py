"""Bytes become a typed request, or the first reason why not; nothing else comes out."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from heddle.server import bodies
from heddle.server.bodies import BodyRoom, ClientDisconnect, decode_body, read_body
from heddle.server.errors import ApiError
from heddle.server.requests import (
    SILENT_FIELDS,
    SUCCESSORS,
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
)

LIMIT = 100


class Sender:
    """A client that sends pieces, then goes, or falls silent."""

    def __init__(self, *pieces: bytes, then: str = "end") -> None:
        self._pieces = list(pieces)
        self._then = then
        self.num_taken = 0

    async def receive(self) -> dict[str, Any]:
        if self._pieces:
            self.num_taken += 1
            more = bool(self._pieces[1:]) or self._then != "end"
            return {"type": "http.request", "body": self._pieces.pop(0), "more_body": more}
        if self._then == "go":
            return {"type": "http.disconnect"}
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nobody sets it")

    def read(self, content_type: str = "application/json", limit: int = LIMIT) -> bytes:
        headers = [(b"content-type", content_type.encode())]
        scope = {"type": "http", "method": "POST", "headers": headers}
        return asyncio.run(read_body(Request(scope, self.receive), limit))

    def refusal(self, **options: Any) -> ApiError:
        with pytest.raises(ApiError) as caught:
            self.read(**options)
        return caught.value


def test_bodies_that_are_read_at_once_have_room_for_so_many_bytes() -> None:
    room = BodyRoom()
    with room.share(100) as first, room.share(100) as second:
        first(60)
        second(30)
        with pytest.raises(ApiError, match="90 bytes of other requests") as refused:
            second(11)
        assert (refused.value.code, refused.value.headers["Connection"]) == (
            "engine_overloaded",
            "close",
        )
        second(10)
        with room.share(100) as third:
            third(64)  # whoever begins may say what he wants
            with pytest.raises(ApiError):
                third(1)
        assert room.held_bytes == 100
    assert room.held_bytes == 0


def test_every_piece_is_told_that_is_kept() -> None:
    told: list[int] = []
    sender = Sender(b"abc", b"defg", b"h")
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "headers": headers}
    data = asyncio.run(read_body(Request(scope, sender.receive), LIMIT, told.append))
    assert (data, sum(told)) == (b"abcdefgh", 8)


def test_pieces_are_joined_up_to_the_limit() -> None:
    assert Sender(b"").read() == b""
    assert Sender(b"ab", b"", b"c").read() == b"abc"
    assert Sender(b"x" * 60, b"y" * 40).read() == b"x" * 60 + b"y" * 40


@pytest.mark.parametrize(
    ("content_type", "is_taken"),
    [
        ("application/json", True),
        ("Application/JSON ; charset=utf-8", True),
        ("application/jsonx", False),
        ("text/json", False),
        ("", False),
    ],
)
def test_only_json_is_taken(content_type: str, is_taken: bool) -> None:
    if is_taken:
        assert Sender(b"{}").read(content_type) == b"{}"
    else:
        assert Sender(b"{}").refusal(content_type=content_type).status == 415


def test_a_body_over_the_limit_is_read_to_its_end_and_refused() -> None:
    sender = Sender(*[b"x" * 50] * 7)
    refusal = sender.refusal()
    assert (refusal.status, refusal.code) == (413, "body_too_large")
    assert sender.num_taken == 7, "the client would not see the answer"
    assert refusal.headers["Connection"] == "close"


def test_a_huge_body_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_DISCARDED_BYTES", 200)
    sender = Sender(*[b"x" * 50] * 1000)
    assert sender.refusal().status == 413
    assert sender.num_taken == 7  # the first piece beyond 300


def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.01)
    refusal = Sender(b'{"a', then="silence").refusal()
    assert (refusal.status, refusal.code) == (408, "request_timeout")


def test_a_client_that_leaves_is_no_error_of_ours() -> None:
    with pytest.raises(ClientDisconnect):
        Sender(b'{"a', then="go").read()


def decode(data: bytes, kind: Any = CompletionRequest) -> tuple[Any, list[str]]:
    return asyncio.run(decode_body(data, kind))


def decode_refusal(data: bytes, kind: Any = CompletionRequest) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decode(data, kind)
    assert caught.value.status == 400
    return caught.value


def test_a_silent_field_may_have_any_value() -> None:
    for value in (5, "a", [1], {"a": None}, True):
        silent = dict.fromkeys(SILENT_FIELDS, value)
        assert decode(json.dumps({"prompt": "a", **silent}).encode())[1] == []


def test_fields_that_nobody_declared_are_named_and_silent_ones_are_not() -> None:
    silent = dict.fromkeys(SILENT_FIELDS)
    body, ignored = decode(json.dumps({"prompt": "a", "news": 1, "x y": [], **silent}).encode())
    assert body.prompt == "a"
    assert ignored == ["news", "x y"]
    _, ignored = decode(json.dumps({"prompt": "a", "news": 1, **silent}).encode(), TokenizeRequest)
    assert ignored == ["news"], "it declares none of the silent ones"


@pytest.mark.parametrize("name", SUCCESSORS)
def test_a_field_with_a_successor_is_refused_unless_it_is_null(name: str) -> None:
    assert decode(json.dumps({"prompt": "a", name: None}).encode())[0].prompt == "a"
    refusal = decode_refusal(json.dumps({"prompt": "a", name: []}).encode())
    assert (refusal.code, refusal.param) == ("unsupported_parameter", name)
    assert SUCCESSORS[name] in refusal.message


def test_the_last_of_two_equal_names_counts() -> None:
    assert decode(b'{"prompt": "a", "prompt": "b"}')[0].prompt == "b"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "messages", "missing required field"),
        ({"messages": [{"content": "a"}]}, "messages.0.role", "missing required field"),
        ({"messages": [{"role": "SECRET"}]}, "messages.0.role", "none of those"),
        ({"messages": [], "tool_choice": "SECRET"}, "tool_choice", "none of those"),
        ({"messages": [], "temperature": "SECRET"}, "temperature", "`float | null`, got `str`"),
        ({"messages": [], "logit_bias": {"SECRET": "SECRET"}}, "logit_bias[...]", "got `str`"),
        ({"messages": [], "n": 1.5}, "n", "`int | null`, got `float`"),
        ({"messages": {"SECRET": 1}}, "messages", "got `object`"),
        (["SECRET"], None, "Expected `object`"),
    ],
)
def test_a_misfit_is_told_by_place_and_kind_and_never_by_value(
    body: object, param: str | None, words: str
) -> None:
    refusal = decode_refusal(json.dumps(body).encode(), ChatRequest)
    assert refusal.param == param
    assert words in refusal.message
    assert "SECRET" not in refusal.message + str(refusal.param)


@pytest.mark.parametrize(
    "data",
    [b"", b"nul", b"{", b"\xff\xfe", b'{"prompt": "\\ud800"}', b'{"prompt": NaN}', b"{} {}"],
)
def test_what_is_no_json_is_said_to_be_none(data: bytes) -> None:
    assert decode_refusal(data).message == "the body is not valid JSON in UTF-8"


def test_deep_nesting_is_refused() -> None:
    deep = b'{"prompt":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    assert decode_refusal(deep).message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
names = st.sampled_from((*ChatRequest.__struct_fields__, *SUCCESSORS, "other"))


@given(st.dictionaries(names, json_values, max_size=6))
def test_any_object_is_a_request_or_refused_in_words(body: dict[str, Any]) -> None:
    refusal: ApiError | None = None
    try:
        found, ignored = decode(json.dumps(body).encode(), ChatRequest)
    except ApiError as error:
        refusal = error
    if refusal is not None:
        assert (refusal.status, bool(refusal.message)) == (400, True)
        return
    assert found.model == body.get("model")
    assert set(ignored) == {"other", *SUCCESSORS} & set(body)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_request_or_refused_in_words(data: bytes) -> None:
    refusal: ApiError | None = None
    try:
        assert decode(data)[0].prompt is not None
    except ApiError as error:
        refusal = error
    assert refusal is None or (refusal.status, bool(refusal.message)) == (400, True)


def test_a_heavy_body_is_decoded_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_HEAVY_BYTES", 100)
    threads = []
    whole = bodies._decode

    def noted(data: bytes, kind: Any, how: Any) -> Any:
        threads.append(threading.current_thread())
        return whole(data, kind, how)

    monkeypatch.setattr(bodies, "_decode", noted)
    assert decode(b'{"prompt": "a"}')[0].prompt == "a"
    assert decode(json.dumps({"prompt": "a" * 200}).encode())[0].prompt == "a" * 200
    light, heavy = threads
    assert light is threading.current_thread()
    assert heavy is not light
    with pytest.raises(ApiError):
        decode(b"[" * 200)
