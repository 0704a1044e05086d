"""Of two that take one address at the same moment exactly one has it."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from heddle.errors import ConfigError
from heddle.server.config import ServerConfig
from heddle.server.listening import bind
from tests.support.processes import LONG_SECONDS
from tests.support.server_process import free_port

NUM_ROUNDS = 100


def race(settings: ServerConfig, num_runners: int = 2) -> tuple[list[socket.socket], list[str]]:
    """Let threads bind at once; sockets of those that could, words to those that could not."""
    start = threading.Barrier(num_runners)
    won: list[socket.socket] = []
    lost: list[str] = []

    def run() -> None:
        start.wait(LONG_SECONDS)
        try:
            won.append(bind(settings))
        except ConfigError as error:
            lost.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(num_runners)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_SECONDS)
    return won, lost


@pytest.mark.parametrize("kind", ["port", "path", "path of a dead server"])
def test_one_wins_and_can_be_reached_and_the_other_is_told(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "heddle.sock"
    for _ in range(NUM_ROUNDS):
        settings = ServerConfig(port=free_port()) if kind == "port" else ServerConfig(uds=str(path))
        if kind == "path of a dead server":
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(path))
        won, lost = race(settings)
        try:
            assert (len(won), len(lost)) == (1, 1), lost
            assert lost[0].startswith("cannot listen on ")
            with socket.socket(won[0].family) as client:
                client.connect(won[0].getsockname())  # the path leads to the winner's socket
                won[0].accept()[0].close()
        finally:
            for listener in won:
                listener.close()
            path.unlink(missing_ok=True)
