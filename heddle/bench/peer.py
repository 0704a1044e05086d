"""Another engine as a contestant: a process that answers JSON lines (`heddle.bench.lines`).

A peer is a folder with `bin/python` and `peer.py`, as `benchmarks/peers/setup.py` makes it, or the
transformers library, which is installed with Heddle.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from heddle.bench.contest import Answered
from heddle.config.folders import default_cache_dir
from heddle.errors import ConfigError, HeddleError

TRANSFORMERS = "transformers"
_LOAD_SECONDS = 600.0
_ANSWER_SECONDS = 600.0
_LAST_WORDS = 400
"""Characters of a dead peer's log that a message shows."""


def default_peers_dir() -> Path:
    """Where peers are set up unless told otherwise."""
    return default_cache_dir() / "peers"


def present_peers(peers_dir: Path) -> list[str]:
    """Names of the peers that can be run."""
    folders = sorted(peers_dir.iterdir()) if peers_dir.is_dir() else []
    return [TRANSFORMERS, *(folder.name for folder in folders if _is_peer(folder))]


def peer_command(name: str, peers_dir: Path) -> list[str]:
    """How to start a peer.

    Args:
        name: `transformers`, or of a folder.
        peers_dir: of the folders.
    Raises:
        ConfigError: it is not set up here.
    """
    if name == TRANSFORMERS:
        return [sys.executable, "-m", "heddle.bench.transformers_peer"]
    folder = peers_dir / name
    if not _is_peer(folder):
        raise ConfigError(
            f"peer {name!r} is not set up: {folder} has no bin/python and peer.py; "
            f"here are: {', '.join(present_peers(peers_dir))}"
        )
    return [str(folder / "bin" / "python"), str(folder / "peer.py")]


def _is_peer(folder: Path) -> bool:
    return (folder / "bin" / "python").exists() and (folder / "peer.py").exists()


class Peer:
    """A running peer. A context manager."""

    def __init__(
        self, command: Sequence[str], model: Path, *, num_threads: int, max_model_len: int
    ) -> None:
        """Start it and wait until it has loaded.

        Args:
            command: from `peer_command`.
            model: a folder or file that it can read.
            num_threads: of it.
            max_model_len: longest prompt with its answer.
        Raises:
            HeddleError: it ended, or took too long.
        """
        self._log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the peer
        options = ["--threads", str(num_threads), "--max-model-len", str(max_model_len)]
        self._process = subprocess.Popen(  # noqa: S603 - a peer that the user has set up
            [*command, str(model), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.facts = self._read(_LOAD_SECONDS)
        self.name = str(self.facts["name"])
        self.is_exact = self.facts["dtype"] == "float32"

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Answered:
        """Complete prompts; see `Contestant.run`.

        Raises:
            HeddleError: it cannot, it ended, or took too long.
        """
        assert self._process.stdin is not None  # asked for above
        question = {"prompts": [list(prompt) for prompt in prompts], "num_tokens": num_tokens}
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._read(_ANSWER_SECONDS)
        if "error" in answer:
            raise HeddleError(f"peer {self.name}: {answer['error']}")
        tokens = tuple(tuple(ids) for ids in answer["tokens"])
        return Answered(tokens, answer["first_seconds"], answer["rest_seconds"])

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self, seconds: float) -> dict[str, Any]:
        """The next line; a silent peer is killed, which ends the line too."""
        assert self._process.stdout is not None  # asked for above
        watchdog = threading.Timer(seconds, self._process.kill)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            self._process.wait()
            self._log.seek(0)
            words = self._log.read().strip()[-_LAST_WORDS:]
            self.close()
            raise HeddleError(f"a peer ended or was silent for {seconds:g} s: {words}")
        answer: dict[str, Any] = json.loads(line)
        return answer
