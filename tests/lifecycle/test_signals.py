"""What signals do to a server, and that a library leaves them to its program."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from tests.lifecycle.test_killed_server import in_decode, starting
from tests.support.processes import LONG_SECONDS, seconds_until
from tests.support.server_process import (
    ServerProcess,
    family_of,
    free_port,
    seconds_until_gone,
)

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1200)]

FAULT = ("--enable-fault-injection", "--self-check", "off", "--max-restarts", "0", "--faults")
SOON_SECONDS = 60.0
"""Far less than the rank sleeps, far more than an end takes."""


def ended_without_a_lie(events: list[str]) -> bool:
    """A stream that was cut short has an error at its end, or no end at all; never `[DONE]`."""
    assert events
    assert "[DONE]" not in events[-1]
    return '"error"' in events[-1]


@pytest.mark.parametrize(
    ("grace", "numbers"),
    [
        ("600", (signal.SIGTERM, signal.SIGINT)),
        pytest.param("600", (signal.SIGINT, signal.SIGINT), marks=pytest.mark.slow),
        pytest.param("2", (signal.SIGTERM,), marks=pytest.mark.slow),
    ],
    ids=["second signal", "second interrupt", "time is over"],
)
def test_a_stuck_stream_ends_with_an_error_and_nothing_is_left(
    model: Path, tmp_path: Path, grace: str, numbers: tuple[int, ...]
) -> None:
    port = free_port()
    words = ["-tp", "2", *FAULT, "sleep(1,decode,30,600)", "--shutdown-timeout", grace]
    with ServerProcess(model, tmp_path, *words, port=port) as server:
        events = in_decode(server)
        children = family_of(server.pid) - {server.pid}
        server.signal(numbers[0])
        server.await_line("stopping: 1 open request")
        if len(numbers) > 1:
            with server.client() as client:
                refused = client.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 503
            server.signal(numbers[1])
        assert server.wait() == 0, "".join(server.lines)
        assert seconds_until_gone(children) < SOON_SECONDS
    assert ended_without_a_lie(events), events
    with socket.create_server(("127.0.0.1", port)):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_second_signal_ends_a_server_that_loads(model: Path, tmp_path: Path) -> None:
    with ServerProcess(model, tmp_path, "-tp", "2", *FAULT, "sleep(1,load,0,600)") as server:
        starting(server)
        children = family_of(server.pid) - {server.pid}
        server.signal(signal.SIGTERM)
        server.await_line("stopping while the model loads")
        server.signal(signal.SIGTERM)
        assert server.wait() == 130
        assert seconds_until_gone(children) < SOON_SECONDS
    assert seconds_until(lambda: list(tmp_path.iterdir()) == []) < SOON_SECONDS


@pytest.mark.slow
def test_a_server_whose_lines_nobody_reads_goes_on(model: Path) -> None:
    """Its pipe is full long before the end."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "heddle", "serve", str(model), "--port", str(port), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert process.stdout.readline()
        body = {"prompt": "abc", "max_tokens": 0, "temperature": -1}
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=LONG_SECONDS) as client:
            for _ in range(3000):
                assert client.post("/v1/completions", json=body).status_code == 400
            assert client.get("/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG_SECONDS) == 0
        said = process.stderr.read()
        assert len(said) >= 60_000, "as much as a pipe holds"
        assert said.count(b"refused") < 3000
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


PROGRAM = """
import signal, sys
names = [number for number in signal.valid_signals()]
def handlers():
    return [signal.getsignal(number) for number in names], signal.set_wakeup_fd(-1)
before = handlers()
from heddle import LLM
import asyncio
seen = []
for executor, tp in (("inline", 1), ("processes", 2)):
    llm = LLM(sys.argv[1], executor=executor, tensor_parallel_size=tp, num_gpu_blocks_override=200)
    seen.append(handlers())
    llm.generate([[3, 4]], use_tqdm=False)
    seen.append(handlers())
    llm.close()
seen.append(handlers())
assert len(seen) == 5
assert all(found == before for found in seen), (before, seen)
"""


def test_a_library_installs_no_handlers(model: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model)],
        capture_output=True,
        text=True,
        check=False,
        timeout=LONG_SECONDS,
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_of_two_servers_that_race_for_a_port_one_is_told(model: Path, tmp_path: Path) -> None:
    port = free_port()
    folders = [tmp_path / name for name in "ab"]
    with (
        ServerProcess(model, folders[0], port=port) as one,
        ServerProcess(model, folders[1], port=port) as other,
    ):
        assert seconds_until(lambda: one.is_ended or other.is_ended) < LONG_SECONDS
        loser, winner = (one, other) if one.is_ended else (other, one)
        assert loser.wait() == 2
        assert any(f"cannot listen on 127.0.0.1:{port}" in line for line in loser.lines_to_end())
        winner.await_ready()
        with winner.client() as client:
            assert client.get("/health").status_code == 200
        winner.signal(signal.SIGTERM)
        assert winner.wait() == 0
    assert [list(folder.iterdir()) for folder in folders] == [[], []]
