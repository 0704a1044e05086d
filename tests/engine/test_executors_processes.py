"""Ranks as processes: every way to fail is seen, named, and leaves nothing behind."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from heddle.engine.executors import create_executor, deadline, processes
from heddle.engine.executors import ranks as ranks_module
from heddle.engine.executors.launcher import RankLauncher
from heddle.engine.executors.processes import ProcessesExecutor
from heddle.errors import ModelFileError, PlanMismatch, RankFailed
from tests.support.fake_worker import FAKE, fake_batch, fake_config
from tests.support.processes import (
    LONG_SECONDS,
    await_file,
    children_of,
    command_line,
    is_alive,
    is_running,
    listening_addresses,
    nothing_left,
    num_threads,
    seconds_until,
)

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1200)]
ROOT = Path(__file__).parents[2]
WARM = ("torch", "heddle.comm.shared_memory.world", "tests.support.fake_worker")
LIMIT_SECONDS = 5.0
"""Of steps that hang: the fifth of it that is left when collectives end is for saying so."""


@pytest.fixture(scope="module")
def launcher() -> Iterator[RankLauncher]:
    launcher = RankLauncher(warm_modules=WARM)
    with ProcessesExecutor(fake_config(), worker=FAKE, launcher=launcher):
        pass  # it is warm once it has started a rank
    yield launcher
    launcher.close()
    assert not is_alive(launcher.pid)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that a test does not set itself must not end a wait, however busy the machine is."""
    monkeypatch.setattr(deadline, "FLOOR_SECONDS", LONG_SECONDS)
    monkeypatch.setattr(processes, "_SETTLE_SECONDS", LONG_SECONDS)
    monkeypatch.setattr(ranks_module, "_STOP_SECONDS", LONG_SECONDS)
    monkeypatch.setattr(ranks_module, "_REAP_SECONDS", LONG_SECONDS)


