"""`heddle serve` as a process of its own, over a tiny model whose ranks fail on purpose."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import psutil

from heddle.faults.dump import Dump, read_dump
from tests.support.byte_tokenizer import TEMPLATE, printable, save_folder
from tests.support.processes import LONG_SECONDS, is_running, seconds_until
from tests.support.tiny import build_tiny

FLAGS = ("--port", "0", "--json", "--num-gpu-blocks-override", "200", "--dtype", "float64")
LAYOUT_FLAGS = {"TP2 DCP2": ("-tp", "2", "-dcp", "2"), "PCP2 DCP2": ("-pcp", "2", "-dcp", "2")}


def served_model(folder: Path) -> Path:
    """A tiny model whose tokens are characters."""
    path = build_tiny(folder, "llama-8-2")
    return save_folder(path, printable(), eos_token="<|end|>", chat_template=TEMPLATE)


@dataclass
class FaultyServer:
    """One that is ready."""

    process: subprocess.Popen[str]
    url: str
    folder: Path

    @property
    def log(self) -> str:
        """Its lines so far."""
        return (self.folder / "log").read_text()

    @property
    def dumps(self) -> list[Dump]:
        """What it wrote down of its failures, oldest first."""
        return [read_dump(path) for path in sorted(self.folder.glob("cache/heddle/dumps/*.json"))]

    @property
    def children(self) -> set[int]:
        """Everything that it has started and that has not ended."""
        return {child.pid for child in psutil.Process(self.process.pid).children(recursive=True)}

    def client(self) -> httpx2.Client:
        """For requests."""
        return httpx2.Client(base_url=self.url, timeout=LONG_SECONDS)


@contextmanager
def faulty_server(model: Path, folder: Path, faults: str, *words: str) -> Iterator[FaultyServer]:
    """Ready; at the end it has to go in good order and leave nothing.

    Args:
        model: its folder.
        folder: an empty one, for its log, its cache and its temporary files.
        faults: rules, by way of the environment.
        words: more flags.
    """
    (folder / "tmp").mkdir()
    environment = {
        **os.environ,
        "HEDDLE_FAULTS": faults,
        "TMPDIR": str(folder / "tmp"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    flags = (*FLAGS, "--enable-fault-injection", *words)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "heddle", "serve", str(model), *flags],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        )
    pids: set[int] = set()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (folder / "log").read_text()
        server = FaultyServer(process, json.loads(line)["url"], folder)
        yield server
        pids = server.children if process.poll() is None else set()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        assert process.wait(LONG_SECONDS) == 0, server.log
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
    assert seconds_until(lambda: not any(map(is_running, pids))) < LONG_SECONDS
    assert list((folder / "tmp").iterdir()) == []
