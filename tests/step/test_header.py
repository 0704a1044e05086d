"""A rank takes each step of its own life once and in order, and nothing else."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.errors import MISMATCH_KINDS, PlanMismatch
from heddle.step.batch import GlobalBatch
from heddle.step.header import StepGate

LAYOUT = 0xABCD


def batch_of(step: int, epoch: int = 2, layout_id: int = LAYOUT) -> GlobalBatch:
    return GlobalBatch(epoch=epoch, step=step, layout_id=layout_id, requests=())


@given(st.permutations(range(5)), st.integers(0, 5))
def test_only_the_order_in_which_steps_were_sent_passes(order: list[int], num_sent: int) -> None:
    gate = StepGate(1, 2, LAYOUT)
    admitted = 0
    for step in order[:num_sent]:
        if step == admitted:
            gate.admit(batch_of(step))
            admitted += 1
        else:
            with pytest.raises(PlanMismatch, match=rf"with step {step} and expects {admitted}"):
                gate.admit(batch_of(step))


@pytest.mark.parametrize(
    ("messages", "kind", "words"),
    [
        ([0, 2], "step", "step 2 and expects 1: a step before it was lost"),
        ([0, 1, 1], "step", "step 1 and expects 2: it came twice, or late"),
        ([1], "step", "step 1 and expects 0: a step before it was lost"),
    ],
)
def test_lost_and_doubled_messages_are_told_apart(
    messages: list[int], kind: str, words: str
) -> None:
    gate = StepGate(3, 2, LAYOUT)
    for step in messages[:-1]:
        gate.admit(batch_of(step))
    with pytest.raises(PlanMismatch, match=f"^rank 3 got .*{words}; nothing was run") as caught:
        gate.admit(batch_of(messages[-1]))
    assert caught.value.kind == kind
    assert kind in MISMATCH_KINDS


@pytest.mark.parametrize(
    ("change", "kind"), [({"epoch": 1}, "epoch"), ({"layout_id": LAYOUT + 1}, "layout_id")]
)
def test_a_message_for_other_ranks_is_refused(change: dict[str, int], kind: str) -> None:
    gate = StepGate(0, 2, LAYOUT)
    gate.admit(batch_of(0))
    with pytest.raises(PlanMismatch) as caught:
        gate.admit(msgspec.structs.replace(batch_of(1), **change))
    assert caught.value.kind == kind
    gate.admit(batch_of(1))  # what was refused has moved nothing on


def test_a_refused_step_may_still_come() -> None:
    gate = StepGate(0, 0, 0)
    with pytest.raises(PlanMismatch, match="expects 0"):
        gate.admit(batch_of(1, 0, 0))
    gate.admit(batch_of(0, 0, 0))
