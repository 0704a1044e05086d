from __future__ import annotations

from typing import Any

import pytest

from heddle.planner.batches import Rows
from heddle.planner.break_even import break_even_lines
from heddle.planner.cost import CostModel
from heddle.planner.memory import PlannedEngine, plan_engine
from heddle.planner.workload import prefill_seconds
from tests.support.planned import engine_for, settings_for


def test_a_step_changes_sign_at_the_line() -> None:
    settings = settings_for("deepseek-r1", memory=400e9)
    engine = engine_for(settings, 8, 1, 8)
    (line,) = break_even_lines(engine, 4)
    assert line.what == "dcp"
    assert line.tokens is not None
    whole = CostModel(plan_engine(settings, line.against))
    split = CostModel(engine)

    def gain(tokens: float) -> float:
        rows = [Rows(int(tokens) // 4, 1)] * 4
        return whole.step(rows).seconds - split.step(rows).seconds

    assert gain(line.tokens * 0.85) < 0 < gain(line.tokens * 1.05)
    low, high = line.band
    assert low is not None
    assert high is not None
    assert low < line.tokens < high


def test_prompts_have_a_line_against_fewer_devices_and_one_against_as_many() -> None:
    settings = settings_for("qwen3-235b-a22b", memory=400e9, chunk=8192)
    engine = engine_for(settings, 2, 4, 1)
    fewer, as_many = break_even_lines(engine, 1)
    assert [line.against.world_size for line in (fewer, as_many)] == [2, 8]
    assert as_many.tokens is not None
    assert fewer.tokens is not None
    other, here = CostModel(plan_engine(settings, as_many.against)), CostModel(engine)
    for length, is_sooner in ((0.8 * as_many.tokens, False), (1.1 * as_many.tokens, True)):
        span = (0, int(length))
        mine, theirs = (prefill_seconds(model, span, 8192) for model in (here, other))
        assert (mine < theirs) == is_sooner


def test_both_layouts_of_a_line_work_in_chunks_of_as_many_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A chunk for each PCP rank would compare chunks, not layouts."""
    settings = settings_for("llama-3.1-8b", chunk=1024, chunk_per_pcp_rank=True)
    engine = engine_for(settings, 1, 4, 4)
    assert engine.chunk == 4096
    planned = []

    def noted(*arguments: Any) -> PlannedEngine:
        planned.append(plan_engine(*arguments))
        return planned[-1]

    monkeypatch.setattr("heddle.planner.break_even.plan_engine", noted)
    lines = break_even_lines(engine, 1)
    assert len(lines) == len(planned) == 3
    assert {other.chunk for other in planned} == {4096}


def test_what_is_not_split_has_no_line() -> None:
    assert break_even_lines(engine_for(settings_for(), 4), 1) == []


def test_a_line_beyond_the_window_is_never_reached() -> None:
    engine = engine_for(settings_for("deepseek-r1", memory=400e9, window=4096), 8, 1, 8)
    (line,) = break_even_lines(engine, 1)
    assert line.tokens is None
    assert line.band == (None, None)


def test_the_asked_exchange_is_left_out_where_nothing_is_split() -> None:
    settings = settings_for("deepseek-r1", memory=400e9, window=1 << 20)
    engine = engine_for(settings, 8, 1, 8, dcp_comm_backend="ag_rs")
    (line,) = break_even_lines(engine, 1)
    assert line.against.dcp_comm_backend == "auto"
    (cheaper,) = break_even_lines(engine_for(settings, 8, 1, 8), 1)
    assert line.tokens is not None
    assert cheaper.tokens is not None
    assert cheaper.tokens < line.tokens
