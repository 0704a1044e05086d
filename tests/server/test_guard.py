"""What is looked at before any handler, over real sockets."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from heddle.server.guard import Guard, KeyRing
from tests.support.served import Served, toy_server

KEY = "s3cret-kéy"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with toy_server(tmp_path_factory.mktemp("toy"), api_key=("first", KEY)) as made:
        yield made


def raw(served: Served, data: bytes) -> bytes:
    """What comes back for these bytes, until the server closes or is silent for a second."""
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20.0) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        found = b""
        while piece := connection.recv(65536):
            found += piece
    return found


def head(path: str, *headers: str) -> bytes:
    lines = [f"GET {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode()


def error_of(answer: bytes) -> tuple[int, str]:
    top, _, body = answer.partition(b"\r\n\r\n")
    return int(top.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    "shown", ["", "Bearer", "Bearer wrong", "Basic first", "first", "Bearer first2"]
)
def test_no_route_but_the_probes_opens_without_a_key(locked: Served, shown: str) -> None:
    headers = {"authorization": shown} if shown else {}
    for path in (
        "/v1/models",
        "/v1/models/toy",
        "/version",
        "/load",
        "/nope",
        "/HEALTH",
        "/health/",
    ):
        response = locked.client.get(path, headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        assert locked.client.post(path, headers=headers, json={}).status_code == 401
    for path in ("/health", "/ready", "/ping"):
        assert locked.client.get(path, headers=headers).status_code == 200


def test_each_key_opens(locked: Served) -> None:
    for key in ("first", KEY):
        headers = {"authorization": f"Bearer {key}".encode()}
        assert locked.client.get("/v1/models", headers=headers).status_code == 200


def test_keys_are_compared_whole() -> None:
    ring = KeyRing(["a", "bb"])
    assert ring.opens("Bearer bb")
    assert ring.opens("bearer a")
    assert not any(ring.opens(f"Bearer {key}") for key in ("", "b", "bbb", "A", "a bb"))
    assert KeyRing(["é"]).opens("Bearer " + "é".encode().decode("latin-1"))


def test_headers_beyond_the_limit_are_refused(served: Served) -> None:
    many = [f"X-A{number}: 1" for number in range(120)]
    assert error_of(raw(served, head("/version", *many))) == (431, "headers_too_large")
    large = "X-Large: " + "a" * (40 << 10)
    assert error_of(raw(served, head("/version", large))) == (431, "headers_too_large")


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil:80"])
def test_a_forged_host_is_refused_on_loopback(served: Served, host: str) -> None:
    response = served.client.get("/version", headers={"host": host})
    assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:1", "[::1]:9", "[::1]"])
def test_names_of_this_machine_are_taken(served: Served, host: str) -> None:
    assert served.client.get("/version", headers={"host": host}).status_code == 200


def test_pages_of_other_origins_may_not_call(served: Served) -> None:
    foreign = served.client.get("/version", headers={"origin": "https://evil.example"})
    assert foreign.status_code == 403
    assert "access-control-allow-origin" not in foreign.headers
    own = served.client.get("/version", headers={"origin": served.url})
    assert own.status_code == 200


def test_an_allowed_origin_is_told_so(tmp_path: Path) -> None:
    origin = "https://app.example"
    with toy_server(tmp_path, allowed_origins=(origin,), api_key=("k",)) as served:
        preflight = served.client.options(
            "/v1/completions",
            headers={"origin": origin, "access-control-request-method": "POST"},
        )
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-origin"] == origin
        headers = {"origin": origin, "authorization": "Bearer k"}
        assert served.client.get("/version", headers=headers).status_code == 200
        other = {"origin": "https://other.example", "authorization": "Bearer k"}
        assert served.client.get("/version", headers=other).status_code == 403


@pytest.mark.parametrize(
    ("given", "is_kept"), [("abc-1._X", True), ("a b", False), ("x" * 65, False)]
)
def test_request_ids_are_kept_or_replaced(served: Served, given: str, is_kept: bool) -> None:
    found = served.client.get("/version", headers={"x-request-id": given}).headers["x-request-id"]
    assert (found == given) == is_kept
    assert 1 <= len(found) <= 64


@pytest.mark.parametrize(
    ("content_type", "body", "status", "code"),
    [
        ("text/plain", b"{}", 415, "unsupported_media_type"),
        ("", b"{}", 415, "unsupported_media_type"),
        ("application/json; charset=utf-8", b"{", 400, None),
        ("application/json", b"", 400, None),
        ("application/json", b"[]", 400, None),
        ("application/json", b'"x"', 400, None),
        ("application/json", b"\xff\xfe{}", 400, None),
        ("application/json", b'{"prompt": "\\ud800"}', 400, None),
        ("application/json", b'{"prompt": NaN}', 400, None),
        ("application/json", b'{"prompt": "a", "temperature": 1e999}', 400, None),
        ("application/json", b'{"prompt": "a", "max_tokens": 1e400}', 400, None),
        ("application/json", b'{"prompt":' + b"[" * 30000, 400, None),
        ("application/json", b'{"prompt":' + b"[" * 20000 + b"]" * 20000 + b"}", 400, None),
        ("application/json", b" " * 70000, 413, "body_too_large"),
        ("application/json", b" " * 3_000_000, 413, "body_too_large"),
    ],
)
def test_bodies_that_are_no_requests(
    served: Served, content_type: str, body: bytes, status: int, code: str | None
) -> None:
    response = served.client.post(
        "/v1/completions", content=body, headers={"content-type": content_type}
    )
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert len(response.content) < 4096
    if code is not None:
        assert error["code"] == code


def test_wrong_paths_and_methods_answer_in_json(served: Served) -> None:
    for path in (
        "/v1",
        "/v1/",
        "/v1/completions/",
        "//v1/models",
        "/v1/responses",
        "/%00",
        "/..%2f",
    ):
        response = served.client.get(path)
        assert response.status_code in (404, 405), path
        assert response.json()["error"]["type"] == "invalid_request_error"
    response = served.client.get("/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert served.client.delete("/v1/models").json()["error"]["code"] == "method_not_allowed"


def test_conflicting_lengths_do_not_reach_a_handler(served: Served) -> None:
    data = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 5\r\nContent-Length: 9\r\n\r\n{}   "
    )
    assert raw(served, data).split()[1] == b"400"
    assert served.client.get("/health").status_code == 200


def test_every_refusal_is_noted_once_and_no_probe_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        toy_server(tmp_path, api_key=("k",)) as served,
        caplog.at_level(logging.INFO, logger="heddle.server"),
    ):
        served.client.get("/v1/models")  # no key
        served.client.headers["authorization"] = "Bearer k"
        served.client.get("/v1/models/nobody")
        served.client.get("/nothing")
        served.post("/v1/completions", prompt="a", n=99)
        served.serving.drain("it stops")
        served.client.get("/ready")
        served.client.get("/v1/models")
    codes = [
        line.split("refused: ")[1]
        for line in caplog.messages
        if line.startswith("request ") and " refused: " in line
    ]
    assert codes == [
        "invalid_api_key",
        "model_not_found (model)",
        "not_found",
        "invalid_value (n)",
        "engine_unavailable",
    ]


def test_metrics_are_told_beyond_the_most_requests_and_still_want_their_key(tmp_path: Path) -> None:
    with toy_server(tmp_path, api_key=("k",), metrics_key=True, max_connections=1) as served:
        key = {"authorization": "Bearer k"}
        served.server._guard.num_requests = 1  # as if one were open
        assert served.client.get("/version", headers=key).status_code == 503
        assert served.client.get("/metrics", headers=key).status_code == 200
        assert served.client.get("/metrics").status_code == 401
        assert served.client.get("/health").status_code == 200
        served.server._guard.num_requests = 0


def test_a_connection_outlives_a_fault_that_was_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise KeyError("a fault")

    with toy_server(tmp_path) as served:
        monkeypatch.setattr("heddle.server.serving.Serving.submit", fail)
        host, port = served.url.removeprefix("http://").split(":")
        body = b'{"prompt": "a"}'
        request = (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        with socket.create_connection((host, int(port)), timeout=60.0) as connection:
            for _ in range(3):
                connection.sendall(request)
                found = connection.recv(65536)
                while b"internal_error" not in found:
                    found += connection.recv(65536)
                assert found.startswith(b"HTTP/1.1 500")


def test_a_fault_that_was_answered_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise KeyError("a fault")

    with toy_server(tmp_path) as served, caplog.at_level(logging.ERROR, logger="heddle.server"):
        monkeypatch.setattr("heddle.server.serving.Serving.submit", fail)
        served.client.headers["x-request-id"] = "abc"
        assert served.post("/v1/completions", prompt="a").status_code == 500
    assert caplog.messages == ["request abc: a fault of heddle"]


def test_a_fault_behind_a_whole_answer_is_told_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The client has its answer and keeps its connection, so only the log can tell."""
    sent: list[str] = []

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        del scope, receive
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"whole"})
        raise KeyError("afterwards")

    async def send(message: Any) -> None:
        sent.append(message["type"])

    async def receive() -> Any:
        raise AssertionError("nobody reads")

    guard = Guard(answer, keys=KeyRing(()), local_only=True, origins=())
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/version",
        "headers": [(b"x-request-id", b"abc")],
    }
    with caplog.at_level(logging.ERROR, logger="heddle.server"):
        asyncio.run(guard(scope, receive, send))
    assert sent == ["http.response.start", "http.response.body"]
    assert guard.num_requests == 0
    (record,) = caplog.records
    assert record.getMessage() == ("request abc: a fault of heddle after its whole answer was sent")
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "'afterwards'"
