"""Several replicas and stages: who runs beside whom, and whose failure is named."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from heddle.engine.executors import deadline, processes
from heddle.engine.executors.launcher import RankLauncher
from heddle.engine.executors.lifecycle import ManagedExecutor
from heddle.engine.executors.processes import ProcessesExecutor
from heddle.engine.executors.threads import ThreadsExecutor
from heddle.errors import PlanMismatch, RankFailed
from tests.support.fake_worker import FAKE, fake_batch, fake_config
from tests.support.processes import LONG_SECONDS, is_alive

pytestmark = [pytest.mark.timeout(1200)]
WARM = ("torch", "heddle.comm.shared_memory.world", "tests.support.fake_worker")
Create = Callable[..., ManagedExecutor]


@pytest.fixture(scope="module")
def launcher() -> Iterator[RankLauncher]:
    launcher = RankLauncher(warm_modules=WARM)
    yield launcher
    launcher.close()


@pytest.fixture(params=["threads", pytest.param("processes", marks=pytest.mark.dist)])
def create(
    request: pytest.FixtureRequest, launcher: RankLauncher, monkeypatch: pytest.MonkeyPatch
) -> Create:
    # Limits that a test does not set itself must not end a wait, however busy the machine is.
    monkeypatch.setattr(deadline, "FLOOR_SECONDS", LONG_SECONDS)
    monkeypatch.setattr(processes, "_SETTLE_SECONDS", LONG_SECONDS)

    def create_with(script: dict[str, str], **options: Any) -> ManagedExecutor:
        resolved = fake_config(script, **options)
        if request.param == "threads":
            return ThreadsExecutor(resolved, worker=FAKE)
        return ProcessesExecutor(resolved, worker=FAKE, launcher=launcher)

    return create_with


def step(number: int) -> tuple[Any, int]:
    return fake_batch(number), 40 + number


@pytest.fixture
def released(tmp_path: Path) -> Iterator[Path]:
    """A file that ranks wait for, LONG_SECONDS at most; it comes when the test is over."""
    path = tmp_path / "released"
    yield path
    path.touch()  # a thread cannot be ended


def test_the_first_stage_works_on_the_next_step_while_the_last_is_busy(
    create: Create, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    # Stage 1 ends step 0 only once stage 0 has begun step 1.
    script = {"1:0": f"wait {begun}", "0:1": f"signal {begun}"}
    with create(script, pp=2) as executor:
        executor.submit({0: step(0)})
        executor.submit({0: step(1)})
        for number in (0, 1):
            replies = executor.collect(0)
            assert [(r.step, r.digest, r.coverage) for r in replies] == [
                (number, 40 + number, (rank,)) for rank in (0, 1)
            ]
            assert [len(r.sampled) for r in replies] == [0, 1]


def test_a_slow_replica_holds_up_no_other(create: Create, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    script = {"1:0": f"wait {ready}", "0:3": f"signal {ready}"}
    with create(script, dp=2) as executor:
        executor.submit({0: step(0), 1: step(0)})
        for number in range(3):
            assert executor.first_done() == 0
            assert [r.coverage for r in executor.collect(0)] == [(0,)]
            executor.submit({0: step(number + 1)})
        assert [(r.step, r.coverage) for r in executor.collect(1)] == [(0, (1,))]
        assert [(r.step, r.coverage) for r in executor.collect(0)] == [(3, (0,))]


def test_each_replica_gets_its_own_batch(create: Create) -> None:
    with create({}, dp=2, tp=2) as executor:
        executor.submit({0: step(3), 1: step(5)})
        assert executor.collect(1)[0].sampled[0].token_id == 5 * 2 + 2 + 3
        assert executor.collect(0)[0].sampled[0].token_id == 3 * 2 + 0 + 1
        with pytest.raises(ValueError, match="no step is under way"):
            executor.collect(1)
        assert executor.execute(*step(6))[0].step == 6  # the question broke nothing


def test_a_failure_in_one_replica_ends_all_and_is_named(create: Create, released: Path) -> None:
    with create({"3:7": "raise", "0:0": f"wait {released}"}, dp=2, tp=2) as executor:
        executor.submit({0: step(0), 1: step(7)})
        started = time.monotonic()
        with pytest.raises(RankFailed, match=r"rank3 dp1 tp1 pcp0 dcp0 failed in step 7 .*boom"):
            executor.collect(0)
        assert time.monotonic() - started < LONG_SECONDS / 2
        with pytest.raises(RankFailed, match=r"step 1 is refused.*because rank3 dp1"):
            executor.submit({0: step(1)})


def test_the_step_is_named_in_which_the_rank_failed_not_the_oldest(
    create: Create, released: Path
) -> None:
    with create({"0:1": "raise", "1:0": f"wait {released}"}, pp=2) as executor:
        executor.submit({0: step(0)})
        executor.submit({0: step(1)})
        with pytest.raises(RankFailed, match=r"rank0 pp0 tp0 pcp0 dcp0 failed in step 1 .*boom"):
            executor.collect(0)


def test_the_silent_rank_of_a_late_replica_is_named(create: Create, released: Path) -> None:
    script = {"1:0": f"wait {released}", "0:1": f"wait {released}"}
    with create(script, dp=2, step_timeout_seconds=3.0) as executor:
        executor.submit({0: step(0), 1: step(0)})
        assert executor.first_done() == 0
        executor.collect(0)
        time.sleep(2.0)
        executor.submit({0: step(1)})  # it waits as well, and has time left
        with pytest.raises(RankFailed) as caught:
            executor.first_done()
    text = str(caught.value)
    assert text.startswith("rank1 dp1 tp0 pcp0 dcp0 failed in step 0 of epoch 0: ")
    assert "did not answer" in text
    blamed, _, stood = text.partition("where the ranks stood:")
    assert "rank0" not in blamed  # where it stands is told of every process
    assert [line.partition(" ")[0] for line in stood.splitlines()[1:]] in ([], ["rank0", "rank1"])


def test_a_driver_that_comes_late_itself_takes_what_is_there(create: Create) -> None:
    with create({}, step_timeout_seconds=1.0) as executor:
        executor.submit({0: step(0)})
        time.sleep(1.5)
        assert executor.collect(0)[0].step == 0


def test_closing_in_the_middle_of_steps_does_not_wait_for_them(
    create: Create, released: Path
) -> None:
    with create({"1:0": f"wait {released}"}, pp=2) as executor:
        pids = executor.pids if isinstance(executor, ProcessesExecutor) else ()
        executor.submit({0: step(0)})
        executor.submit({0: step(1)})
        started = time.monotonic()
    assert time.monotonic() - started < LONG_SECONDS / 2
    assert not any(map(is_alive, pids))


def test_disagreement_names_the_global_rank(create: Create) -> None:
    with create({"1:6": "wrong digest"}, dp=2) as executor:
        executor.submit({0: step(6), 1: step(6)})
        executor.collect(0)
        with pytest.raises(PlanMismatch, match="rank 1 answered with digest 47"):
            executor.collect(1)
