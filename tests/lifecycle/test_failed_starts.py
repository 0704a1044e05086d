"""A start that fails ends in time, with the first cause last, and leaves nothing."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from heddle.config.faults import START_PHASES
from tests.support.processes import LONG_SECONDS
from tests.support.server_process import ServerProcess, family_of, seconds_until_gone

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1200)]

TIMEOUT_SECONDS = 8
WORDS = ("-tp", "2", "--self-check", "off", "--enable-fault-injection")
CAUSES = {
    "raise({rank},{phase},0)": r"RuntimeError: injected by raise",
    "exit({rank},{phase},0,3)": r"its process exited with code 3",
    "kill({rank},{phase},0)": r"its process was killed by SIGKILL; .*out of memory",
    "sleep({rank},{phase},0,600)": rf"it did not answer within {TIMEOUT_SECONDS}\.0 s",
    "stop({rank},{phase},0)": rf"it did not answer within {TIMEOUT_SECONDS}\.0 s",
}
CASES = [(fault, phase, rank) for fault in CAUSES for phase in START_PHASES for rank in (0, 1)]
DEFAULT = {("raise({rank},{phase},0)", "load", 1)}


@pytest.mark.parametrize(
    ("fault", "phase", "rank"),
    [pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.slow) for case in CASES],
    ids=lambda value: str(value).partition("(")[0],
)
def test_the_rank_at_fault_is_named_last(
    model: Path, tmp_path: Path, fault: str, phase: str, rank: int
) -> None:
    rule = fault.format(rank=rank, phase=phase)
    is_slow = rule.startswith(("sleep", "stop"))
    words = [*WORDS, "--faults", rule, "--startup-timeout", str(TIMEOUT_SECONDS if is_slow else 60)]
    started = time.monotonic()
    with ServerProcess(model, tmp_path, *words) as server:
        server.await_line("listening at")
        children = family_of(server.pid) - {server.pid}
        assert server.wait() == 1
        took = time.monotonic() - started
        assert seconds_until_gone(children) < LONG_SECONDS
        errors = [line for line in server.lines_to_end() if line.startswith("error: ")]
    assert len(errors) == 1
    assert re.search(rf"rank{rank} .*failed while starting: {CAUSES[fault]}", errors[0]), errors
    assert list(tmp_path.iterdir()) == []
    print(f"{rule}: ended after {took:.1f} s")
