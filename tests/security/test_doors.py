"""Who is let in, by which spelling, and what is told to those who are not."""

from __future__ import annotations

import asyncio
import hmac
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from heddle.errors import (
    ConfigError,
    KVCacheFull,
    LayoutMismatch,
    ModelFileError,
    NumericsError,
    PlanMismatch,
    RankFailed,
    UnsupportedError,
)
from heddle.server.admin import create_admin_app
from heddle.server.guard import OPEN_PATHS, KeyRing
from heddle.server.serving import Serving
from tests.support.served import Served, toy_server

KEY, OTHER_KEY = "key-of-one-client", "key-of-another"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PURGE", "get")
SPELLINGS = (
    "/v1/models",
    "//v1/models",
    "/v1//models",
    "/%76%31/models",
    "/v1%2fmodels",
    "/v1/models/",
    "/v1/models?health",
    "/v1/models#/health",
    "/v1/models;/health",
    "/health/../v1/models",
    "/health/..%2fv1/models",
    "/health%2f..%2fv1%2fmodels",
    "/health/",
    "/health%00",
    "/health%0a",
    "/HEALTH",
    "/ready\\..\\v1\\models",
    "http://localhost/v1/models",
    "http://localhost/health/../v1/models",
    "v1/models",
    "*",
)
LEAK = re.compile(r"/[a-z_]+/[a-z_]+|0x[0-9a-f]{6}|\d+\.\d+\.\d+\.\d+|Error\b|Traceback|line \d+")
"""Of paths, addresses, classes and tracebacks."""


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("toy")
    keys = (KEY, OTHER_KEY)
    with toy_server(folder, api_key=keys, cache_per_key=True, metrics_key=True) as made:
        yield made


def ask_raw(served: Served, method: str, target: str, *headers: str) -> tuple[int, bytes]:
    """Status and body of an answer; 0 where the connection was closed without one."""
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60.0) as connection:
        lines = [f"{method} {target} HTTP/1.1", *headers, "Connection: close", "", ""]
        connection.sendall("\r\n".join(lines).encode("latin-1"))
        found = b""
        try:
            while piece := connection.recv(1 << 16):
                found += piece
        except ConnectionResetError:
            pass
    head, _, body = found.partition(b"\r\n\r\n")
    return (int(head.split()[1]) if head else 0), body


@pytest.mark.parametrize("target", SPELLINGS)
def test_no_spelling_of_a_path_opens_it(locked: Served, target: str) -> None:
    for method in METHODS:
        status, body = ask_raw(locked, method, target, "Host: localhost")
        assert status in (400, 401), (method, status, body)
        assert b"toy" not in body, "the name of the model"


def test_every_route_wants_a_key_but_for_the_open_ones(locked: Served) -> None:
    routes = [route for route in locked.server._app.routes if isinstance(route, Route)]
    assert len(routes) > 15
    for route in routes:
        path = route.path.replace("{name:path}", "toy")
        for method in route.methods or ():
            status, _ = ask_raw(locked, method, path, "Host: localhost")
            assert (status == 200) == (path in OPEN_PATHS), (method, path, status)
            assert status in (200, 401)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "headers",
    [
        ("Host: evil.example",),
        ("Host: localhost.evil.example",),
        ("Host: 127.0.0.1.evil.example:80",),
        ("Host: localhost:80@evil.example",),
        ("Host: 0x7f.1",),
        ("Host: [::ffff:1.2.3.4]",),
        ("Host: localhost", "Origin: http://evil.example"),
        ("Host: localhost", "Origin: null"),
        ("Host: localhost", "Origin: http://localhost:1"),
        ("Host: localhost", "Origin: http://localhost.evil.example"),
    ],
    ids=lambda headers: headers[-1],
)
def test_pages_and_names_from_elsewhere_are_refused(
    locked: Served, method: str, headers: tuple[str, ...]
) -> None:
    key = f"Authorization: Bearer {KEY}"
    for path in ("/health", "/v1/models"):
        status, body = ask_raw(locked, method, path, *headers, key)
        assert status == 403 or (status == 400 and b"Invalid HTTP" in body), (status, body)


