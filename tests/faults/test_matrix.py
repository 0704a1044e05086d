"""Ranks that fail in every way, in every phase, on every place: real processes, real answers.

    {kill, stop, raise, exit, hang} x {start, idle, prefill, decode, restart} x every rank x layouts

A few of them run by default; `make test-faults` runs all and prints how long each took to be
noticed and to be over. The page of the victim proves that it was where the case says.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from heddle.config import SamplingParams, folders
from heddle.engine.args import engine_config
from heddle.engine.driver import Driver
from heddle.engine.executors.create import create_executor
from heddle.engine.executors.launcher import RankLauncher
from heddle.engine.inputs import PromptInput
from heddle.engine.machine import resolve_here
from heddle.engine.recovery.budget import RestartBudget
from heddle.engine.recovery.restarts import Restarts
from heddle.errors import RankFailed
from heddle.faults.dump import Dump, read_dump
from heddle.step.topology import Topology
from tests.support.faulted import CHUNK, FIRST_DECODE, LAYOUTS, NUM_TOKENS, PROMPT
from tests.support.faulted import engine as whole_engine
from tests.support.processes import LONG_SECONDS, children_of, nothing_left, seconds_until
from tests.support.tiny import build_tiny

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1200)]

ACTIONS = {
    "kill": "kill({rank},{phase},{step}{epoch})",
    "stop": "stop({rank},{phase},{step}{epoch})",
    "raise": "raise({rank},{phase},{step}{epoch})",
    "exit": "exit({rank},{phase},{step},3{epoch})",
    "hang": "sleep({rank},{phase},{step},600{epoch})",
}
LAST_STEP = FIRST_DECODE + NUM_TOKENS - 2
PLACES = {
    "start": ("load", 0),
    "idle": ("idle", LAST_STEP),
    "prefill": ("prefill", 1),
    "decode": ("decode", FIRST_DECODE + 1),
    "restart": ("load", 0),
}
"""Phase and step of a rule; `restart` fails while ranks are started anew after a kill."""
SILENT = ("stop", "hang")
DEADLINE_SECONDS = 3.0
"""Of a step, and of a start of ranks whose launcher is warm."""
START_SECONDS = 8.0
PATIENT = {"startup_timeout_seconds": LONG_SECONDS}
GENEROUS_SECONDS = 60.0
"""What noticing or restarting may take on the busiest machine, beyond the deadline."""


@dataclass(frozen=True)
class Case:
    action: str
    place: str
    rank: int
    layout: str

    def __str__(self) -> str:
        return f"{self.action}-{self.place}-rank{self.rank}-{self.layout.replace(' ', '')}"

    @property
    def faults(self) -> str:
        phase, step = PLACES[self.place]
        epoch = ",epoch=1" if self.place == "restart" else ""
        rule = ACTIONS[self.action].format(rank=self.rank, phase=phase, step=step, epoch=epoch)
        return f"kill(0,decode,{FIRST_DECODE});{rule}" if self.place == "restart" else rule


EVERY = [
    Case(action, place, rank, layout)
    for layout in LAYOUTS
    for place in PLACES
    for rank in (0, 1)
    for action in ACTIONS
]
SAMPLE = {
    Case("exit", "start", 1, "TP2 DCP2"),
    Case("kill", "idle", 0, "PCP2 DCP2"),
    Case("kill", "decode", 1, "TP2 DCP2"),
    Case("raise", "prefill", 0, "PCP2 DCP2"),
    Case("stop", "decode", 0, "TP2 DCP2"),
    Case("hang", "prefill", 1, "PCP2 DCP2"),
    Case("exit", "restart", 1, "TP2 DCP2"),
}
CASES = [
    pytest.param(case, id=str(case), marks=() if case in SAMPLE else pytest.mark.faults)
    for case in EVERY
]
GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 1.0, "seed": 11}
REQUESTS = [(PROMPT, GREEDY), (tuple(range(60, 69)), SEEDED)]
LATER = (tuple(range(30, 41)), GREEDY)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("models"), "llama-8-2")


@pytest.fixture(scope="module")
def launcher(model: Path) -> Iterator[RankLauncher]:
    """Warm, with the files of the model: starts have a deadline here."""
    launcher = RankLauncher()
    warm = dataclasses.replace(resolved_of(EVERY[0], model), faults=(), **PATIENT)
    with create_executor(warm, launcher=launcher):
        pass
    yield launcher
    launcher.close()


@pytest.fixture(scope="module")
def golden(model: Path) -> list[tuple[int, ...]]:
    """What one rank answers, undisturbed."""
    with whole_engine(model, executor="inline", max_num_batched_tokens=64) as llm:
        talk = Talk(llm._driver)
        for prompt, params in (*REQUESTS, LATER):
            talk.ask(prompt, params)
        talk.run()
        return list(talk.told.values())


@pytest.fixture(scope="module")
def table() -> Iterator[list[dict[str, Any]]]:
    """Times of all cases: printed for people, and as JSON on the last line."""
    rows: list[dict[str, Any]] = []
    yield rows
    print()
    for row in rows:
        words = " ".join(str(row[name]) for name in ("action", "place", "rank", "layout"))
        print(f"{words:32} noticed {row['noticed_s']:7.3f} s   over {row['over_s']:7.3f} s")
    print(json.dumps({"schema": 1, "metrics": rows}))


@pytest.fixture(autouse=True)
def dumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(folders, "default_dump_dir", lambda: tmp_path / "dumps")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "dumps"


class Talk:
    """Requests of one driver, and what was told of them."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.told: dict[str, tuple[int, ...]] = {}

    def ask(self, prompt: tuple[int, ...], params: dict[str, Any]) -> None:
        chosen = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **params)
        self.told[self.driver.add(PromptInput(token_ids=prompt), chosen)] = ()

    def run(self) -> None:
        while self.driver.has_work:
            for output in self.driver.step():
                before, found = self.told[output.request_id], tuple(output.outputs[0].token_ids)
                assert found[: len(before)] == before
                self.told[output.request_id] = found


