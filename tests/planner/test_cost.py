from __future__ import annotations

import pytest

from heddle.planner.batches import Rows
from heddle.planner.cost import CostModel
from tests.support.planned import engine_for, settings_for

SETTINGS = settings_for("llama-3.1-8b")


def test_a_decode_step_of_one_rank_is_the_reading_of_its_weights_and_keys() -> None:
    engine = engine_for(SETTINGS, 1)
    model = CostModel(engine)
    cost = model.step([Rows(9_999, 1)])
    rates = model.rates
    weights = engine.weights[0]
    read = weights.num_bytes - sum(p.num_bytes for p in weights.ends if p.name == "embedding")
    read += 10_000 * engine.memory.token
    overhead = rates.step_seconds + 32 * rates.layer_seconds
    assert cost.seconds == pytest.approx(read / rates.memory + overhead, rel=1e-3)
    assert cost.traffic.groups == {}


def test_a_chunk_is_bound_by_arithmetic() -> None:
    engine = engine_for(SETTINGS, 1)
    model = CostModel(engine)
    stage = model.step([Rows(0, 2048)]).stages[0]
    elements = sum(layer.row_elements for layer in engine.weights[0].layers)
    assert stage.dense == pytest.approx(2 * 2048 * elements / model.rates.flops)


def test_more_of_anything_takes_longer() -> None:
    model = CostModel(engine_for(SETTINGS, 2, 2, 2))
    times = [model.step([Rows(context, 1)] * 4).seconds for context in (1000, 10_000, 100_000)]
    assert times == sorted(times)
    chunks = [model.step([Rows(0, rows)]).seconds for rows in (256, 512, 1024, 2048)]
    assert chunks == sorted(chunks)


def test_splitting_rows_and_keys_shortens_what_is_long() -> None:
    def seconds(parts: list[Rows], *sizes: int) -> float:
        return CostModel(engine_for(SETTINGS, *sizes)).step(parts).seconds

    chunk, decode = [Rows(60_000, 2048)], [Rows(120_000, 1)] * 8
    assert seconds(chunk, 2, 4, 1) < 0.4 * seconds(chunk, 2, 1, 1)
    assert seconds(decode, 2, 4, 4) < 0.5 * seconds(decode, 2, 4, 1)


def test_equal_steps_are_priced_once() -> None:
    model = CostModel(engine_for(SETTINGS, 2))
    assert model.step([Rows(7, 1)]) is model.step((Rows(7, 1),))


def test_the_ends_of_the_ranges_bracket_the_middle() -> None:
    engine = engine_for(SETTINGS, 2, 2, 2)
    parts = [Rows(5000, 1), Rows(0, 512)]
    slow, middle, fast = (CostModel(engine, e).step(parts).seconds for e in ("low", "mid", "high"))
    assert slow > middle > fast


def test_stages_add_up_for_a_step_and_the_slowest_sets_the_pace() -> None:
    whole = CostModel(engine_for(SETTINGS, 1)).step([Rows(0, 1024)])
    staged = CostModel(engine_for(SETTINGS, 1, pipeline_parallel_size=4)).step([Rows(0, 1024)])
    assert len(staged.stages) == 4
    assert staged.seconds > whole.seconds
    assert staged.slowest_stage < 0.3 * whole.seconds
    assert staged.stages[-1].head > 0
    assert staged.stages[0].head == 0


def test_transfers_under_arithmetic_are_paid_as_far_as_they_show() -> None:
    ring, gather = (
        CostModel(engine_for(SETTINGS, 1, 4, 4, cp_context_exchange=way))
        for way in ("ring_kv", "gather_kv")
    )
    parts = [Rows(100_000, 2048)]
    hidden, shown = ring.step(parts).stages[0].exchange, gather.step(parts).stages[0].exchange
    assert hidden < shown
    reasons = ring.step(parts).reasons
    assert any("ring_kv" in reason for reason in reasons)
