"""Small, odd and hostile requests: each gets a typed error or its connection is cut."""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from heddle.engine.grammar.compiler import GrammarCompiler
from heddle.engine.grammar.trial import Trials
from heddle.engine.helper_process import Limits
from heddle.server.serving import MAX_IGNORED_NAMES
from tests.support.served import Served, toy_server

ANSWER_SECONDS = 20.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with toy_server(tmp_path_factory.mktemp("toy"), max_connections=64) as made:
        yield made


def connect(served: Served) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS)


def raw(served: Served, *lines: str, body: bytes = b"") -> tuple[int, dict[str, Any]]:
    """Status and document that come back; the server has to close by itself."""
    with connect(served) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        found = read_all(connection)
    head, _, document = found.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head, found
    return int(head.split()[1]), json.loads(document)


@pytest.mark.parametrize("origin", ["http://[", "http://[zz]", "http://[::1", "//[", "null", ""])
def test_an_origin_that_is_no_address_is_refused(served: Served, origin: str) -> None:
    status, document = raw(
        served, "GET /health HTTP/1.1", "Host: localhost", f"Origin: {origin}", "Connection: close"
    )
    assert (status, document["error"]["code"]) == (403, "forbidden")


def test_a_body_of_two_lengths_is_refused_and_its_connection_closed(served: Served) -> None:
    prompt = b'{"prompt": "ab", "max_tokens": 2}'
    hidden = b"0\r\n\r\nGET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    status, document = raw(
        served,
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(prompt)}",
        "Transfer-Encoding: chunked",
        body=b"%x\r\n%s\r\n" % (len(prompt), prompt) + hidden,
    )
    assert status == 400, document
    assert "Content-Length" in document["error"]["message"]


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("depth", [500, 900])
@pytest.mark.parametrize(
    "fields",
    [
        '"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": %s}',
        '"messages": [{"role": "user", "content": "a"}], "documents": [{"a": %s}]',
        '"messages": [{"role": "assistant", "tool_calls": '
        '[{"function": {"name": "f", "arguments": {"a": %s}}}]}]',
    ],
    ids=["variables", "documents", "arguments"],
)
def test_a_deep_conversation_is_refused(served: Served, fields: str, depth: int) -> None:
    response = served.client.post(
        "/v1/chat/completions",
        content="{" + fields % nested(depth) + "}",
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == "invalid_template_input"


def test_a_deep_conversation_has_no_tokens_either(served: Served) -> None:
    content = f'{{"messages": [], "chat_template_kwargs": {{"a": {nested(600)}}}}}'
    content = content.replace("[]", '[{"role": "user", "content": "a"}]', 1)
    response = served.client.post(
        "/tokenize", content=content, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400, response.text


def test_of_a_long_name_of_a_field_little_is_kept(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="heddle.server"):
        for end in "ab":  # the same as far as they are looked at
            served.complete(prompt="a", max_tokens=1, **{"w" * 1000 + end: 1})
    lines = [record.getMessage() for record in caplog.records if "www" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].count("w" * 64) == 1


def test_of_many_unknown_fields_some_are_counted(served: Served) -> None:
    name = 'heddle:ignored_fields_total{engine="0",field="other",model_name="toy"} '

    def count() -> float:
        lines = served.client.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(name)).removeprefix(name))

    before = count()
    served.complete(prompt="a", max_tokens=1, **{f"z{index}": 1 for index in range(1000)})
    assert count() - before == MAX_IGNORED_NAMES


def test_others_do_not_wait_for_slow_grammars(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    compile_now = GrammarCompiler.compile

    def compile_later(compiler: GrammarCompiler, form: Any) -> Any:
        assert release.wait(ANSWER_SECONDS)
        return compile_now(compiler, form)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_later)
    with ThreadPoolExecutor(40) as pool:
        slow = [
            pool.submit(
                served.complete,
                prompt="a",
                max_tokens=2,
                structured_outputs={"regex": f"a{{1,{index + 1}}}"},
            )
            for index in range(40)
        ]
        try:
            wait_until(lambda: served.server._guard.num_requests == len(slow))
            assert served.complete(prompt="a", max_tokens=2)["usage"]["completion_tokens"] == 2
            assert served.client.get("/metrics").status_code == 200
            assert not any(each.done() for each in slow)
        finally:
            release.set()
        for each in slow:
            assert set(each.result()["choices"][0]["text"]) == {"a"}


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}


def test_a_schema_that_compiles_without_end_is_refused_while_others_are_served(
    served: Served,
) -> None:
    grammars = served.serving.engine.driver._grammars
    grammars._trials = Trials(lambda: grammars._get_vocabulary().plain(), Limits(seconds=1.0))
    patterns = [{"type": "string", "pattern": f"a{{{n}}}"} for n in range(1, 60)]
    num_served = 0
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(
            served.post,
            "/v1/completions",
            prompt="a",
            response_format=json_schema({"allOf": patterns}),
        )
        while not slow.done():
            served.complete(prompt="a", max_tokens=2)
            num_served += 1
    error = slow.result().json()["error"]
    assert slow.result().status_code == 400
    assert (error["code"], error["param"]) == (
        "invalid_grammar",
        "response_format.json_schema.schema",
    )
    assert error["message"].endswith("compiling it takes more than 1 s")
    assert num_served > 2


@pytest.mark.parametrize(("count", "status"), [(100, 200), (1500, 400)])
@pytest.mark.parametrize("stream", [False, True])
def test_an_object_of_many_options_is_served_and_one_of_very_many_refused(
    served: Served, count: int, status: int, stream: bool
) -> None:
    schema = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(count)}}
    response = served.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "a"}],
        max_tokens=40,
        stream=stream,
        response_format=json_schema(schema),
    )
    assert response.status_code == status
    assert status == 200 or response.json()["error"]["code"] == "invalid_grammar"
    assert "server_error" not in response.text


def test_a_reader_that_takes_nothing_loses_its_connection(tmp_path: Path) -> None:
    # Its answer of 9 MB is more than the system keeps for a reader.
    body = json.dumps(
        {"prompt": ["a" * 200] * 2, "n": 16, "max_tokens": 1, "prompt_logprobs": 20}
    ).encode()
    request = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with toy_server(tmp_path, stream_stall_timeout=0.3) as served, socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = served.url.removeprefix("http://").split(":")
        reader.connect((host, int(port)))
        reader.sendall(request.encode() + body)
        server = served.server._servers[0][0]
        wait_until(lambda: server.server_state.connections)
        wait_until(lambda: not server.server_state.connections)
        head = reader.recv(4096)
    (length,) = re.findall(rb"content-length: (\d+)", head)
    assert int(length) > 8 << 20


def read_all(connection: socket.socket) -> bytes:
    """Until the other side closes."""
    found = b""
    while piece := connection.recv(1 << 20):
        found += piece
    return found


def wait_until(is_so: Any) -> None:
    end = time.monotonic() + ANSWER_SECONDS
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)
