"""A priced step shows the calls that ranks are held to, no more and no fewer, with their bytes."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.errors import HeddleError
from heddle.planner.batches import Rows, create_batch
from heddle.planner.cost import CostModel
from heddle.planner.memory import PlannedEngine
from heddle.step.plan import StepPlan, plan
from heddle.step.schedule import collective_schedule
from heddle.step.traffic import Collective, cost_of
from heddle.view.model_step import describe
from tests.support.planned import engine_for, settings_for

MODELS = ("qwen3-0.6b", "gpt-oss-20b", "deepseek-v3", "qwen3-next-80b-a3b")
"""Dense, windows and experts, latent with experts, recurrent."""


@cache
def engine(name: str, tp: int, pcp: int, dcp: int, pp: int = 1) -> PlannedEngine | None:
    asked = settings_for(name, "H200", tp * pcp * pp, memory=8e12)
    try:
        return engine_for(asked, tp, pcp, dcp, pipeline_parallel_size=pp)
    except HeddleError:  # not legal for this model
        return None


def plan_of(found: PlannedEngine, parts: list[Rows]) -> StepPlan:
    return plan(create_batch(found.topology, parts), found.topology)


def named(call: Collective) -> str:
    return f"{call.op} {call.group}"


def shown_calls(lane: list[list[Any]], layer: int) -> list[tuple[str, int]]:
    return [(s[0], s[5]) for s in lane if s[1] == 1 and s[4] == layer and s[5] >= 0]


LAYOUTS = [(1, 1, 1, 1), (2, 1, 2, 1), (1, 2, 2, 1), (2, 2, 2, 1), (2, 2, 4, 1), (4, 2, 8, 1)]
LAYOUTS += [(2, 2, 2, 2), (1, 4, 4, 1), (1, 4, 2, 2)]
layouts = st.sampled_from(LAYOUTS)
parts_of = st.lists(
    st.one_of(
        st.builds(Rows, st.integers(1, 30_000), st.just(1)),
        st.builds(Rows, st.integers(0, 9000), st.integers(2, 900), st.booleans()),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=30, deadline=None)
@given(name=st.sampled_from(MODELS), layout=layouts, parts=parts_of)
def test_each_rank_shows_its_schedule(
    name: str, layout: tuple[int, int, int, int], parts: list[Rows]
) -> None:
    found = engine(name, *layout)
    if found is None:
        return
    shown = describe(found, [("a step", parts)])
    step, (only,) = plan_of(found, parts), shown["steps"]
    assert only["rows"] == sum(part.new for part in parts)
    mesh, topology = found.topology.mesh, found.topology
    assert [rank["rank"] for rank in shown["ranks"]] == list(range(mesh.world_size))
    for rank, lane in enumerate(only["lanes"]):
        schedule = collective_schedule(step, topology, rank)

        def told(calls: tuple[Collective, ...]) -> list[tuple[str, int]]:
            return [(named(call), cost_of([call], mesh).received_bytes) for call in calls]

        ends = told(schedule.prologue) + told(schedule.epilogue)
        assert shown_calls(lane, -1) == ends
        layers = topology.stage_layers(rank)
        drawn = {s[4]: s[0] for s in lane if s[1] == 0 and s[0].startswith("projections")}
        kinds = {layer: shown_calls(lane, layer) for layer in drawn}
        own = [told(calls) for calls in schedule.layers]
        for layer, calls in kinds.items():
            assert calls == own[layer - layers.start]
        assert all(calls in kinds.values() for calls in own)
        # Each kind says how many layers are like it, so the step can be summed up again.
        counts = {
            layer: int(match[1]) if (match := re.search(r"of (\d+) layers", text)) else 1
            for layer, text in drawn.items()
        }
        assert sum(counts.values()) == len(layers)
        total = sum(size for _, size in ends)
        total += sum(counts[layer] * size for layer, calls in kinds.items() for _, size in calls)
        assert total == cost_of(schedule, mesh).received_bytes


@settings(max_examples=20, deadline=None)
@given(name=st.sampled_from(MODELS), layout=layouts, parts=parts_of)
def test_every_call_says_what_it_carries_and_why(
    name: str, layout: tuple[int, int, int, int], parts: list[Rows]
) -> None:
    found = engine(name, *layout)
    if found is None:
        return
    shown = describe(found, [("a step", parts)])
    for lane in shown["steps"][0]["lanes"]:
        at = 0.0
        for what, level, start, length, _, size, carries, reason in lane:
            if level == 0:  # parts follow each other
                assert start == pytest.approx(at, abs=0.02)
                at = start + length
            else:  # and hold what is in them
                assert start + length <= at + 0.02
            if size >= 0:
                assert shown["words"][carries]
                assert shown["words"][reason]
            else:
                assert (carries, reason) == (-1, -1)
                assert level == 0 or what == "attend"


def test_queries_go_out_before_keys_are_met_and_partials_come_back_after() -> None:
    found = engine("qwen3-0.6b", 2, 1, 2)
    assert found is not None
    shown = describe(found, [("decode", [Rows(20_000, 1)] * 8)])
    lane = shown["steps"][0]["lanes"][0]
    inner = [s for s in lane if s[1] == 1 and s[4] == 0]
    names = [s[0] for s in inner]
    met = names.index("attend")
    assert "attend" not in names[met + 1 :]
    before = [shown["words"][s[6]] for s in inner[:met] if s[5] >= 0]
    after = [shown["words"][s[6]] for s in inner[met + 1 :] if s[5] >= 0]
    assert any("queries" in word for word in before) or not before
    assert any("partials" in word or "merged" in word for word in after)


def test_seconds_are_those_of_the_planner_and_more_context_is_no_faster() -> None:
    found = engine("qwen3-0.6b", 1, 2, 2)
    assert found is not None
    near, far = [Rows(1000, 1)], [Rows(100_000, 1)]
    shown = describe(found, [("near", near), ("far", far)])
    for step, parts in zip(shown["steps"], (near, far), strict=True):
        assert step["seconds"] == CostModel(found).step(parts).seconds
    attend = [next(s[3] for s in step["lanes"][0] if s[0] == "attend") for step in shown["steps"]]
    assert attend[1] > 10 * attend[0]


def test_experts_and_sums_are_told_apart() -> None:
    found = engine("gpt-oss-20b", 2, 2, 2)
    assert found is not None
    shown = describe(found, [("chunk", [Rows(0, 512)])])
    kinds = Counter(s[0] for s in shown["steps"][0]["lanes"][0] if s[1] == 0)
    assert kinds["attention"] == kinds["MLP"] > 1  # with windows and without
    assert kinds["logits"] == 1
