"""`heddle serve` as a process with its own folder for temporary files, and all its children."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2

from tests.support.processes import LONG_SECONDS, children_of, is_running, seconds_until


def free_port() -> int:
    """One that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def family_of(pid: int) -> set[int]:
    """A process and all that descend from it."""
    found, new = set(), {pid}
    while new:
        found |= new
        new = {child for parent in new for child in children_of(parent)} - found
    return found


class ServerProcess:
    """A server; what it says on stderr is kept, and its end is enforced by the block."""

    def __init__(
        self, model: Path, scratch: Path, *words: str, port: int = 0, **environment: str
    ) -> None:
        scratch.mkdir(exist_ok=True)
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "heddle", "serve", str(model), "--port", str(port)),
                *("--json", "--num-gpu-blocks-override", "200", *words),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(scratch), **environment},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = f"http://127.0.0.1:{port}"

    @property
    def pid(self) -> int:
        """Of the server itself."""
        return self._process.pid

    def await_ready(self) -> Self:
        """Return once it takes requests."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert '"url"' in line, line + "".join(self.lines)
        self.url = json.loads(line)["url"]
        return self

    def await_line(self, text: str) -> None:
        """Return once it has said this."""

        def is_said() -> bool:
            return any(text in line for line in self.lines) or self._process.poll() is not None

        assert seconds_until(is_said) < LONG_SECONDS
        assert any(text in line for line in self.lines), "".join(self.lines)

    def client(self) -> httpx2.Client:
        """To ask it; close it."""
        return httpx2.Client(base_url=self.url, timeout=LONG_SECONDS)

    def signal(self, number: int) -> None:
        """Send one to the server alone."""
        self._process.send_signal(number)

    def kill(self) -> set[int]:
        """End it as the kernel does when memory is out; those that it had started, itself not."""
        others = family_of(self.pid) - {self.pid}
        self._process.kill()
        self._process.wait()
        return others

    @property
    def is_ended(self) -> bool:
        """The server itself has ended."""
        return self._process.poll() is not None

    def lines_to_end(self) -> list[str]:
        """All that it said, once it has ended."""
        self._reader.join(LONG_SECONDS)
        return self.lines

    def wait(self) -> int:
        """Its exit code."""
        return self._process.wait(LONG_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join(LONG_SECONDS)
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line)


def seconds_until_gone(pids: set[int]) -> float:
    """Wait until none of them runs."""
    return seconds_until(lambda: not any(map(is_running, pids)))


def in_background(work: Callable[[], Any]) -> threading.Thread:
    """Do something that ends with the server, however it ends."""

    def attempt() -> None:
        with suppress(httpx2.HTTPError):  # the server was killed
            work()

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    return thread
