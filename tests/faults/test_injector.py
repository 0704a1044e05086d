"""Faults of a whole process: each fires where it was told to, once."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from heddle.config.faults import ACTIONS, fault_rules
from heddle.faults.injector import Injector, create_injector, suffer
from tests.support.processes import LONG_SECONDS, seconds_until


def test_a_rule_fires_once_in_its_phase_and_not_before_its_step() -> None:
    injector = Injector(fault_rules("raise(0,decode,3)"))
    assert injector.due(("process",), "decode", 2) == []
    assert injector.due(("process",), "prefill", 3) == []
    assert injector.due(("call",), "decode", 3) == []
    assert len(injector.due(("process",), "decode", 5)) == 1
    assert injector.due(("process",), "decode", 6) == []


def test_before_the_first_step_is_step_0() -> None:
    injector = Injector(fault_rules("raise(0,idle,0)"))
    assert len(injector.due(("process",), "idle", -1)) == 1


def test_a_rule_that_does_not_fit_waits() -> None:
    injector = Injector(fault_rules("nan(0,decode,0,1,7)"))
    assert injector.due(("data",), "decode", 1, lambda rule: False) == []
    assert len(injector.due(("data",), "decode", 2, lambda rule: True)) == 1


def test_poison_stays() -> None:
    injector = Injector(fault_rules("poison_token(0,decode,0,5)"))
    assert [len(injector.due(("data",), "decode", step)) for step in range(3)] == [1, 1, 1]


def test_a_rank_without_rules_has_no_injector() -> None:
    rules = fault_rules("raise(1,decode,3);raise(1,load,0,epoch=2)")
    assert create_injector(rules, 0, 0) is None
    assert create_injector(rules, 1, 1) is None
    found = create_injector(rules, 1, 2)
    assert found is not None
    assert len(found.due(("process",), "load", 0)) == 1


@pytest.mark.parametrize(
    ("words", "reaches"),
    [("raise(0,decode,3)", True), ("raise(0,idle,3)", False), ("nan(0,decode,0,1,7)", True)],
)
def test_only_faults_within_layers_need_them_computed(words: str, reaches: bool) -> None:
    assert Injector(fault_rules(words)).reaches_layers is reaches


def run_action(words: str) -> subprocess.Popen[bytes]:
    code = (
        "from heddle.config.faults import fault_rules\n"
        "from heddle.faults.injector import suffer\n"
        f"suffer(fault_rules({words!r})[0])\n"
    )
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("kill(0,idle,0)", -signal.SIGKILL),
        ("abort(0,idle,0)", -signal.SIGABRT),
        ("exit(0,idle,0,7)", 7),
        ("raise(0,idle,0)", 1),
    ],
)
def test_a_process_ends_as_told(words: str, code: int) -> None:
    assert run_action(words).wait(LONG_SECONDS) == code


def test_a_process_stops_as_told() -> None:
    process = run_action("stop(0,idle,0)")
    try:

        def is_stopped() -> bool:
            with open(f"/proc/{process.pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] == "T"

        assert seconds_until(is_stopped) < LONG_SECONDS
    finally:
        process.kill()
        process.wait()


def test_raise_names_its_rule() -> None:
    with pytest.raises(RuntimeError, match=r"injected by raise\(0,idle,0\)"):
        suffer(fault_rules("raise(0,idle,0)")[0])


@pytest.mark.parametrize("action", ["sleep", "spin_gil"])
def test_delays_take_their_time(action: str) -> None:
    began = time.monotonic()
    suffer(fault_rules(f"{action}(0,idle,0,0.2)")[0])
    assert time.monotonic() - began >= 0.2


def test_descriptors_run_out() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    suffer(fault_rules("fd_limit(0,idle,0)")[0])
    opened: list[int] = []
    try:
        with pytest.raises(OSError, match="Too many open files"):
            opened.extend(os.open("/dev/null", os.O_RDONLY) for _ in range(1000))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in opened:
            os.close(descriptor)


def test_every_action_has_somebody_who_carries_it_out() -> None:
    """Each kind is asked for somewhere; the tests of its actions are named here."""
    homes = {
        "process": "tests/faults/test_injector.py",
        "delay": "tests/faults/test_watch.py",
        "message": "tests/engine/test_executor_spoiled.py",
        "frame": "tests/engine/test_executor_spoiled.py",
        "plan": "tests/runner/test_damage.py",
        "call": "tests/runner/test_stray_calls.py",
        "data": "tests/runner/test_damage.py",
        "driver": "tests/faults/test_dump.py",
    }
    assert {action.kind for action in ACTIONS.values()} == set(homes)
    for name, action in ACTIONS.items():
        with open(homes[action.kind]) as file:
            assert name in file.read(), f"{name} has no test in {homes[action.kind]}"
