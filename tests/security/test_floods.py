"""Who sends too much, too slowly or without end holds up himself alone."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from heddle.engine.grammar.trial import Trials
from heddle.engine.helper_process import Limits
from heddle.engine.template_helper import TemplateHelpers
from heddle.engine.tokenizer import Tokenizer
from heddle.errors import RequestError
from tests.support.processes import LONG_SECONDS, seconds_until
from tests.support.served import Served, toy_server

TALK = [{"role": "user", "content": "a"}]
LAG_SECONDS = 0.05
"""Of the event loop, that nothing of all this may cost others; tests allow ten times as much."""
WIDE = {
    "hf_overrides": '{"max_position_embeddings": 1048576}',
    "kv_cache_memory_bytes": 64 << 20,  # for a quarter of that
}


def connect(served: Served) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=LONG_SECONDS)


def test_many_silent_and_dripping_sockets_keep_nobody_out(tmp_path: Path) -> None:
    most, spare = 24, 16
    with toy_server(tmp_path, max_connections=most) as served:
        sockets: list[socket.socket] = []
        waits: list[float] = []
        try:
            for number in range(3 * most):
                sockets.append(connect(served))
                if number % 2:
                    sockets[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-")
                if number % 8 == 0:
                    began = time.monotonic()
                    with httpx2.Client(base_url=served.url, timeout=LONG_SECONDS) as client:
                        assert client.get("/health").status_code == 200
                        assert client.get("/metrics").status_code == 200
                    waits.append(time.monotonic() - began)
            assert served.complete(prompt="a", max_tokens=2)["usage"]["completion_tokens"] == 2
            open_now = len(served.server._servers[0][0].server_state.connections)
        finally:
            for each in sockets:
                each.close()
    print(f"probes beside {len(sockets)} sockets: {max(waits):.3f} s at most")
    assert most < open_now <= most + spare
    assert len(waits) == 9
    assert max(waits) < LONG_SECONDS / 2


def test_a_slow_body_ends_by_its_deadline_beside_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heddle.server.bodies.BODY_SECONDS", 0.5)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 1000\r\n\r\n"
    )
    with toy_server(tmp_path) as served, connect(served) as slow:
        slow.sendall(head)
        answered = threading.Event()
        found: list[bytes] = []

        def listen() -> None:
            found.append(slow.recv(1 << 16))
            answered.set()

        thread = threading.Thread(target=listen)
        thread.start()
        while not answered.wait(0.02):
            slow.sendall(b" ")
            served.complete(prompt="a", max_tokens=1)
        thread.join()
    assert found[0].startswith(b"HTTP/1.1 408"), found
    assert b"x-should-retry: false" in found[0].lower()


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_reader_of_a_byte_at_a_time_is_dropped_and_others_go_on(
    tmp_path: Path, is_stream: bool
) -> None:
    body: dict[str, Any] = {"prompt": "a" * 200, "ignore_eos": True}
    body |= {"max_tokens": 50, "logprobs": 20, "n": 4} if is_stream else {"max_tokens": 1}
    body |= {"stream": True} if is_stream else {"prompt_logprobs": 20, "n": 4}
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    with toy_server(tmp_path, stream_stall_timeout=0.5) as served, socket.socket() as reader:
        served.server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        served.complete(prompt="a", max_tokens=2)  # from here on its client has a connection
        connections = served.server._servers[0][0].server_state.connections
        host, port = served.url.removeprefix("http://").split(":")
        reader.connect((host, int(port)))
        reader.sendall(head.encode() + data)
        taken, waits = reader.recv(1), []
        while len(connections) > 1:
            taken += reader.recv(1)
            began = time.monotonic()
            served.complete(prompt="a", max_tokens=2)
            waits.append(time.monotonic() - began)
            time.sleep(0.02)
        print(f"{len(waits)} others waited {max(waits):.3f} s at most")
        assert len(waits) > 2
        assert max(waits) < LONG_SECONDS / 2
        assert len(taken) < 10_000
        driver = served.serving.engine.driver
        assert seconds_until(lambda: not driver.has_work) < LONG_SECONDS
        cache = driver.replicas[0].cache
        assert cache.num_available_blocks == cache.num_usable_blocks


class Lag:
    """How late the event loop of a server comes to what is due."""

    def __init__(self, served: Served) -> None:
        self.found: list[float] = []
        self._stop = threading.Event()
        self._future = asyncio.run_coroutine_threadsafe(self._measure(), served.loop)

    async def _measure(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            await asyncio.sleep(0.005)
            self.found.append(time.monotonic() - began - 0.005)

    def end(self) -> float:
        """The 99th percentile, in seconds."""
        self._stop.set()
        self._future.result(LONG_SECONDS)
        return sorted(self.found)[int(0.99 * len(self.found))]


def bodies(kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests of one kind, none of which is like another."""
    for number in range(2):
        mark = str(number)
        if kind == "text beyond the window":
            yield "/v1/completions", {"prompt": mark + "x" * (8 << 20)}
        elif kind == "text within the window":
            yield "/v1/completions", {"prompt": mark + "word " * 60_000}
        elif kind == "ids":
            yield "/v1/completions", {"prompt": [number + 1] * 1_000_000}
        elif kind == "templates":
            loop = "{% for a in range(99999) %}" * 3 + mark + "{% endfor %}" * 3
            yield "/v1/chat/completions", {"messages": TALK, "chat_template": loop}
        elif kind == "a long conversation":
            turns = [{"role": "user", "content": mark + "word " * 20}] * 4000
            yield "/v1/chat/completions", {"messages": turns}
        elif kind == "very many parts":
            parts = [{"type": "text", "text": mark * 4}] * 200_000
            yield "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]}
        else:
            patterns = [{"type": "string", "pattern": f"{mark}{{{n}}}"} for n in range(1, 60)]
            schema = {"name": "a", "schema": {"allOf": patterns}}
            form = {"type": "json_schema", "json_schema": schema}
            yield "/v1/chat/completions", {"messages": TALK, "response_format": form}


