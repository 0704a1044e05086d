"""Hostile requests of every family: an answer of a known kind, in time, and a server that lives."""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from heddle.engine.grammar.trial import Trials
from heddle.engine.helper_process import Limits
from tests.support.processes import LONG_SECONDS
from tests.support.served import Served, toy_server

DEEP: dict[str, Any] = {"type": "object"}
for _ in range(60):
    DEEP = {"type": "object", "properties": {"a": DEEP}, "required": ["a"]}


def schema(value: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": value}}
    return {"response_format": form}


def strings(count: int, keyword: str, pattern: str) -> dict[str, Any]:
    parts = [{"type": "string", "pattern": pattern.replace("N", str(n))} for n in range(1, count)]
    return schema({keyword: parts})


def lark(text: str) -> dict[str, Any]:
    return {"structured_outputs": {"grammar": text}}


def regex(text: str) -> dict[str, Any]:
    return {"structured_outputs": {"regex": text}}


GRAMMARS: dict[str, dict[str, Any]] = {
    "nesting of a schema": schema(DEEP),
    "nesting of brackets": regex("(" * 5000 + "a" + ")" * 5000),
    "nesting of a grammar": lark("start: " + "(" * 5000 + '"a"' + ")" * 5000),
    "alternatives that multiply": regex("(a|aa|aaa|aaaa|aaaaa){50}(b|bb|bbb){50}" * 8),
    "conditions that multiply": strings(60, "allOf", "a{N}"),
    "very long alternatives": {"structured_outputs": {"choice": ["x" * 30_000, "y" * 30_000]}},
    "very many alternatives": {"structured_outputs": {"choice": [str(n) for n in range(1001)]}},
    "huge bounds": regex("a{1000000000}"),
    "huge bounds of arrays": schema({"type": "array", "minItems": 10**9, "maxItems": 10**9}),
    "a rule of itself": lark("start: start"),
    "rules of each other": lark("start: a\na: b\nb: a"),
    "a schema of itself": schema({"$ref": "#"}),
    "schemas of each other": schema(
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    ),
    "a malformed schema": schema({"type": 7, "properties": []}),
    "an unknown schema": schema({"type": "object", "$schema": "http://a.example/b", "if": 3}),
    "an expression that looks back": regex(r"(a+)+\1(?=b)(?<!c)"),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with toy_server(tmp_path_factory.mktemp("toy")) as made:
        grammars = made.serving.engine.driver._grammars
        grammars._trials = Trials(lambda: grammars._get_vocabulary().plain(), Limits(seconds=1.0))
        yield made


def assert_alive(served: Served) -> None:
    assert served.complete(prompt="a", max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_hostile_grammar_is_followed_or_refused(served: Served, name: str) -> None:
    began = time.monotonic()
    answer = served.post("/v1/completions", prompt="a", max_tokens=3, **GRAMMARS[name])
    print(f"{name}: {answer.status_code} after {time.monotonic() - began:.2f} s")
    assert time.monotonic() - began < LONG_SECONDS / 2
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert answer.json()["error"]["code"] in ("invalid_grammar", "invalid_value")
        assert len(answer.content) <= 4096
    assert_alive(served)


def test_there_are_as_many_as_were_promised() -> None:
    assert len(GRAMMARS) == 16
    assert len(REQUESTS) == 20 + 15


BODY = b'{"prompt": "a", "max_tokens": 1}'
HOST = b"Host: localhost\r\n"
KIND = b"Content-Type: application/json\r\n"


def post(
    body: bytes = BODY, *, head: bytes = HOST + KIND, length: int | None = None, path: bytes = b""
) -> bytes:
    size = len(body) if length is None else length
    line = b"POST %s HTTP/1.1\r\n" % (path or b"/v1/completions")
    return line + head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % size + body


def field(value: str) -> bytes:
    return post(b'{"prompt": "a", "temperature": ' + value.encode() + b"}")


REQUESTS: dict[str, tuple[bytes, tuple[int, ...]]] = {
    "a header of megabytes": (
        post(head=HOST + KIND + b"X-A: " + b"a" * (1 << 21) + b"\r\n"),
        (400, 431),
    ),
    "very many headers": (post(head=HOST + KIND + b"X-A: a\r\n" * 4000), (400, 431)),
    "no host": (post(head=KIND), (400,)),
    "two hosts": (post(head=HOST * 2 + KIND), (400,)),
    "a path that climbs": (post(path=b"/../../etc/passwd"), (404,)),
    "a path with a zero": (post(path=b"/v1/completions%00"), (404,)),
    "not finite": (field("NaN"), (400,)),
    "infinite": (field("Infinity"), (400,)),
    "a huge number": (field("1e999"), (400,)),
    "a number of many digits": (field("9" * 5000), (400,)),
    "deep": (field("[" * 100_000 + "]" * 100_000), (400, 413)),
    "broken UTF-8": (post(b'{"prompt": "\xff\xfe", "max_tokens": 1}'), (400,)),
    "half a surrogate pair": (post(b'{"prompt": "\\ud800", "max_tokens": 1}'), (400,)),
    "another kind": (post(head=HOST + b"Content-Type: text/plain\r\n"), (415,)),
    "no kind": (post(head=HOST), (415,)),
    "empty": (post(b""), (400,)),
    "too large": (post(b'{"prompt": "' + b"a" * 200_000 + b'"}'), (413,)),
    "lengths that differ": (
        post(head=HOST + KIND + b"Content-Length: 3\r\n"),
        (400,),
    ),
    "another method": (
        b"PATCH /v1/completions HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n",
        (405,),
    ),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", (400,)),
}


def in_chunks(chunks: bytes) -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\n" + HOST + KIND + b"Connection: close\r\n"
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks


def get(target: bytes, version: bytes = b"1.1", head: bytes = b"") -> bytes:
    line = b"GET %s HTTP/%s\r\n" % (target, version)
    return line + HOST + head + b"Connection: close\r\n\r\n"


REQUESTS |= {
    "a packed body": (
        post(gzip.compress(BODY), head=HOST + KIND + b"Content-Encoding: gzip\r\n"),
        (415,),
    ),
    "a bomb": (
        post(gzip.compress(bytes(1 << 24)), head=HOST + KIND + b"Content-Encoding: gzip\r\n"),
        (415,),
    ),
    "a chunk of no size": (in_chunks(b"zz\r\n{}\r\n0\r\n\r\n"), (400,)),
    "a chunk of less than nothing": (in_chunks(b"-2\r\n{}\r\n0\r\n\r\n"), (400,)),
    "a chunk without end": (in_chunks(b"f" * 40 + b"\r\n{}\r\n0\r\n\r\n"), (400,)),
    "chunks of a byte": (in_chunks(b"1\r\n \r\n" * 9000 + b"0\r\n\r\n"), (400,)),
    "chunks beyond the limit": (in_chunks(b"fff\r\n" + b" " * 0xFFF + b"\r\n") * 40, (400, 413)),
    "a transfer in another code": (
        b"POST /v1/completions HTTP/1.1\r\n"
        + HOST
        + KIND
        + b"Connection: close\r\nTransfer-Encoding: gzip\r\n\r\n{}",
        (400,),
    ),
    "a length in other digits": (
        b"POST /v1/completions HTTP/1.1\r\n"
        + HOST
        + KIND
        + "Connection: close\r\nContent-Length: \u0662\r\n\r\n{}".encode(),
        (400,),
    ),
    "the preface of HTTP/2": (b"PRI * HTTP/2.0\r\n" + HOST + b"Connection: close\r\n\r\n", (404,)),
    "another host in the target": (get(b"http://evil.example/nothing"), (404,)),
    "a tunnel": (
        b"CONNECT evil.example:1 HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n",
        (404,),
    ),
    "a name of a model that is no text": (get(b"/v1/models/%ff%fe%00"), (404,)),
    "a zero in a header": (get(b"/version", head=b"X-A: a\0b\r\n"), (400,)),
    "a name with a space": (get(b"/version", head=b"X-A : a\r\n"), (400,)),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_hostile_request_has_an_answer_of_a_known_kind(served: Served, name: str) -> None:
    data, statuses = REQUESTS[name]
    host, port = served.url.removeprefix("http://").split(":")
    found = b""
    with socket.create_connection((host, int(port)), timeout=LONG_SECONDS) as connection:
        try:
            connection.sendall(data)
            while piece := connection.recv(1 << 16):
                found += piece
        except ConnectionError:  # it was answered, and closed, before all of it was sent
            pass
    head, _, body = found.partition(b"\r\n\r\n")
    if found:
        assert int(head.split()[1]) in statuses, found
        assert len(body) <= 4096
        if b"application/json" in head:
            error = json.loads(body)["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert "passwd" not in error["message"]
        else:  # the parser's own words, below everything
            assert b"Invalid HTTP request" in body
    else:
        assert 431 in statuses, "only what is too large is cut off unheard"
    assert_alive(served)


EXTREMES: dict[str, dict[str, Any]] = {
    "answers": {"n": 10**6},
    "answers of many prompts": {"prompt": ["a"] * 128, "n": 128},
    "prompts": {"prompt": ["a"] * 129},
    "best of": {"best_of": 10**6},
    "tokens": {"max_tokens": 2**63},
    "least tokens": {"min_tokens": 10**9},
    "alternatives": {"logprobs": 10**6},
    "alternatives of the prompt": {"prompt_logprobs": 10**6},
    "candidates": {"top_k": 2**63},
    "stop texts": {"stop": ["a"] * 10_000},
    "a long stop text": {"stop": ["a" * 50_000]},
    "stop ids": {"stop_token_ids": [1] * 20_000},
    "biases": {"logit_bias": {str(n): 1 for n in range(4000)}},
    "bad words": {"bad_words": ["a b"] * 10_000},
    "a long bad word": {"bad_words": ["a" * 50_000]},
    "allowed ids": {"allowed_token_ids": list(range(9_000))},
    "a long salt": {"cache_salt": "a" * 50_000},
    "a long id": {"request_id": "a" * 50_000},
    "a long name of a model": {"model": "a" * 50_000},
    "priority": {"priority": 2**70},
    "seconds of a pin": {"cache_pin_seconds": 1e300},
    "truncation": {"truncate_prompt_tokens": -(2**70)},
    "a seed": {"seed": 2**70},
}


@pytest.mark.parametrize("name", EXTREMES)
def test_a_field_beyond_its_cap_costs_nothing(served: Served, name: str) -> None:
    steps = served.serving.engine.llm.get_metrics()["steps"]
    answer = served.post("/v1/completions", **{"prompt": "a", "max_tokens": 1, **EXTREMES[name]})
    assert answer.status_code in (400, 404), answer.text
    assert len(answer.content) <= 4096
    assert served.serving.engine.llm.get_metrics()["steps"] == steps, "nothing was computed"
    assert_alive(served)