@pytest.fixture(autouse=True)
def every_test_leaves_nothing(
    launcher: RankLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """No descriptor, thread, rank or file is there after a test that was not there before."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with nothing_left(launcher.pid):
        yield
        gc.collect()
        assert children_of(launcher.pid) == set()
    assert list(tmp_path.glob("heddle-*")) == []


@pytest.fixture
def create(launcher: RankLauncher) -> Any:
    def create_with(script: dict[str, str] | None = None, **options: Any) -> ProcessesExecutor:
        resolved = fake_config(script, **({"tp": 2} | options))
        return ProcessesExecutor(resolved, worker=FAKE, launcher=launcher)

    return create_with


def first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]


def test_replies_come_in_order_of_rank_from_processes_that_persist(create: Any) -> None:
    with create({"0:1+": "sleep 0.1"}, pcp=2) as executor:
        pids = executor.pids
        assert len(set(pids)) == 4
        for step in range(3):
            replies = executor.execute(fake_batch(step), 2**64 - 1)
            assert [reply.coverage for reply in replies] == [(0,), (1,), (2,), (3,)]
            assert replies[0].sampled[0].token_id == 4 * step + 6
        assert executor.pids == pids
    assert not any(map(is_alive, pids))


def test_later_ranks_are_forks_of_the_warm_launcher_and_leave_when_asked(
    create: Any, launcher: RankLauncher
) -> None:
    started = time.monotonic()
    with create() as executor:
        ready = time.monotonic() - started
        # A new program in their place would have to import torch again.
        assert {*map(command_line, executor.pids)} == {command_line(launcher.pid)}
        started = time.monotonic()
    closed = time.monotonic() - started
    print(f"start {ready:.3f} s, close {closed:.3f} s")
    assert closed < LONG_SECONDS / 2  # ranks that do not leave are killed at LONG_SECONDS


@pytest.mark.parametrize("library", ["shm", "gloo"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", "ValueError: boom on rank"),
        ("kill", "its process was killed by SIGKILL"),
        ("abort", "its process was killed by SIGABRT"),
        ("exit 3", "its process exited with code 3"),
    ],
)
def test_the_rank_at_fault_is_named_at_once(
    create: Any, fault: str, words: str, rank: int, library: str
) -> None:
    with create({f"{rank}:4": fault}, cpu_comm_backend=library) as executor:
        executor.execute(fake_batch(3), 0)
        started = time.monotonic()
        with pytest.raises(RankFailed) as caught:
            executor.execute(fake_batch(4, epoch=2), 0)
        detected = time.monotonic() - started
        print(f"{fault} on rank {rank}: {detected:.3f} s")
        who = f"rank{rank} tp{rank} pcp0 dcp0 failed in step 4 of epoch 2: "
        assert first_line(caught.value).startswith(who + words)
        assert detected < LONG_SECONDS / 2  # 0.02 s when nothing else runs; the limit is twice that
        assert executor.pids == ()
        with pytest.raises(RankFailed, match=rf"step 5 is refused.*closed because rank{rank} "):
            executor.execute(fake_batch(5), 0)
    if fault == "abort":
        assert "last words before abort" in str(caught.value)
        assert "in _act" in str(caught.value)  # the stack of the abort
    if fault == "raise":
        assert "tests/support/fake_worker.py" in str(caught.value)


def test_a_rank_that_dies_between_steps_is_named_at_the_next(create: Any) -> None:
    with create() as executor:
        executor.execute(fake_batch(0), 0)
        os.kill(executor.pids[1], signal.SIGKILL)
        with pytest.raises(RankFailed, match=r"rank1 .* in step 1 .* killed by SIGKILL"):
            executor.execute(fake_batch(1), 0)


def silence_in(text: str) -> float:
    """After how many seconds a rank was given up."""
    (seconds,) = re.findall(r"it did not answer within (\d+\.\d) s", text)
    return float(seconds)


@pytest.mark.parametrize(
    ("fault", "frame"),
    [("stop", "in _act"), ("sleep 600", "in sleep_on_purpose"), ("spin 600", "in _act")],
)
def test_a_hung_rank_is_named_by_the_deadline_with_its_stacks(
    create: Any, fault: str, frame: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All of it is waited for where a rank is gone already.
    monkeypatch.setattr(ranks_module, "_STACKS_SECONDS", 2.0)
    with create({"1:2": fault}, step_timeout_seconds=LIMIT_SECONDS) as executor:
        executor.execute(fake_batch(1), 0)
        with pytest.raises(RankFailed) as caught:
            executor.execute(fake_batch(2), 0)
    text = str(caught.value)
    first = first_line(caught.value)
    assert first.startswith("rank1 tp1 pcp0 dcp0 failed in step 2 of epoch 0: it did not answer")
    assert silence_in(first) >= LIMIT_SECONDS
    assert frame in text
    assert "then rank0 tp0 pcp0 dcp0: CollectiveTimeout" in text


@pytest.mark.parametrize("when", ["before", "start"])
@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_a_start_that_fails_shows_the_first_cause(create: Any, when: str, fault: str) -> None:
    executor = create({f"1:{when}": fault})
    started = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        executor.start()
    assert time.monotonic() - started < LONG_SECONDS / 2  # the group's own limit is twice that
    words = "ValueError: boom" if fault == "raise" else "its process was killed by SIGKILL"
    assert first_line(caught.value).startswith(
        f"rank1 tp1 pcp0 dcp0 failed while starting: {words}"
    )


def test_a_start_that_hangs_ends_by_its_limit(create: Any) -> None:
    executor = create({"0:start": "sleep 600"}, startup_timeout_seconds=3.0)
    with pytest.raises(RankFailed, match=r"^rank0 .* while starting: it did not answer") as caught:
        executor.start()
    assert silence_in(first_line(caught.value)) >= 3.0


def test_a_file_at_fault_stays_a_file_at_fault(create: Any) -> None:
    with pytest.raises(ModelFileError, match=r"missing tensor x; .*\[rank1 tp1 pcp0 dcp0\]"):
        create({"1:start": "missing"}).start()


def test_disagreement_is_a_mismatch(create: Any) -> None:
    with (
        create({"1:6": "wrong digest"}) as executor,
        pytest.raises(PlanMismatch, match="rank 1 answered with digest 41"),
    ):
        executor.execute(fake_batch(6), 40)


def test_lines_of_a_rank_reach_stderr_with_its_prefix(
    create: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with create({"1:2": "print INFO woven"}) as executor:
        executor.execute(fake_batch(2, epoch=5), 0)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("Z INFO rank1 tp1 pcp0 dcp0 e5 woven")


def test_progress_names_the_rank(launcher: RankLauncher) -> None:
    seen: list[tuple[int, int, int]] = []
    with ProcessesExecutor(
        fake_config(tp=2),
        worker=FAKE,
        launcher=launcher,
        on_progress=lambda *what: seen.append(what),
    ):
        assert sorted(seen) == [(0, 1, 2), (0, 2, 2), (1, 1, 2), (1, 2, 2)]


def test_an_interrupt_ends_the_ranks_in_the_middle_of_a_step(create: Any, tmp_path: Path) -> None:
    begun = tmp_path / "begun"

    def interrupt() -> None:
        await_file(begun)
        os.kill(os.getpid(), signal.SIGINT)

    with create({"0:0": f"signal {begun}", "1:0": "sleep 600"}) as executor:
        pids = executor.pids
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            executor.execute(fake_batch(0), 0)
        assert not any(map(is_alive, pids))
        thread.join()


def test_a_dropped_executor_leaves_no_rank(create: Any) -> None:
    executor = create()
    executor.start()
    pids = executor.pids
    del executor
    gc.collect()
    assert len(pids) == 2
    assert not any(map(is_alive, pids))


def test_many_starts_leave_nothing_and_ranks_listen_on_loopback_only(create: Any) -> None:
    for _ in range(20):
        shared = set(os.listdir("/dev/shm"))
        with nothing_left(), create() as executor:
            executor.execute(fake_batch(0), 0)
            pids = executor.pids
            addresses = listening_addresses(pids)
            # Nothing of the rendezvous is left on the disk while ranks run.
            assert list(Path(tempfile.gettempdir()).iterdir()) == []
            del executor
        assert set(addresses) <= {"0100007F"}
        assert not any(map(is_alive, pids))
        new = set(os.listdir("/dev/shm")) - shared
        assert [name for name in new if {*map(str, pids)} & {*re.findall(r"\d+", name)}] == []


def test_the_launcher_has_one_thread_or_forks_would_not_be_safe(launcher: RankLauncher) -> None:
    assert num_threads(launcher.pid) == 1


def test_a_dead_launcher_is_an_error_in_words() -> None:
    launcher = RankLauncher(warm_modules=())
    executor = ProcessesExecutor(fake_config(tp=2), worker=FAKE, launcher=launcher)
    os.kill(launcher.pid, signal.SIGKILL)
    with pytest.raises(RankFailed, match="launcher of rank processes"):
        executor.start()
    launcher.close()


def test_a_step_larger_than_any_socket_buffer_arrives(create: Any) -> None:
    with create() as executor:
        batch = fake_batch(0, num_rows=300_000)
        assert len(executor.execute(batch, 0)) == 2
        assert len(executor.execute(fake_batch(1), 0)) == 2


def test_a_rank_that_does_not_read_cannot_hold_up_the_driver(create: Any) -> None:
    with create(step_timeout_seconds=LIMIT_SECONDS) as executor:
        os.kill(executor.pids[1], signal.SIGSTOP)
        with pytest.raises(RankFailed, match=r"^rank1 .* did not answer") as caught:
            executor.execute(fake_batch(0, num_rows=300_000), 0)
    assert silence_in(first_line(caught.value)) >= LIMIT_SECONDS


def test_spawned_ranks_work_as_forked_ones() -> None:
    launcher = RankLauncher("spawn")
    resolved = fake_config({"0:1": "raise"})
    with ProcessesExecutor(resolved, worker=FAKE, launcher=launcher) as executor:
        assert executor.execute(fake_batch(0), 7)[0].digest == 7
        with pytest.raises(RankFailed, match=r"rank0 .* in step 1 .*ValueError: boom"):
            executor.execute(fake_batch(1), 7)
    launcher.close()


def test_create_follows_the_name() -> None:
    assert type(create_executor(fake_config(executor="processes"))) is ProcessesExecutor


# A whole program, on purpose without a guard around its main code; it never imports torch itself.
PROGRAM = """
import json, os, sys
sys.path.insert(0, {root!r})
from heddle.engine.executors.processes import ProcessesExecutor
from heddle.engine.executors.launcher import RankLauncher
from tests.support.fake_worker import FAKE, fake_batch, fake_config
print("MAIN", flush=True)
launcher = RankLauncher(warm_modules={warm!r})
executors = []
for script in {scripts!r}:
    executor = ProcessesExecutor(
        fake_config(script, tp=2), worker=FAKE, launcher=launcher
    )
    executor.start()
    executors.append(executor)
executors[0].execute(fake_batch(0), 0)
pids = [launcher.pid, *(pid for executor in executors for pid in executor.pids)]
print(json.dumps({{"pids": pids, "torch": "torch" in sys.modules}}), flush=True)
{end}
"""


def run_program(scripts: list[dict[str, str]], end: str) -> subprocess.Popen[str]:
    """Start the program from its stdin, as a shell pipe or a notebook would."""
    text = PROGRAM.format(root=str(ROOT), warm=WARM, scripts=scripts, end=end)
    process = subprocess.Popen(
        [sys.executable, "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": tempfile.gettempdir()},
    )
    assert process.stdin is not None
    process.stdin.write(text)
    process.stdin.close()
    return process


def facts_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Read what the program prints; its main code must have run once, in itself."""
    assert process.stdout is not None
    assert process.stdout.readline() == "MAIN\n"
    facts: dict[str, Any] = json.loads(process.stdout.readline())
    return facts


def test_a_script_without_a_guard_works_and_its_end_ends_the_ranks() -> None:
    process = run_program([{}], end="")
    facts = facts_of(process)
    assert process.stdout is not None
    assert process.stdout.read() == ""  # no second MAIN from a child
    assert process.wait(LONG_SECONDS) == 0
    process.stdout.close()
    assert facts["torch"] is False
    assert len(facts["pids"]) == 3
    assert seconds_until(lambda: not any(map(is_running, facts["pids"]))) < LONG_SECONDS


def test_a_killed_driver_leaves_no_rank_whatever_the_ranks_do(tmp_path: Path) -> None:
    # Idle; in a collective with a rank that sleeps, holds the interpreter lock, or is stopped.
    scripts = [{}, {"1:0": "sleep 600"}, {"1:0": "spin 600"}, {"1:0": "stop"}]
    process = run_program(
        scripts,
        end="""
import threading, time
for executor in executors[1:]:
    threading.Thread(target=executor.execute, args=(fake_batch(0), 0), daemon=True).start()
slow = ProcessesExecutor(
    fake_config({"1:start": "sleep 600"}, tp=2, cpu_comm_backend="gloo"),
    worker=FAKE,
    launcher=launcher,
)
threading.Thread(target=slow.start, daemon=True).start()
time.sleep(1.0)
print("WORKING", flush=True)
time.sleep(600)
""",
    )
    launcher_pid = facts_of(process)["pids"][0]
    assert process.stdout is not None
    assert process.stdout.readline() == "WORKING\n"
    assert seconds_until(lambda: len(children_of(launcher_pid)) == 10) < LONG_SECONDS
    pids = {launcher_pid, *children_of(launcher_pid)}
    # Of the start that is under way.
    assert seconds_until(lambda: len(list(tmp_path.glob("heddle-*/store"))) == 1) < LONG_SECONDS
    assert all(map(is_running, pids))
    process.kill()
    process.wait()
    process.stdout.close()
    took = seconds_until(lambda: not any(map(is_running, pids)))
    print(f"all ranks gone {took:.3f} s after the driver")
    assert took < LONG_SECONDS  # 0.1 s when nothing else runs; the ranks would stay for longer
