from __future__ import annotations

from dataclasses import replace

import pytest

from heddle.errors import ConfigError
from heddle.planner.batches import Rows
from heddle.planner.cost import CostModel
from heddle.planner.workload import (
    Workload,
    at_all_ends,
    bands_of,
    goodput,
    keeps,
    predict,
    prefill_seconds,
)
from tests.support.planned import engine_for, settings_for

SETTINGS = settings_for("llama-3.1-8b")
LOAD = Workload(prompt_len=10_000, output_len=200, concurrency=4)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prompt_len", 0, "prompt_len=0 is not legal"),
        ("output_len", -1, "output_len=-1 is not legal"),
        ("concurrency", 0, "concurrency=0 is not legal"),
        ("cached_share", 1.0, "prefix_hit=1.0 is not legal"),
        ("ttft", 0.0, "ttft=0.0 is not legal"),
        ("tpot", float("nan"), "tpot=nan is not legal"),
    ],
)
def test_what_nobody_can_ask_for_is_refused(field: str, value: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(LOAD, **{field: value})


def test_a_prompt_is_the_sum_of_its_chunks() -> None:
    model = CostModel(engine_for(SETTINGS, 2))
    cuts = [(0, 2048), (2048, 2048), (4096, 904)]
    expected = sum(
        model.step([Rows(cached, rows, cached == 4096)]).seconds for cached, rows in cuts
    )
    assert prefill_seconds(model, (0, 5000), 2048) == pytest.approx(expected)


@pytest.mark.parametrize("nodes", [1, 4])
def test_many_chunks_are_summed_on_straight_lines(nodes: int) -> None:
    model = CostModel(engine_for(SETTINGS, 2, 2, 2))
    exact = prefill_seconds(model, (0, 80_000), 2048, nodes=1000)
    assert prefill_seconds(model, (0, 80_000), 2048, nodes=nodes) == pytest.approx(exact, rel=0.03)


def test_stages_work_on_several_chunks_at_once() -> None:
    one = CostModel(engine_for(SETTINGS, 1))
    four = CostModel(engine_for(SETTINGS, 1, pipeline_parallel_size=4))
    span = (0, 60_000)
    assert prefill_seconds(four, span, 2048) < 0.4 * prefill_seconds(one, span, 2048)


def test_alone_a_request_waits_for_nobody() -> None:
    engine = engine_for(SETTINGS, 2)
    model = CostModel(engine)
    found = predict(engine, replace(LOAD, concurrency=1), model)
    assert found.ttft == pytest.approx(prefill_seconds(model, (0, 10_000), 2048))
    assert found.tpot == found.decode == found.gap
    seconds = found.ttft + 200 * found.decode
    assert found.tok_s == pytest.approx(200 / seconds)


def test_company_costs_gaps_and_brings_throughput() -> None:
    engine = engine_for(SETTINGS, 2)
    model = CostModel(engine)
    one, four = (predict(engine, replace(LOAD, concurrency=n), model) for n in (1, 4))
    assert four.tok_s > one.tok_s
    assert four.gap > four.tpot > one.tpot
    assert four.ttft >= one.ttft
    assert four.prompt_tok_s == pytest.approx(four.tok_s * 50)


def test_a_cached_prefix_saves_rows_and_not_context() -> None:
    engine = engine_for(SETTINGS, 2)
    model = CostModel(engine)
    cold, warm = (predict(engine, replace(LOAD, cached_share=s), model) for s in (0.0, 0.7))
    assert 0.3 * cold.ttft < warm.ttft < 0.6 * cold.ttft
    assert warm.decode == cold.decode


def test_no_more_run_than_fit() -> None:
    settings = settings_for("llama-3.1-8b", "H100", 1)
    engine = engine_for(settings, 1)
    load = replace(LOAD, prompt_len=100_000, concurrency=50)
    fitting = engine.concurrency(load.num_tokens)
    assert 0 < fitting < 50
    assert predict(engine, load, CostModel(engine)).concurrency == fitting
    with pytest.raises(ValueError, match="does not fit"):
        predict(engine, replace(load, prompt_len=900_000), CostModel(engine))


def test_a_band_holds_the_prediction() -> None:
    model = CostModel(engine_for(SETTINGS, 2))
    ends = at_all_ends(LOAD, model)
    prediction, bands = ends["mid"], bands_of(ends)
    assert prediction == predict(model.engine, LOAD, model)
    assert set(bands) == {"ttft", "tpot", "tok_s"}
    for name, (least, most) in bands.items():
        assert least < getattr(prediction, name) < most


def test_goodput_is_the_rate_at_which_targets_are_just_kept() -> None:
    engine = engine_for(SETTINGS, 2)
    model = CostModel(engine)
    alone = predict(engine, replace(LOAD, concurrency=1), model)
    loose, tight, none = (replace(LOAD, tpot=factor * alone.tpot) for factor in (6.0, 1.5, 0.9))
    rates = [goodput(engine, load, model) for load in (none, tight, loose)]
    assert rates[0] == 0.0
    assert 0 < rates[1] < rates[2]
    assert keeps(alone, tight)
    assert not keeps(alone, none)
    assert not keeps(alone, replace(LOAD, ttft=alone.ttft / 2))


def test_replicas_without_a_request_bring_nothing() -> None:
    engine = engine_for(SETTINGS, 1, data_parallel_size=8)
    model = CostModel(engine)
    four, eight = (predict(engine, replace(LOAD, concurrency=n), model) for n in (4, 8))
    assert eight.tok_s == pytest.approx(2 * four.tok_s)
    assert four.ttft == eight.ttft