def test_admin_routes_are_these_and_none_is_public(locked: Served) -> None:
    app = create_admin_app(locked.serving, lambda: None)
    routes = {(method, route.path) for route in app.routes for method in route.methods - {"HEAD"}}  # type: ignore[attr-defined]
    assert routes == {
        ("GET", "/server_info"),
        ("POST", "/drain"),
        ("POST", "/abort/{name}"),
        ("POST", "/reset_prefix_cache"),
        ("POST", "/adapters"),
        ("DELETE", "/adapters/{name}"),
    }
    public = {route.path for route in locked.server._app.routes}  # type: ignore[attr-defined]
    assert not public & {path for _, path in routes}


def test_every_key_is_compared_whichever_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = KeyRing(["a", "b", "c"])
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def noted(shown: bytes, known: bytes) -> bool:
        compared.append((shown, known))
        return compare(shown, known)

    monkeypatch.setattr(hmac, "compare_digest", noted)
    for shown, opens in {"a": True, "c": True, "x": False, "": False, "a" * 999: False}.items():
        compared.clear()
        assert ring.opens(f"Bearer {shown}") is opens
        assert len(compared) == 3
        assert {len(each) for pair in compared for each in pair} == {32}, "digests, not keys"


def test_clients_are_told_apart_by_what_is_no_key() -> None:
    ring = KeyRing([KEY, OTHER_KEY])
    names = {ring.name(f"Bearer {key}") for key in (KEY, OTHER_KEY)}
    assert len(names) == 2
    assert not any(KEY in name or OTHER_KEY in name for name in names)
    assert KeyRing([]).name(f"Bearer {KEY}") == ""


def cached_tokens(served: Served, key: str, **fields: Any) -> int:
    body = {"prompt": list(range(3, 103)), "max_tokens": 1, "ignore_eos": True, **fields}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = served.client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_keys_do_not_see_each_others_cache(locked: Served) -> None:
    assert cached_tokens(locked, KEY) == 0
    assert cached_tokens(locked, KEY) > 50
    assert cached_tokens(locked, OTHER_KEY) == 0
    name = KeyRing([KEY]).name(f"Bearer {KEY}")
    for forged in (f"key {name}", f"key {name} ", name):
        assert cached_tokens(locked, OTHER_KEY, cache_salt=forged) == 0
    assert cached_tokens(locked, KEY, cache_salt="mine") == 0
    assert cached_tokens(locked, KEY, cache_salt="mine") > 50
    assert cached_tokens(locked, KEY) > 50


def test_a_salt_parts_the_cache_of_one_key(tmp_path: Path) -> None:
    with toy_server(tmp_path) as served:
        found = [cached_tokens(served, "", cache_salt=salt) for salt in ("a", "b", "a", "b")]
    assert found[:2] == [0, 0]
    assert all(count > 50 for count in found[2:])


def test_a_cache_per_key_needs_keys() -> None:
    from heddle.server.config import ServerConfig

    with pytest.raises(ConfigError, match="--cache-per-key has no effect: no API key is set"):
        ServerConfig(cache_per_key=True)


