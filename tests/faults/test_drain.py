"""A rank fails while a server that was told to stop finishes what it has begun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from heddle import LLM, SamplingParams
from tests.support.faulty_server import LAYOUT_FLAGS, faulty_server, served_model
from tests.support.processes import LONG_SECONDS

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1200)]
PROMPT = "abcdefgh ijkl"
NUM_TOKENS = 300
STEP = 150
"""Of the fault: after the first token, which is when the server is told to stop."""
ACTIONS = {
    "kill": f"kill({{rank}},decode,{STEP})",
    "stop": f"stop({{rank}},decode,{STEP})",
    "raise": f"raise({{rank}},decode,{STEP})",
    "exit": f"exit({{rank}},decode,{STEP},3)",
    "hang": f"sleep({{rank}},decode,{STEP},600)",
}
SAMPLE = ("kill", 1, "PCP2 DCP2")
CASES = [
    pytest.param(
        action,
        rank,
        layout,
        id=f"{action}-drain-rank{rank}-{layout.replace(' ', '')}",
        marks=() if (action, rank, layout) == SAMPLE else pytest.mark.faults,
    )
    for layout in LAYOUT_FLAGS
    for rank in (0, 1)
    for action in ACTIONS
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def golden(model: Path) -> str:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(model), dtype="float64", executor="inline") as llm:
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
        return output.outputs[0].text


@pytest.mark.parametrize(("action", "rank", "layout"), CASES)
def test_a_stream_ends_whole_though_a_rank_fails_while_draining(
    action: str, rank: int, layout: str, model: Path, golden: str, tmp_path: Path
) -> None:
    is_silent = action in ("stop", "hang")
    words = ("--step-timeout", "3" if is_silent else "120", "--shutdown-timeout", "100")
    faults = ACTIONS[action].format(rank=rank)
    body = {
        "prompt": PROMPT,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    with faulty_server(model, tmp_path, faults, *LAYOUT_FLAGS[layout], *words) as server:
        assert "FAULT INJECTION IS ENABLED: THIS ENGINE FAILS ON PURPOSE" in server.log
        assert faults in server.log
        with server.client() as client:
            header = client.get("/ready").headers["x-heddle-fault-injection"]
            assert header == "enabled"
            with client.stream("POST", "/v1/completions", json=body) as response:
                lines = (line for line in response.iter_lines() if line.startswith("data: "))
                first = next(lines)
                assert server.dumps == []
                told_to_stop = time.monotonic()
                server.process.send_signal(signal.SIGTERM)
                events = [line.removeprefix("data: ") for line in (first, *lines)]
        assert server.process.wait(LONG_SECONDS) == 0
        assert events[-1] == "[DONE]"
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
        assert text == golden
        (dump,) = server.dumps
        victim = dump.ranks[rank]
        assert (victim.rank, victim.phase, victim.step, victim.epoch) == (rank, "decode", STEP, 0)
        assert victim.since > told_to_stop
        assert "recovered in" in server.log


def test_faults_in_the_environment_are_refused_without_the_flag(model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "heddle", "serve", str(model), "--port", "0"],
        capture_output=True,
        text=True,
        check=False,
        timeout=LONG_SECONDS,
        env={**os.environ, "HEDDLE_FAULTS": "kill(1,decode,3)"},
    )
    assert done.returncode == 2
    assert "kill(1,decode,3) is not legal without enable_fault_injection" in done.stderr
