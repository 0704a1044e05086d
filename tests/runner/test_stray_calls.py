"""A call that is not the plan's stops on the rank that strays: nothing of its step is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from heddle.config.faults import ACTIONS
from heddle.errors import PlanMismatch
from tests.support.faulted import FIRST_DECODE, LAYOUTS, PROMPT, Heard, engine, undisturbed
from tests.support.tiny import build_tiny

STRAY = ("wrong_dtype", "swap_collectives", "short_tensor", "skip_collective", "extra_chunk")
PLACES = {"prefill": (1, 0), "decode": (FIRST_DECODE + 1, 2)}
"""By phase: step of the fault, and tokens that were drawn before it."""
SAMPLE = (("TP2 DCP2", 1), ("PCP2 DCP2", 0))
VICTIMS = [
    pytest.param(layout, rank, marks=() if (layout, rank) in SAMPLE else pytest.mark.faults)
    for layout in LAYOUTS
    for rank in (0, 1)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("models"), "llama-8-2")


@pytest.fixture(scope="module")
def golden(model: Path) -> tuple[int, ...]:
    return undisturbed(model, [PROMPT])[0]


def test_these_are_all_stray_calls() -> None:
    assert set(STRAY) == {name for name, action in ACTIONS.items() if action.kind == "call"}


@pytest.mark.parametrize("phase", PLACES)
@pytest.mark.parametrize(("layout", "rank"), VICTIMS)
@pytest.mark.parametrize("action", STRAY)
def test_a_stray_call_is_caught_in_its_step_and_the_answer_goes_on(
    model: Path, golden: tuple[int, ...], action: str, rank: int, layout: str, phase: str
) -> None:
    step, told = PLACES[phase]
    faults = f"{action}({rank},{phase},{step})"
    options = LAYOUTS[layout] | {"executor": "threads", "step_timeout": 20.0}
    with engine(model, faults, max_restarts=0, **options) as llm:
        heard = Heard(llm)
        request_id = heard.ask()
        with pytest.raises(PlanMismatch, match=f"rank{rank} "):
            heard.run()
        assert heard.tokens[request_id] == golden[:told]
    with engine(model, faults, max_restarts=1, **options) as llm:
        heard = Heard(llm)
        request_id = heard.ask()
        heard.run()
        assert heard.tokens[request_id] == golden
        assert llm.plan.epoch == 1
