"""One executor after another, and the launcher that outlives them."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heddle.engine.executors.base import Executor
from heddle.engine.executors.succession import RESTARTABLE, Succession
from heddle.engine.executors.wrapped import WrappedExecutor
from heddle.errors import ModelFileError
from tests.support.fake_executor import FakeExecutor, resolved_config
from tests.support.fake_worker import fake_config
from tests.support.processes import is_running, seconds_until


class Maker:
    """Notes what executors are made of."""

    def __init__(self) -> None:
        self.given: list[dict[str, Any]] = []

    def __call__(self, resolved: Any, **options: Any) -> Executor:
        self.given.append({"epoch": resolved.epoch, **options})
        return FakeExecutor(resolved_config())


def test_only_ranks_that_this_process_starts_are_started_anew() -> None:
    assert RESTARTABLE == ("inline", "threads", "processes")


def test_each_executor_is_watched_and_needs_no_launcher_in_threads() -> None:
    maker = Maker()
    succession = Succession(maker, WrappedExecutor)
    made = [succession.next(resolved_config()) for _ in range(2)]
    assert all(isinstance(executor, WrappedExecutor) for executor in made)
    assert made[0] is not made[1]
    assert [given["launcher"] for given in maker.given] == [None, None]
    succession.close()


def test_each_is_told_when_none_is_wanted_any_more() -> None:
    maker = Maker()
    succession = Succession(maker)
    for _ in range(2):
        succession.next(resolved_config())
    assert [given["closing"] for given in maker.given] == [succession.closing] * 2
    assert not succession.closing.is_set()


def test_none_is_made_for_another_checkpoint(tmp_path: Path) -> None:
    maker = Maker()
    succession = Succession(maker)
    weights = tmp_path / "model.gguf"
    weights.write_bytes(b"12345678")
    resolved = replace(resolved_config(), model_path=str(weights))
    for _ in range(2):
        succession.next(resolved)
    weights.write_bytes(b"1234567")
    with pytest.raises(ModelFileError, match=r"model.gguf has 7 bytes, it had 8\); ranks that"):
        succession.next(resolved)
    assert len(maker.given) == 2


@pytest.mark.dist
def test_a_launcher_serves_all_of_them_until_it_dies_or_hangs() -> None:
    maker = Maker()
    succession = Succession(maker)
    try:
        for _ in range(2):
            succession.next(fake_config())
        first, second = (given["launcher"] for given in maker.given)
        assert first is second
        os.kill(first.pid, signal.SIGKILL)
        seconds_until(lambda: not first.is_alive)
        succession.next(fake_config())
        third = maker.given[-1]["launcher"]
        assert third is not first
        assert third.is_alive
        third.is_silent = True
        succession.next(fake_config())
        fourth = maker.given[-1]["launcher"]
        assert fourth is not third
        assert not is_running(third.pid)
    finally:
        succession.close()
        succession.close()
    assert not is_running(fourth.pid)
