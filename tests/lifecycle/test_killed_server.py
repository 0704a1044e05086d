"""A server that is killed leaves no process, no file and no port, whatever it was doing."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.processes import LONG_SECONDS, command_line, is_running, seconds_until
from tests.support.server_process import (
    ServerProcess,
    family_of,
    free_port,
    in_background,
    seconds_until_gone,
)

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1200)]

SHARED = Path("/dev/shm")
GONE_SECONDS = 20.0
"""It takes 0.1 s where nothing else runs; ranks without a driver would stay for good."""
NO_CHECK = ("--self-check", "off")
"""It would run the fault as well."""
NUM_CHILDREN = 3
"""The launcher and two ranks."""


def starting(server: ServerProcess) -> None:
    """The ranks are there, and one of them never ends loading."""
    server.await_line("listening at")
    assert seconds_until(lambda: len(family_of(server.pid)) > NUM_CHILDREN) < LONG_SECONDS


def idle(server: ServerProcess) -> None:
    """Ready, with a request behind it; the helpers live."""
    server.await_ready()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = {
        "messages": [{"role": "user", "content": "abc"}],
        "max_tokens": 3,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    }
    with server.client() as client:
        assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert len(family_of(server.pid)) > NUM_CHILDREN + 1, "the helper that compiles grammars"


def in_prefill(server: ServerProcess) -> None:
    """A rank sleeps in the layers of a prompt."""
    events = ask(server.await_ready(), "abc " * 100)
    assert seconds_until(lambda: num_running(server) == 1) < LONG_SECONDS
    assert events == []


def in_decode(server: ServerProcess) -> list[str]:
    """A stream has begun, and a rank sleeps in the layers of a later token; the stream's events."""
    events = ask(server.await_ready(), "abc")
    assert seconds_until(lambda: bool(events)) < LONG_SECONDS
    assert num_running(server) == 1
    return events


def ask(server: ServerProcess, text: str) -> list[str]:
    """Begin a stream; its events as they come."""
    body = {"prompt": text, "max_tokens": 50, "ignore_eos": True, "stream": True}
    events: list[str] = []

    def read() -> None:
        with (
            server.client() as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            events.extend(line for line in response.iter_lines() if line.startswith("data:"))

    in_background(read)
    return events


def num_running(server: ServerProcess) -> int:
    """Requests that the server has in its steps."""
    with server.client() as client:
        lines = client.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("vllm:num_requests_running{")]
    return int(float(found[0].split()[-1]))


FAULTS: dict[Callable[[ServerProcess], object], str] = {
    starting: "sleep(1,load,0,600)",
    idle: "",
    in_prefill: "sleep(1,prefill,30,600)",
    in_decode: "sleep(1,decode,30,600)",
}
STATES = list(FAULTS)


def kill_in(
    state: Callable[[ServerProcess], object], model: Path, scratch: Path, port: int
) -> float:
    """Start a server, bring it there, kill it; how long its children outlived it."""
    faults = FAULTS[state]
    words = [
        "-tp",
        "2",
        *(["--enable-fault-injection", "--faults", faults, *NO_CHECK] if faults else []),
    ]
    shared_before = set(os.listdir(SHARED))
    with ServerProcess(model, scratch, *words, port=port) as server:
        state(server)
        others = server.kill()
        took = seconds_until_gone(others)
    assert len(others) >= NUM_CHILDREN
    left = {pid: command_line(pid)[-200:] for pid in others if is_running(pid)}
    assert took < GONE_SECONDS, left
    # At once, while connections of the killed one may still linger.
    with socket.create_server(("127.0.0.1", port)):
        pass
    assert set(os.listdir(SHARED)) <= shared_before
    assert seconds_until(lambda: list(scratch.iterdir()) == []) < GONE_SECONDS, list(
        scratch.iterdir()
    )
    return took


def test_a_killed_server_can_be_started_again_and_again(model: Path, tmp_path: Path) -> None:
    """On the same port each time, and in another state each time."""
    port = free_port()
    for state in (starting, in_decode, idle):
        took = kill_in(state, model, tmp_path / "scratch", port)
        print(f"{state.__name__}: all children gone {took:.3f} s after the server")


@pytest.mark.slow
def test_twenty_crashes_leave_nothing(model: Path, tmp_path: Path) -> None:
    port, times = free_port(), []
    for number in range(20):
        state = STATES[number % len(STATES)]
        times.append(kill_in(state, model, tmp_path / "scratch", port))
    print(f"20 rounds: children gone after {min(times):.3f} to {max(times):.3f} s")
    scratch = tmp_path / "scratch"
    with ServerProcess(model, scratch, "-tp", "2", port=port) as server:
        server.await_ready()
        with server.client() as client:
            assert client.get("/health").status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_no_child_outlives_a_server_that_is_killed(
    model: Path, tmp_path: Path, state: Callable[[ServerProcess], object]
) -> None:
    took = kill_in(state, model, tmp_path / "scratch", free_port())
    print(f"{state.__name__}: all children gone {took:.3f} s after the server")
