"""One shape for every refusal, whatever the message is made of."""

from __future__ import annotations

import ast
import functools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import JSONResponse

from heddle.errors import EngineOverloaded, PromptTooLong, RequestError
from heddle.server.errors import ENGINE_CODES, KINDS, ApiError, from_request_error, retry_headers

PACKAGE = Path(__file__).parents[2] / "heddle"
MAX_BODY_BYTES = 4096

HOSTILE = [
    "",
    "x" * 100_000,
    "\U0001f600" * 50_000,
    "\x00" * 50_000,
    '"\\' * 50_000,
    "\ud800" * 50_000,
    "a\nb\r\nc\u2028d\x85e\x0bf\x1cg",
]


@functools.cache
def codes_by_error() -> dict[str, set[str]]:
    """Words that stand as the code of an error, by its name, anywhere in the package."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                codes = [*node.args[1:2], *(k.value for k in node.keywords if k.arg == "code")]
                found.setdefault(node.func.id, set()).update(
                    code.value
                    for code in codes
                    if isinstance(code, ast.Constant) and isinstance(code.value, str)
                )
    return found


def test_every_code_of_the_engine_is_one_of_the_api() -> None:
    codes = codes_by_error()["RequestError"] | codes_by_error()["PromptTooLong"]
    assert {"generation_failed", "kv_capacity_exceeded", "invalid_grammar"} < codes
    assert codes <= set(KINDS) | set(ENGINE_CODES)
    assert set(ENGINE_CODES.values()) <= set(KINDS)
    assert from_request_error(RequestError("why", "a_new_code")).code == "invalid_value"
    assert set(ENGINE_CODES) <= codes, "a row that nothing needs"


def test_every_code_of_the_server_is_in_the_table() -> None:
    codes = codes_by_error()["ApiError"]
    assert len(codes) > 10
    assert codes <= set(KINDS)


@pytest.mark.parametrize("code", KINDS)
def test_types_and_headers_fit_the_status(code: str) -> None:
    kind = KINDS[code]
    expected = {
        401: "invalid_request_error",
        403: "permission_error",
        408: "timeout_error",
        429: "rate_limit_error",
    }
    of_server = "server_error" if kind.status >= 500 else "invalid_request_error"
    assert kind.type == expected.get(kind.status, of_server)
    if kind.status in (408, 500):  # to send it again would do the work again
        assert kind.headers == {"x-should-retry": "false"}
    if kind.status == 503:
        assert int((kind.headers or {})["Retry-After"]) >= 1


def document_of(error: ApiError) -> dict[str, object]:
    """Its body as the framework writes it, and as a stream does."""
    data = bytes(JSONResponse(error.body()).body)
    assert len(data) <= MAX_BODY_BYTES
    assert len(json.dumps(error.body())) <= MAX_BODY_BYTES
    document = json.loads(data)["error"]
    assert list(document) == ["message", "type", "param", "code"]
    assert len(document["message"].splitlines()) <= 1
    return document  # type: ignore[no-any-return]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("code", ["unsupported_parameter", "generation_failed"])
def test_a_body_is_small_and_one_line_whatever_it_says(text: str, code: str) -> None:
    document = document_of(ApiError(text, code, param=text))
    assert document["code"] == code


@given(st.text(st.characters(), max_size=60), st.integers(1, 400))
def test_any_text_can_be_told(text: str, times: int) -> None:
    document_of(ApiError(text * times, param=text * times))


@given(st.text(st.characters(exclude_categories=("Z", "C")), min_size=1, max_size=200))
def test_a_short_message_is_told_as_it_is(text: str) -> None:
    assert document_of(ApiError(text))["message"] == text


def test_a_long_message_keeps_its_beginning() -> None:
    assert ApiError("abc " + "x" * 9000).message.startswith("abc xxx")
    assert len(ApiError("x" * 9000).message) > 1000


def test_a_plain_misfit_has_a_code_only_beside_its_place() -> None:
    assert ApiError("a").body()["error"]["code"] is None
    assert ApiError("a", param="n").body()["error"]["code"] == "invalid_value"
    assert ApiError("a", "not_found").body()["error"]["code"] == "not_found"


def test_what_the_engine_refuses_keeps_its_words() -> None:
    told = from_request_error(PromptTooLong("too long by 3", "context_length_exceeded"))
    assert (told.status, told.code, told.message) == (
        400,
        "context_length_exceeded",
        "too long by 3",
    )
    assert told.headers == {}
    assert from_request_error(RequestError("gone", "adapter_not_found")).status == 404


def test_an_overloaded_engine_says_when_to_come_back() -> None:
    told = from_request_error(EngineOverloaded("full", 7))
    assert told.status == 429
    assert told.headers == {"Retry-After": "7", "retry-after-ms": "7000"}


@pytest.mark.parametrize(
    ("seconds", "whole", "milliseconds"), [(0.2, "1", "200"), (1, "1", "1000"), (60, "60", "60000")]
)
def test_times_to_come_back_are_whole_and_above_zero(
    seconds: float, whole: str, milliseconds: str
) -> None:
    assert retry_headers(seconds) == {"Retry-After": whole, "retry-after-ms": milliseconds}


def test_headers_of_a_refusal_stand_beside_those_of_its_code() -> None:
    told = ApiError("a", "method_not_allowed", headers={"Allow": "GET"})
    assert told.headers == {"Allow": "GET"}
    kept = ApiError("a", "body_too_large", headers={"x-a": "b"})
    assert kept.headers == {"Connection": "close", "x-a": "b"}
