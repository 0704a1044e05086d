"""Steps that a rank does not get as they were sent: dropped, doubled, swapped, damaged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from heddle.config.faults import fault_rules
from heddle.engine.executors.frames import FrameDecoder
from heddle.engine.executors.launcher import RankLauncher
from heddle.engine.executors.messages import FromRank, Step, Stop, ToRank
from heddle.engine.executors.processes import ProcessesExecutor
from heddle.engine.executors.spoiled import OVERSIZED, SpoiledMessages, spoiled
from heddle.errors import HeddleError, PlanMismatch, RankFailed
from heddle.faults.injector import Injector
from tests.support.fake_worker import FAKE, fake_batch, fake_config
from tests.support.faulted import FIRST_DECODE, LAYOUTS, PROMPT, Heard, engine, undisturbed
from tests.support.tiny import build_tiny

PROCESSES: dict[str, Any] = LAYOUTS["TP2 DCP2"] | {"executor": "processes"}


def received(words: str, numbers: list[int]) -> list[int | str]:
    """Numbers of the steps that get through, when these were sent and then a stop."""
    messages: list[ToRank] = [Step(fake_batch(number), 0, 1.0) for number in numbers]
    sent = iter([*messages, Stop()])
    receive = SpoiledMessages(sent.__next__, Injector(fault_rules(words))).receive
    found: list[int | str] = []
    while isinstance(message := receive(), Step):
        found.append(message.batch.step)
    assert isinstance(message, Stop)
    return found


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("drop_header(0,prefill,1)", [0, 2, 3]),
        ("dup_header(0,prefill,1)", [0, 1, 1, 2, 3]),
        ("swap_headers(0,prefill,1)", [0, 2, 1, 3]),
        ("swap_headers(0,prefill,3)", [0, 1, 2]),  # nothing came to change places with
        ("drop_header(0,decode,0)", [0, 1, 2, 3]),
        ("drop_header(0,prefill,0);drop_header(0,prefill,2)", [1, 3]),
    ],
)
def test_messages_are_spoiled_once_where_told(words: str, found: list[int]) -> None:
    assert received(words, [0, 1, 2, 3]) == found


def test_without_rules_a_rank_receives_as_it_always_does() -> None:
    def receive() -> ToRank:
        return Stop()

    assert spoiled(receive, None) is receive


def test_no_driver_takes_the_oversized_frame() -> None:
    decoder: FrameDecoder[FromRank] = FrameDecoder(FromRank)
    with pytest.raises(HeddleError, match="a length of at most"):
        list(decoder.feed(OVERSIZED))


@pytest.fixture(scope="module")
def launcher() -> Iterator[RankLauncher]:
    warm = ("torch", "heddle.comm.shared_memory.world", "heddle.runner.worker")
    launcher = RankLauncher(warm_modules=(*warm, "tests.support.fake_worker"))
    yield launcher
    launcher.close()


@pytest.mark.dist
def test_an_oversized_frame_ends_the_step_and_names_its_rank(launcher: RankLauncher) -> None:
    resolved = fake_config(tp=2, faults=fault_rules("oversize(1,reply,0)"))
    executor = ProcessesExecutor(resolved, worker=FAKE, launcher=launcher)
    with executor, pytest.raises(RankFailed, match=r"^rank1 .*a frame begins with"):
        executor.execute(fake_batch(0), 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("models"), "llama-8-2")


@pytest.mark.dist
def test_a_lost_step_is_caught_by_the_deadline_that_names_its_rank(
    model: Path, golden: tuple[int, ...]
) -> None:
    """Nobody tells a rank that it missed a step, so the others wait for it."""
    faults = f"drop_header(1,decode,{FIRST_DECODE + 1})"
    with engine(model, faults, max_restarts=0, step_timeout=3.0, **PROCESSES) as llm:
        heard = Heard(llm)
        request_id = heard.ask()
        with pytest.raises(RankFailed, match=r"^rank1 .*did not answer") as found:
            heard.run()
        assert heard.tokens[request_id] == golden[:2]
    assert f"dcp1: idle, step {FIRST_DECODE}, " in str(found.value)


@pytest.mark.dist
@pytest.mark.parametrize(("max_restarts", "epoch"), [(0, 0), (1, 1)])
def test_a_doubled_step_is_refused_by_its_rank(
    model: Path, golden: tuple[int, ...], max_restarts: int, epoch: int
) -> None:
    faults = f"dup_header(1,decode,{FIRST_DECODE + 1})"
    with engine(model, faults, max_restarts=max_restarts, **PROCESSES) as llm:
        heard = Heard(llm)
        request_id = heard.ask()
        if max_restarts == 0:
            with pytest.raises(PlanMismatch, match=r"^rank1 .*it came twice, or late"):
                heard.run()
            # The first copy was good; whether it counts hangs on which answer is seen first.
            assert heard.tokens[request_id] in (golden[:2], golden[:3])
        else:
            heard.run()
            assert heard.tokens[request_id] == golden
        assert llm.plan.epoch == epoch


@pytest.fixture(scope="module")
def golden(model: Path) -> tuple[int, ...]:
    return undisturbed(model, [PROMPT])[0]


@pytest.mark.dist
def test_swapped_steps_of_a_pipeline_are_caught(model: Path) -> None:
    """Two steps are under way in a pipeline, so that one can overtake the other."""
    prompts = [PROMPT, (7, 6, 5, 4), (50, 60, 70)]
    golden = undisturbed(model, prompts)
    faults = "swap_headers(1,prefill,0)"
    options: dict[str, Any] = {"pipeline_parallel_size": 2, "executor": "processes"}
    with engine(model, faults, max_restarts=1, **options) as llm:
        heard = Heard(llm)
        ids = [heard.ask(prompt) for prompt in prompts]
        heard.run()
        assert [heard.tokens[request_id] for request_id in ids] == golden
        assert llm.plan.epoch == 1
