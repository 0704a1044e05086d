"""How a peer talks: one JSON object a line, over stdin and stdout. Standard library alone, since
this file is copied into each peer's environment (`benchmarks/peers/setup.py`).

    start      peer.py MODEL --threads N --max-model-len L
    answer     {"name": ..., "version": ..., "dtype": ..., "load_seconds": ...}     it is ready
    ask        {"prompts": [[token id, ...], ...], "num_tokens": n}
    answer     {"tokens": [[id, ...], ...], "first_seconds": s, "rest_seconds": s}
    answer     {"error": "..."}                                         it cannot; it goes on
    end        stdin is closed

`first_seconds` is the time until every prompt has its first token, `rest_seconds` that of all
further tokens. Every prompt gets exactly `num_tokens` tokens, the most likely ones.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol


class Engine(Protocol):
    """What a peer's script wraps."""

    version: str
    dtype: str

    def run(self, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
        """The answer to one question; see `Clock.answer`."""
        ...


def serve(name: str, create: Callable[[argparse.Namespace], Engine]) -> None:
    """Load, then answer until stdin ends.

    Args:
        name: of the peer.
        create: makes the engine from `model`, `threads` and `max_model_len`.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-model-len", type=int, default=8192)
    arguments = parser.parse_args()
    # Engines print what they like: stdout becomes stderr for all but our own lines.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    started = time.perf_counter()
    engine = create(arguments)
    load_seconds = time.perf_counter() - started
    facts = {"name": name, "version": engine.version, "dtype": engine.dtype}
    answers.write(json.dumps({**facts, "load_seconds": load_seconds}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(answer_to(engine, json.loads(line))) + "\n")


def answer_to(engine: Engine, asked: dict[str, Any]) -> dict[str, Any]:
    """One answer; whatever the engine raises is one."""
    try:
        return engine.run(asked["prompts"], asked["num_tokens"])
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


class Clock:
    """Seconds to the first tokens and after them."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._first_seconds = 0.0

    def first(self) -> None:
        """Every prompt has its first token now."""
        self._first_seconds = time.perf_counter() - self._started

    def answer(self, tokens: list[list[int]]) -> dict[str, Any]:
        """All is done now."""
        rest = time.perf_counter() - self._started - self._first_seconds
        return {"tokens": tokens, "first_seconds": self._first_seconds, "rest_seconds": rest}