KINDS = ("text beyond the window", "text within the window", "ids", "templates")
KINDS += ("a long conversation", "very many parts", "grammars")


def test_the_event_loop_goes_on_whatever_is_being_read(tmp_path: Path) -> None:
    with toy_server(tmp_path, engine=WIDE, trust_request_chat_template=True) as served:
        served.serving.templates = TemplateHelpers(Limits(seconds=0.5))
        grammars = served.serving.engine.driver._grammars
        grammars._trials = Trials(lambda: grammars._get_vocabulary().plain(), Limits(seconds=0.5))
        served.client.timeout = LONG_SECONDS
        lags = {}
        for kind in KINDS:
            sent = [(path, json.dumps(body).encode()) for path, body in bodies(kind)]
            headers = {"content-type": "application/json"}

            def ask(each: tuple[str, bytes], headers: dict[str, str] = headers) -> int:
                return served.client.post(each[0], content=each[1], headers=headers).status_code

            lag = Lag(served)
            with ThreadPoolExecutor(len(sent)) as pool:
                asked = [pool.submit(ask, each) for each in sent]
                while not all(each.done() for each in asked):
                    served.complete(prompt="a", max_tokens=1)
            lags[kind] = lag.end()
            assert {each.result() for each in asked} == {400}, kind
            print(f"{kind}: 99% of {len(lag.found)} within {1e3 * lags[kind]:.1f} ms")
    assert max(lags.values()) < 10 * LAG_SECONDS


def test_large_requests_of_one_client_come_one_after_another(tmp_path: Path) -> None:
    at_work, most = 0, 0
    encode = Tokenizer.encode_batch
    lock = threading.Lock()

    def noted(self: Tokenizer, texts: Any, add_special_tokens: bool = True) -> Any:
        nonlocal at_work, most
        if sum(map(len, texts)) < 1000:
            return encode(self, texts, add_special_tokens)
        with lock:
            at_work += 1
            most = max(most, at_work)
        time.sleep(0.02)
        with lock:
            at_work -= 1
        raise RequestError("that is enough")

    with (
        pytest.MonkeyPatch.context() as patch,
        toy_server(tmp_path, engine=WIDE, api_key=("one", "two")) as served,
        ThreadPoolExecutor(8) as pool,
    ):
        patch.setattr(Tokenizer, "encode_batch", noted)

        def ask(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            answer = served.client.post(
                "/v1/completions", json={"prompt": "word " * 60_000}, headers=headers
            )
            return answer.status_code

        assert set(pool.map(ask, ["one"] * 8)) == {400}
        assert most == 1
        assert set(pool.map(ask, ["one", "two"] * 4)) == {400}
        assert most == 2
