"""Ranks inside this process: inline and threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from heddle.config import ResolvedConfig
from heddle.engine.executors import create_executor
from heddle.engine.executors import threads as threads_module
from heddle.engine.executors.inline import InlineExecutor
from heddle.engine.executors.threads import ThreadsExecutor
from heddle.errors import ConfigError, HeddleError, ModelFileError, PlanMismatch, RankFailed
from tests.support.fake_worker import FAKE, fake_batch, fake_config
from tests.support.processes import LONG_SECONDS, seconds_until


def threads(resolved: ResolvedConfig) -> ThreadsExecutor:
    return ThreadsExecutor(resolved, worker=FAKE)


class RankThreads:
    """Threads of ranks that were not there before: those of earlier tests may still end."""

    def __init__(self) -> None:
        self._earlier = set(threading.enumerate())

    def names(self) -> list[str]:
        new = [thread for thread in threading.enumerate() if thread not in self._earlier]
        return [thread.name for thread in new if thread.name.startswith("heddle-")]


def test_inline_runs_in_the_callers_thread() -> None:
    before, rank_threads = torch.get_num_threads(), RankThreads()
    with InlineExecutor(fake_config(num_threads=2), worker=FAKE) as executor:
        assert torch.get_num_threads() == 2
        assert not rank_threads.names()
        (reply,) = executor.execute(fake_batch(5), 99)
        assert (reply.step, reply.digest, reply.sampled[0].token_id) == (5, 99, 5)
        assert len(executor.workers) == 1
    assert torch.get_num_threads() == before
    assert executor.workers == ()


def test_inline_refuses_a_world_of_two() -> None:
    with pytest.raises(ConfigError, match=r"executor=inline with 2 ranks"):
        InlineExecutor(fake_config(tp=2), worker=FAKE)


def test_replies_come_in_order_of_rank() -> None:
    # Rank 0 answers last.
    with threads(fake_config({"0:1+": "sleep 0.2"}, tp=2, pcp=2)) as executor:
        replies = executor.execute(fake_batch(1), 99)
        assert [reply.coverage for reply in replies] == [(0,), (1,), (2,), (3,)]
        assert replies[0].sampled[0].token_id == 1 + 2 + 3 + 4
        assert [worker.rank for worker in executor.workers] == [0, 1, 2, 3]  # type: ignore[attr-defined]


def test_thread_ranks_persist_over_steps_and_end_with_close() -> None:
    rank_threads = RankThreads()
    with threads(fake_config(tp=3)) as executor:
        names = rank_threads.names()
        for step in range(5):
            executor.execute(fake_batch(step), step)
        assert rank_threads.names() == names == ["heddle-rank0", "heddle-rank1", "heddle-rank2"]
    executor.close()
    assert seconds_until(lambda: not rank_threads.names()) < LONG_SECONDS


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_rank_that_raised_is_named_not_its_peers(rank: int) -> None:
    with threads(fake_config({f"{rank}:4": "raise"}, tp=3)) as executor:
        executor.execute(fake_batch(3), 0)
        with pytest.raises(RankFailed) as caught:
            executor.execute(fake_batch(4, epoch=1), 0)
        first = str(caught.value).splitlines()[0]
        words = f"rank{rank} tp{rank} pcp0 dcp0 failed in step 4 of epoch 1: ValueError: boom"
        assert first.startswith(words)
        assert "in execute" in str(caught.value)
        assert isinstance(caught.value.__cause__, ValueError)
        with pytest.raises(RankFailed, match=rf"step 5 is refused.*because rank{rank} tp"):
            executor.execute(fake_batch(5), 0)


def test_inline_failure_closes_it_too() -> None:
    with InlineExecutor(fake_config({"0:1": "raise"}), worker=FAKE) as executor:
        with pytest.raises(RankFailed, match=r"rank0 tp0 pcp0 dcp0 failed in step 1 of epoch 0"):
            executor.execute(fake_batch(1), 0)
        with pytest.raises(RankFailed, match="step 2 is refused"):
            executor.execute(fake_batch(2), 0)


@pytest.mark.parametrize("world", [1, 2])
def test_a_file_at_fault_stays_a_file_at_fault(world: int) -> None:
    resolved = fake_config({f"{world - 1}:start": "missing"}, tp=world)
    executor = InlineExecutor(resolved, worker=FAKE) if world == 1 else threads(resolved)
    with pytest.raises(ModelFileError, match=rf"missing tensor x.*\[rank{world - 1} "):
        executor.start()


def test_a_rank_that_raises_before_its_groups_does_not_leave_peers_waiting() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank1 .* failed while starting: ValueError: boom"):
        threads(fake_config({"1:before": "raise"}, tp=2)).start()
    assert time.monotonic() - started < LONG_SECONDS / 2  # the peers' own limit is twice that


def test_peers_of_a_failed_rank_are_released_and_follow_its_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads_module, "_SETTLE_SECONDS", LONG_SECONDS)
    with (
        threads(fake_config({"1:0": "raise"}, tp=2)) as executor,
        pytest.raises(RankFailed, match=r"(?s)rank1 .*ValueError: boom.*then rank0 .*RankFailed"),
    ):
        executor.execute(fake_batch(0), 0)


@pytest.fixture
def released(tmp_path: Path) -> Iterator[Path]:
    """A file that a rank waits for; it comes when the test is over."""
    path = tmp_path / "released"
    yield path
    path.touch()  # a thread cannot be ended


def test_a_late_rank_is_named_when_its_peers_time_out(released: Path) -> None:
    resolved = fake_config({"1:2": f"wait {released}"}, tp=2, step_timeout_seconds=3.0)
    with threads(resolved) as executor:
        executor.execute(fake_batch(1), 0)
        with pytest.raises(
            RankFailed, match=r"rank1 tp1 pcp0 dcp0 failed in step 2.*did not answer"
        ):
            executor.execute(fake_batch(2), 0)


@pytest.mark.parametrize("word", ["epoch", "step", "digest"])
def test_disagreement_is_a_mismatch_and_ends_the_executor(word: str) -> None:
    with threads(fake_config({"1:6": f"wrong {word}"}, tp=2)) as executor:
        with pytest.raises(PlanMismatch, match=f"rank 1 answered with {word}"):
            executor.execute(fake_batch(6), 40)
        with pytest.raises(RankFailed, match="step 7 is refused"):
            executor.execute(fake_batch(7), 40)


def test_progress_names_the_rank() -> None:
    seen: list[tuple[int, int, int]] = []
    resolved = fake_config(tp=2)
    with ThreadsExecutor(resolved, worker=FAKE, on_progress=lambda *what: seen.append(what)):
        pass
    assert sorted(seen) == [(0, 1, 2), (0, 2, 2), (1, 1, 2), (1, 2, 2)]


def test_an_executor_runs_only_between_start_and_close() -> None:
    executor = InlineExecutor(fake_config(), worker=FAKE)
    with pytest.raises(RankFailed, match="not started"):
        executor.execute(fake_batch(0), 0)
    executor.start()
    with pytest.raises(HeddleError, match="is running; an executor starts once"):
        executor.start()
    executor.close()
    executor.close()
    with pytest.raises(HeddleError, match="is closed; an executor starts once"):
        executor.start()


@pytest.mark.parametrize("name", ["inline", "threads"])
def test_create_follows_the_name(name: str) -> None:
    executor = create_executor(fake_config(executor=name))
    assert type(executor).__name__.lower() == f"{name}executor"


def test_create_refuses_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match="executor=moon is not known; legal here: inline"):
        create_executor(fake_config(executor="moon"))
