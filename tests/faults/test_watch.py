"""What a rank tells while it works, and faults at the points that it passes."""

from __future__ import annotations

import time

import pytest

from heddle.config.faults import START_PHASES, fault_rules
from heddle.faults.page import Standing, call_words
from heddle.faults.watch import RankWatch, create_watch, phase_of
from heddle.step.batch import GlobalBatch, SampleSpec, ScheduledRequest
from heddle.step.draw_params import DrawParams
from heddle.step.packed import pack_table


def armed(words: str, rank: int = 0, epoch: int = 0) -> RankWatch:
    return create_watch(fault_rules(words), rank, epoch)


def standing_of(watch: RankWatch) -> Standing:
    found = watch.page.standing()
    assert found is not None
    return found


def call(watch: RankWatch) -> None:
    watch.begin_call(call_words("all_reduce", "tp", "float32", (2, 4)))
    watch.end_call()


def test_calls_belong_to_the_layer_whose_they_are() -> None:
    watch = RankWatch()
    watch.begin_step(5, "decode")
    watch.expect((1, 3, 3, 5), first_layer=10)
    layers = []
    for _ in range(7):
        call(watch)
        layers.append(standing_of(watch).calls[-1].layer)
    assert layers == [-1, 10, 10, 12, 12, -1, -1]
    watch.begin_step(6, "decode")
    watch.expect((0, 2), first_layer=0)
    call(watch)
    last = standing_of(watch)
    assert (last.step, last.num_collectives, last.layer) == (6, 1, 0)


@pytest.mark.parametrize("phase", [*START_PHASES, "idle", "sample", "reply"])
def test_the_page_says_the_phase_before_a_fault_of_it_fires(phase: str) -> None:
    watch = armed(f"raise(0,{phase},0)")
    with pytest.raises(RuntimeError, match="injected"):
        watch.enter(phase)
    assert standing_of(watch).phase == phase
    watch.enter(phase)  # once


def test_a_fault_of_a_step_fires_in_a_layer_of_it() -> None:
    watch = armed("raise(0,decode,2)")
    for step, phase in ((1, "decode"), (2, "prefill"), (3, "decode")):
        watch.begin_step(step, phase)
        if step < 3:
            watch.enter_layer(0)
    with pytest.raises(RuntimeError, match="injected"):
        watch.enter_layer(4)
    last = standing_of(watch)
    assert (last.phase, last.step, last.layer) == ("decode", 3, 4)
    watch.enter_layer(5)


def test_a_fault_of_a_collective_fires_inside_it() -> None:
    watch = armed("raise(0,collective,1)")
    watch.begin_step(0, "decode")
    call(watch)
    watch.begin_step(1, "decode")
    with pytest.raises(RuntimeError, match="injected"):
        call(watch)
    assert standing_of(watch).phase == "collective"
    assert standing_of(watch).open_call is not None


@pytest.mark.parametrize(("action", "num_calls"), [("slow_step", 1), ("slow_collective", 3)])
def test_a_slow_step_is_slow_once(action: str, num_calls: int) -> None:
    watch = armed(f"{action}(0,decode,1,60)")
    took = []
    for step in range(4):
        began = time.monotonic()
        watch.begin_step(step, "decode")
        for _ in range(3):
            call(watch)
        took.append(time.monotonic() - began)
    assert took[1] >= 0.06 * num_calls
    assert watch.injector is not None
    assert not watch.injector.due(("delay",), "decode", 9)


def test_another_rank_and_another_life_are_spared() -> None:
    assert armed("raise(1,load,0)", rank=0).injector is None
    assert armed("raise(0,load,0)", rank=0, epoch=1).injector is None
    assert armed("raise(0,load,0)").injector is not None


def part(num_tokens: int, num_samples: int) -> ScheduledRequest:
    params = DrawParams(is_greedy=True, temperature=0.0)
    sample = SampleSpec(params=params, seed=0, choice=0, position=0)
    return ScheduledRequest(
        request_id=1,
        token_ids=(5,) * num_tokens,
        num_computed_tokens=4,
        packed_tables=(pack_table([1]),),
        layout_fingerprint=0,
        samples=(sample,) * num_samples,
    )


@pytest.mark.parametrize(
    ("parts", "phase"),
    [
        ([], "decode"),
        ([part(1, 1)], "decode"),
        ([part(3, 3)], "decode"),  # two drafts
        ([part(3, 1)], "prefill"),
        ([part(1, 0)], "prefill"),
        ([part(1, 1), part(8, 0)], "prefill"),
    ],
)
def test_a_step_with_rows_of_prompts_is_prefill(parts: list[ScheduledRequest], phase: str) -> None:
    assert phase_of(GlobalBatch(epoch=0, step=0, requests=tuple(parts))) == phase