class Watched(Restarts):
    """Notes when failures are noticed, and when new ranks are there."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.noticed: list[float] = []
        self.over: list[float] = []

    def note_fault(self, failure: Any) -> int:
        self.noticed.append(time.monotonic())
        return super().note_fault(failure)

    def run(self, *given: Any) -> Any:
        found = super().run(*given)
        self.over.append(time.monotonic())
        return found


def resolved_of(case: Case, model: Path) -> Any:
    config = engine_config(
        str(model),
        **LAYOUTS[case.layout],
        faults=case.faults,
        enable_fault_injection=True,
        executor="processes",
        dtype="float64",
        max_num_batched_tokens=CHUNK,
        kv_cache_memory_bytes=1 << 20,
        block_size=4,
        num_threads=1,
        # A step that nobody holds up may take its time on a busy machine.
        step_timeout=DEADLINE_SECONDS if case.action in SILENT else LONG_SECONDS,
        startup_timeout=START_SECONDS if case.action in SILENT else LONG_SECONDS,
    )
    return resolve_here(config)


def newest(dumps: Path) -> Dump:
    return read_dump(sorted(dumps.glob("dump-*.json"))[-1])


def assert_stood_there(dump: Dump, case: Case) -> float:
    """The victim was in the phase that the case names; since when."""
    victim = next(standing for standing in dump.ranks if standing.rank == case.rank)
    phase, step = PLACES[case.place]
    assert victim.phase == phase
    assert victim.step == (step if case.place not in ("start", "restart") else -1)
    if phase in ("prefill", "decode"):
        assert victim.layer == 0  # inside its attention
    return victim.since


@pytest.mark.parametrize("case", CASES)
def test_a_failing_rank_costs_nobody_an_answer(
    case: Case,
    model: Path,
    golden: list[tuple[int, ...]],
    launcher: RankLauncher,
    dumps: Path,
    table: list[dict[str, Any]],
) -> None:
    resolved = resolved_of(case, model)

    def create(resolved: Any) -> Any:
        return create_executor(resolved, launcher=launcher)

    with nothing_left(launcher.pid):
        times = (start_fails if case.place == "start" else answers_go_on)(
            case, resolved, create, golden, dumps
        )
        gc.collect()
        seconds_until(lambda: children_of(launcher.pid) == set())
        assert children_of(launcher.pid) == set()
    assert list(dumps.parent.glob("heddle-*")) == []
    noticed, over = times
    table.append(asdict(case) | {"noticed_s": round(noticed, 4), "over_s": round(over, 4)})
    limit = 0.0
    if case.action in SILENT:
        limit = START_SECONDS if case.place in ("start", "restart") else DEADLINE_SECONDS
    assert noticed < limit + GENEROUS_SECONDS


def start_fails(
    case: Case, resolved: Any, create: Any, golden: Any, dumps: Path
) -> tuple[float, float]:
    """Nobody is served yet, so the start says what is wrong, and ends."""
    executor = create(resolved)
    with pytest.raises(RankFailed, match=rf"^rank{case.rank} .*while starting"):
        executor.start()
    noticed = time.monotonic()
    since = assert_stood_there(newest(dumps), case)
    executor.close()
    return noticed - since, time.monotonic() - since


def answers_go_on(
    case: Case, resolved: Any, create: Any, golden: list[tuple[int, ...]], dumps: Path
) -> tuple[float, float]:
    """All requests end with the tokens that they would have had; the pool is whole."""
    restarts = Watched(create, RestartBudget(5, time.monotonic))
    executor = create(resolved)
    driver = Driver(resolved, executor, None, restarts=restarts)
    talk = Talk(driver)
    try:
        executor.start()
        for prompt, params in REQUESTS[:1] if case.place == "idle" else REQUESTS:
            talk.ask(prompt, params)
        talk.run()
        if case.place == "idle":
            # A rank that fails as soon as it is idle may do so before the others have answered its
            # last step: then that step is computed once more.
            if case.action not in SILENT:

                def is_noticed() -> bool:
                    driver.check_ranks()
                    return bool(restarts.over)

                assert seconds_until(is_noticed) < LONG_SECONDS
            talk.ask(*REQUESTS[1])
            talk.run()
        since = assert_stood_there(newest(dumps), case)
        talk.ask(*LATER)
        talk.run()
        assert driver.resolved.epoch == (2 if case.place == "restart" else 1)
        assert list(talk.told.values()) == golden
        driver.audit()
        for replica in driver.replicas:
            assert replica.cache.num_available_blocks == replica.cache.num_usable_blocks
    finally:
        driver.close()
        driver.executor.close()
    noticed = restarts.over[0] if case.place == "restart" else restarts.noticed[0]
    return noticed - since, restarts.over[0] - since


def test_the_sample_has_every_action_and_every_place() -> None:
    assert {case.action for case in SAMPLE} == set(ACTIONS)
    assert {case.place for case in SAMPLE} == set(PLACES)
    assert {case.layout for case in SAMPLE} == set(LAYOUTS)
    assert set(EVERY) >= SAMPLE
    assert len(EVERY) == len(ACTIONS) * len(PLACES) * 2 * len(LAYOUTS)


def test_the_steps_of_the_cases_are_those_of_a_prompt_alone(model: Path) -> None:
    resolved = resolved_of(EVERY[0], model)
    assert Topology.from_resolved(resolved).mesh.world_size == 2
    assert -(-len(PROMPT) // CHUNK) == FIRST_DECODE
