"""Any JSON value in any field of any route: an answer or a refusal, never a fault of the server."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from heddle.server.openapi import openapi_document
from tests.support.mutations import HOSTILE, mutated_bytes, mutated_json, try_mutants
from tests.support.served import Served, toy_server

CALL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}},
    },
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": ["ab", "cd"],
        "max_tokens": 2,
        "n": 1,
        "logprobs": 1,
        "stop": ["x"],
        "logit_bias": {"5": -1.5},
        "seed": 3,
        "structured_outputs": {"choice": ["a", "b"]},
        "stop_token_ids": [7],
        "bad_words": ["q"],
    },
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {"role": "assistant", "tool_calls": [{"id": "1", **CALL}]},
            {"role": "tool", "tool_call_id": "1", "content": "r"},
        ],
        "max_tokens": 2,
        "top_logprobs": 1,
        "logprobs": True,
        "tools": [CALL],
        "tool_choice": "none",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
        "chat_template_kwargs": {"k": 1},
    },
    "/tokenize": {"prompt": "ab", "add_special_tokens": True},
    "/detokenize": {"tokens": [3, 4, 5]},
}
EVERY_FIELD, EVERY_MUTANT = 1, 1500
"""Of the slow tier: a step of 1, and so many mutants."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with toy_server(tmp_path_factory.mktemp("toy")) as made:
        yield made


def text_of(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except ValueError:  # more digits than Python writes
        return b'{"prompt": 1' + b"0" * 5000 + b"}"


def check(served: Served, path: str, body: bytes) -> int:
    """Send a body; the status of the answer, which is not a fault."""
    headers = {"content-type": "application/json"}
    response = served.client.post(path, content=body, headers=headers)
    told = f"{response.status_code} {response.text[:500]} for {body[:500]!r}"
    assert response.status_code == 200 or 400 <= response.status_code < 500, told
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}, told
        assert len(response.content) <= 4096, told
    assert "internal_error" not in response.text, told
    return response.status_code


def fields_of(path: str) -> list[str]:
    """Every field that the description names, and two that it does not."""
    document = openapi_document()
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return [*schema["properties"], "no_such_field", ""]


# A step prime to the number of values: every field and every value are tried.
@pytest.mark.parametrize("step", [29, pytest.param(EVERY_FIELD, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", BODIES)
def test_no_value_of_any_field_is_a_fault(served: Served, path: str, step: int) -> None:
    cases = [(name, value) for name in fields_of(path) for value in HOSTILE]
    statuses: Counter[int] = Counter()
    for name, value in cases[::step]:
        statuses[check(served, path, text_of({**BODIES[path], name: value}))] += 1
    assert sum(statuses.values()) == len(cases[::step]) > 5
    assert statuses[400] > 0
    assert served.client.get("/health").status_code == 200


@pytest.mark.parametrize("count", [60, pytest.param(EVERY_MUTANT, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", BODIES)
def test_no_mutant_of_a_body_is_a_fault(served: Served, path: str, count: int) -> None:
    good = BODIES[path]
    assert check(served, path, text_of(good)) == 200
    statuses: Counter[int] = Counter()

    def attempt(seed: int) -> None:
        body = mutated_json({**good, "stream": seed % 7 == 0}, seed)
        damaged = mutated_bytes(text_of(good), seed) if seed % 4 == 0 else text_of(body)
        statuses[check(served, path, damaged)] += 1

    found = try_mutants(range(count), attempt, ())
    assert found.num_taken == count
    assert min(statuses[200], statuses[400]) > 1
    assert served.client.get("/health").status_code == 200


def test_bodies_that_are_no_objects_are_refused(served: Served) -> None:
    for path in BODIES:
        for body in (b"", b"[]", b"null", b"[" * 90_000, b'{"a":' * 9_000, b"\xff\xfe", b'"x"'):
            assert check(served, path, body) in (400, 413)
        for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
            deep = opening * 9_000 + b"1" + closing * 9_000
            plain = text_of(BODIES[path])[:-1]
            for name in (b"no_such_field", b"chat_template_kwargs", b"stop"):
                assert check(served, path, plain + b', "%s": %s}' % (name, deep)) in (200, 400)


def test_a_neighbour_is_answered_as_before(served: Served) -> None:
    def answer() -> str:
        body = {"prompt": [3, 4], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        response: httpx2.Response = served.post("/v1/completions", **body)
        return str(response.json()["choices"][0]["text"])

    before = answer()
    for seed in range(12):
        path = list(BODIES)[seed % len(BODIES)]
        check(served, path, text_of(mutated_json(BODIES[path], seed + 10_000)))
        assert answer() == before