SECRET = "/root/secret/model.py line 7 at 0x7f12ab34cd of 10.1.2.3:4567"
FAULTS: list[BaseException] = [
    RankFailed(f"rank 1 (10.0.0.2): OSError: {SECRET}"),
    PlanMismatch(SECRET),
    NumericsError(SECRET),
    KVCacheFull(SECRET),
    LayoutMismatch(SECRET),
    UnsupportedError(SECRET),
    ModelFileError(SECRET),
    ConfigError(SECRET),
    RuntimeError(SECRET),
    ValueError(SECRET),
    TypeError(SECRET),
    KeyError(SECRET),
    IndexError(SECRET),
    AttributeError(SECRET),
    OSError(13, "Permission denied", "/root/secret/model.py"),
    FileNotFoundError(2, "No such file", "/root/secret/model.py"),
    ConnectionResetError(SECRET),
    MemoryError(SECRET),
    RecursionError(SECRET),
    ZeroDivisionError(SECRET),
    UnicodeDecodeError("utf-8", SECRET.encode(), 0, 1, SECRET),
    AssertionError(SECRET),
    NotImplementedError(SECRET),
    TimeoutError(SECRET),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
@pytest.mark.parametrize("is_stream", [False, True])
def test_what_went_wrong_inside_is_told_to_nobody(
    locked: Served, monkeypatch: pytest.MonkeyPatch, fault: BaseException, is_stream: bool
) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise fault

    monkeypatch.setattr(Serving, "submit", fail)
    answer = locked.client.post(
        "/v1/completions",
        json={"prompt": "a", "stream": is_stream},
        headers={"authorization": f"Bearer {KEY}"},
    )
    error = answer.json()["error"]
    assert answer.status_code in (500, 503), answer.text
    assert error["type"] == "server_error"
    assert not LEAK.search(error["message"]), error
    assert "secret" not in answer.text
    if answer.status_code == 500:
        assert answer.headers["x-should-retry"] == "false"
        assert answer.headers["x-request-id"] in error["message"]


def test_why_an_engine_failed_is_told_to_nobody(tmp_path: Path) -> None:
    with toy_server(tmp_path, step_seconds=0.01) as served:
        served.serving.fail(f"the engine has failed: {SECRET}")
        for path in ("/health", "/ready", "/v1/models", "/health?deep=1"):
            answer = served.client.get(path)
            assert answer.status_code == 503, (path, answer.text)
            assert not LEAK.search(answer.json()["error"]["message"]), answer.text


def test_nothing_in_a_request_makes_the_server_connect_or_read(
    locked: Served, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("canary-of-a-file")
    with socket.create_server(("127.0.0.1", 0)) as sink:
        places = [f"http://127.0.0.1:{sink.getsockname()[1]}/x.png", f"file://{file}", str(file)]
        statuses = []
        for place in places:
            parts: list[dict[str, Any]] = [
                {"type": "image_url", "image_url": {"url": place}},
                {"type": "input_image", "image_url": place},
                {"type": "input_audio", "input_audio": {"data": place, "format": "wav"}},
                {"type": "audio_url", "audio_url": {"url": place}},
                {"type": "video_url", "video_url": {"url": place}},
                {"type": "file", "file": {"file_id": place, "file_data": place}},
                {"type": "input_file", "file_url": place},
                {"type": "image_embeds", "image_embeds": place},
                {"type": "refusal", "refusal": place},
            ]
            bodies = [{"messages": [{"role": "user", "content": [part]}]} for part in parts]
            text = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
            bodies += [
                {**text, "chat_template": place},
                {**text, "model": place},
                {
                    **text,
                    "response_format": {
                        "type": "json_schema",
                        "json_schema": {"name": "a", "schema": {"$ref": place}},
                    },
                },
            ]
            for body in bodies:
                answer = locked.client.post(
                    "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {KEY}"}
                )
                statuses.append(answer.status_code)
                assert "canary-of-a-file" not in answer.text
        assert len(statuses) == 36
        assert set(statuses) == {400, 404}
        sink.settimeout(0.2)
        with pytest.raises(TimeoutError):
            sink.accept()


def test_ids_of_requests_are_words_of_ours(locked: Served) -> None:
    """An id goes into a header and into the log, so it has an alphabet and a length."""
    headers = {"authorization": f"Bearer {KEY}"}
    for given in ("a" * 65, "a b", "a\tb", 'a"b', "é", "../../x", "{}", "%0a"):
        found = locked.client.get(
            "/version",
            headers={**headers, "x-request-id": given.encode()},  # type: ignore[dict-item]
        ).headers["x-request-id"]
        assert re.fullmatch("[0-9a-f]{32}", found)
    for given in ("a\nb", "a" * 65, "", "\x1b[2J", "a b"):
        answer = locked.client.post(
            "/v1/completions", json={"prompt": "a", "request_id": given}, headers=headers
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "request_id"


def test_one_id_for_many_requests_mixes_nothing_up(locked: Served) -> None:
    import httpx2

    async def ask(client: httpx2.AsyncClient, number: int) -> list[int]:
        body = {
            **{"prompt": [number + 3] * 5, "max_tokens": 8, "ignore_eos": True, "temperature": 0},
            **{"return_token_ids": True, "request_id": "same"},
        }
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-request-id"] == "same"
        found: list[int] = answer.json()["choices"][0]["token_ids"]
        return found

    async def both() -> tuple[list[list[int]], list[list[int]]]:
        headers = {"authorization": f"Bearer {KEY}", "x-request-id": "same"}
        async with httpx2.AsyncClient(base_url=locked.url, headers=headers, timeout=60) as client:
            alone = [await ask(client, number) for number in range(6)]
            return alone, list(await asyncio.gather(*(ask(client, n) for n in range(6))))

    alone, together = asyncio.run(both())
    assert alone == together
    assert len(set(map(tuple, alone))) == 6
