"""When ranks fail, their driver says where each of them stood, and keeps it."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from heddle.config import folders
from heddle.config.faults import fault_rules
from heddle.engine.executors.black_box import with_standings
from heddle.engine.executors.failure import Failure
from heddle.engine.executors.launcher import RankLauncher
from heddle.engine.executors.processes import ProcessesExecutor
from heddle.errors import RankFailed
from heddle.faults.dump import read_dump
from heddle.faults.watch import create_watch
from tests.support.fake_worker import FAKE, fake_batch, fake_config


@pytest.fixture(scope="module")
def launcher() -> Iterator[RankLauncher]:
    warm = ("torch", "heddle.comm.shared_memory.world", "tests.support.fake_worker")
    launcher = RankLauncher(warm_modules=warm)
    yield launcher
    launcher.close()


@pytest.fixture(autouse=True)
def dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(folders, "default_dump_dir", lambda: tmp_path / "dumps")
    return tmp_path / "dumps"


def failure(rank: int) -> Failure:
    return Failure(rank=rank, text="it did not answer\nmore", detail="stacks")


def standings(num_ranks: int) -> list:
    watches = [create_watch((), rank, 0) for rank in range(num_ranks)]
    for watch in watches:
        watch.begin_step(4, "decode")
    return [watch.page.standing() for watch in watches]


def test_the_cause_says_where_all_ranks_stood(
    dumps: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    found = with_standings(fake_config(tp=2), [failure(1), failure(0)], standings(2))
    assert found[1] == failure(0)
    assert found[0].detail.splitlines() == [
        "stacks",
        "where the ranks stood:",
        "rank0 tp0 pcp0 dcp0: decode, step 4, 0 collectives begun",
        "rank1 tp1 pcp0 dcp0: decode, step 4, 0 collectives begun",
    ]
    (path,) = dumps.iterdir()
    assert f"heddle doctor --dump {path}" in caplog.text
    dump = read_dump(path)
    assert dump.cause == "rank1 tp1 pcp0 dcp0: it did not answer"
    assert dump.groups["tp"] == ((0, 1),)


def test_without_a_page_nothing_is_added(dumps: Path) -> None:
    assert with_standings(fake_config(tp=2), [failure(1)], []) == [failure(1)]
    assert not dumps.exists()


def test_a_user_without_a_home_gets_the_failure_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")  # the words of pathlib

    monkeypatch.setattr(folders, "default_dump_dir", no_home)
    found = with_standings(fake_config(tp=2), [failure(1)], standings(2))
    assert "where the ranks stood:" in found[0].detail
    assert "is not kept: Could not determine home directory." in caplog.text


def test_a_full_disk_does_not_hide_the_failure(
    dumps: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resolved = fake_config(tp=2, faults=fault_rules("disk_full(driver,dump,0)"))
    found = with_standings(resolved, [failure(1)], standings(2))
    assert "where the ranks stood:" in found[0].detail
    assert "what the ranks did last is not kept" in caplog.text
    assert "no space left" in caplog.text
    assert not dumps.exists()


@pytest.mark.dist
def test_a_stopped_rank_is_named_with_the_step_that_it_never_joined(
    launcher: RankLauncher, dumps: Path
) -> None:
    """The others are inside a collective; the stopped one has not begun it."""
    resolved = fake_config({"1:2": "stop"}, tp=2, step_timeout_seconds=3.0)
    executor = ProcessesExecutor(resolved, worker=FAKE, launcher=launcher)
    with executor:
        for step in range(2):
            executor.execute(fake_batch(step), 1)
        with pytest.raises(RankFailed, match=r"^rank1 ") as found:
            executor.execute(fake_batch(2), 1)
    lines = str(found.value).splitlines()
    start = lines.index("where the ranks stood:")
    assert lines[start + 1].startswith(
        "rank0 tp0 pcp0 dcp0: collective, step 2, 1 collective begun"
    )
    assert "inside all_reduce over tp, [1] int64" in lines[start + 1]
    assert lines[start + 2].startswith("rank1 tp1 pcp0 dcp0: prefill, step 2, 0 collectives begun")
    assert "no heartbeat for " in lines[start + 2]  # seen before it was resumed for its stacks
    assert lines[start + 2].endswith("<- all others are further")
    (path,) = dumps.iterdir()
    assert [rank.num_collectives for rank in read_dump(path).ranks] == [1, 0]


@pytest.mark.dist
def test_the_dead_are_seen_too(launcher: RankLauncher, dumps: Path) -> None:
    with ProcessesExecutor(fake_config(tp=2), worker=FAKE, launcher=launcher) as executor:
        executor.execute(fake_batch(0), 1)
        os.kill(executor.pids[0], signal.SIGKILL)
        with pytest.raises(RankFailed, match="killed by SIGKILL"):
            executor.execute(fake_batch(1), 1)
    (path,) = dumps.iterdir()
    assert [standing.rank for standing in read_dump(path).ranks] == [0, 1]
