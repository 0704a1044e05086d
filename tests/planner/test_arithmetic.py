"""Work against sums over rows and keys, one by one."""

from __future__ import annotations

import pytest

from heddle.config.visibility import FULL, Visibility
from heddle.planner.arithmetic import (
    Met,
    Work,
    attention_work,
    dense_work,
    expert_work,
    meet,
    recurrent_work,
)
from heddle.planner.batches import Rows, create_batch
from heddle.planner.memory import PlannedEngine
from heddle.step.plan import StepPlan, plan
from tests.support.planned import engine_for, settings_for

RULES = (
    FULL,
    Visibility("window", 5),
    Visibility("window", 6, num_first=3),
    Visibility("chunk", 4),
)
LENGTHS = [(0, 7), (9, 1), (13, 6), (2, 3)]


def planned(engine: PlannedEngine, *parts: Rows) -> StepPlan:
    return plan(create_batch(engine.topology, parts), engine.topology)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_pairs_and_keys_are_those_of_the_rule(rule: Visibility) -> None:
    cached_pairs = own_pairs = cached_keys = 0
    for cached, new in LENGTHS:
        seen_cached: set[int] = set()
        for position in range(cached, cached + new):
            keys = {*range(rule.start(position), position + 1), *range(rule.first_end(position))}
            before = {key for key in keys if key < cached}
            cached_pairs += len(before)
            own_pairs += len(keys) - len(before)
            seen_cached |= before
        cached_keys += len(seen_cached)
    found = meet(rule, LENGTHS)
    new_rows = sum(new for _, new in LENGTHS)
    assert (found.cached_pairs, found.own_pairs) == (cached_pairs, own_pairs)
    assert found.own_keys == new_rows
    assert found.cached_keys == pytest.approx(cached_keys, abs=2 * len(LENGTHS))


def test_nothing_is_met_by_nobody() -> None:
    assert meet(FULL, []) == Met()
    assert meet(RULES[1], []) == Met()


def test_work_is_bound_by_the_slower_side() -> None:
    work = Work(100.0, 30.0) + Work(100.0, 10.0)
    assert work.seconds(flops=10.0, memory=10.0) == 20.0
    assert work.seconds(flops=100.0, memory=10.0) == 4.0
    assert work.seconds(flops=100.0, memory=10.0, serial_share=0.5) == 4.0 + 0.5 * 2.0
    assert work.seconds(flops=10.0, memory=10.0, serial_share=1.0) == 20.0 + 4.0
    assert (work * 2).seconds(flops=10.0, memory=10.0) == 40.0


def test_a_decode_step_reads_its_share_of_the_keys() -> None:
    settings = settings_for("llama-3.1-8b")
    whole, split = engine_for(settings, 2, 1, 1), engine_for(settings, 2, 2, 2)
    parts = [Rows(1000, 1), Rows(3000, 1)]
    row = 2 * 128 * 2  # key and value of a head in 16 bit
    one = attention_work(planned(whole, *parts), whole.topology, 0, 0)
    assert one.read_bytes == 4002 * 4 * row
    assert one.operations == 2 * 4002 * 16 * (128 + 128)
    two = attention_work(planned(split, *parts), split.topology, 0, 0)
    assert two.read_bytes == one.read_bytes / 2
    assert two.operations == one.operations / 2


def test_tp_ranks_of_a_slice_meet_their_share_for_all_its_heads() -> None:
    settings = settings_for("deepseek-r1", memory=400e9)
    whole, split = engine_for(settings, 8, 1, 1), engine_for(settings, 8, 1, 8)
    one = attention_work(planned(whole, Rows(7999, 1)), whole.topology, 0, 0)
    two = attention_work(planned(split, Rows(7999, 1)), split.topology, 0, 0)
    assert one.operations == two.operations == 2 * 8000 * 16 * (576 + 512)
    assert (one.read_bytes, two.read_bytes) == (8000 * 1152, 1000 * 1152)


def test_latent_rows_of_a_prompt_are_met_expanded() -> None:
    engine = engine_for(settings_for("deepseek-r1", memory=400e9), 8)
    found = attention_work(planned(engine, Rows(1000, 100)), engine.topology, 0, 0)
    pairs = 100 * 1000 + 5050
    up = 2 * 1100 * 16 * 512 * (128 + 128)
    assert found.operations == 2 * pairs * 16 * (192 + 128) + up


def test_rows_of_a_prompt_are_shared_by_pcp_ranks_and_keys_that_travel_are_read_twice() -> None:
    settings = settings_for("llama-3.1-8b")
    alone = engine_for(settings, 2, 1, 1)
    split = engine_for(settings, 2, 2, 2, cp_context_exchange="gather_kv")
    parts = [Rows(4096, 1024)]
    one = attention_work(planned(alone, *parts), alone.topology, 0, 0)
    two = attention_work(planned(split, *parts), split.topology, 0, 0)
    assert two.operations == one.operations / 2
    row = 4 * 2 * 128 * 2
    assert one.read_bytes == (4096 + 1024) * row
    assert two.read_bytes == (2 * 4096 + 1024) * row
    travelling = engine_for(settings, 2, 2, 2, cp_context_exchange="gather_q")
    three = attention_work(planned(travelling, *parts), travelling.topology, 0, 0)
    assert three.read_bytes == (4096 / 2 + 1024) * row
    assert three.operations == two.operations


def test_windows_bound_what_is_read() -> None:
    engine = engine_for(settings_for("gpt-oss-20b"), 1)
    step = planned(engine, Rows(50_000, 1))
    full, window = (attention_work(step, engine.topology, group, 0) for group in (0, 1))
    assert window.read_bytes == pytest.approx(128 / 50_001 * full.read_bytes)


def test_sparse_attention_scores_all_keys_and_reads_the_best() -> None:
    settings = settings_for("deepseek-v3.2", memory=400e9)
    engine = engine_for(settings, 8)
    found = attention_work(planned(engine, Rows(99_999, 1)), engine.topology, 0, 0)
    scored = 2 * 100_000 * 64 * 128
    assert found.operations == scored + 2 * 2048 * 16 * (576 + 512)
    stored = (576 + 128) * 2
    assert found.read_bytes == 100_000 * 128 * 2 + 2048 * stored


def test_a_dense_layer_reads_its_weights_once_and_multiplies_every_row() -> None:
    engine = engine_for(settings_for("llama-3.1-8b"), 1)
    layer = engine.weights[0].layers[0]
    one, many = dense_work(layer, 1), dense_work(layer, 100)
    assert one.read_bytes == many.read_bytes == layer.num_bytes
    assert many.operations == 100 * one.operations
    # Four projections of attention and three of the feed-forward.
    elements = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    assert one.operations == 2 * elements


def test_few_rows_visit_few_experts() -> None:
    engine = engine_for(settings_for("qwen3-30b-a3b"), 1)
    layer = engine.weights[0].layers[0]
    one = expert_work(layer, planned(engine, Rows(10, 1)), engine.topology)
    many = expert_work(layer, planned(engine, Rows(0, 2048)), engine.topology)
    assert one.read_bytes == pytest.approx(8 / 128 * layer.expert_bytes)
    assert many.read_bytes == pytest.approx(layer.expert_bytes)
    assert one.operations == pytest.approx(2 * 8 * 3 * 2048 * 768)
    dense = engine_for(settings_for("llama-3.1-8b"), 1)
    step = planned(dense, Rows(10, 1))
    assert expert_work(dense.weights[0].layers[0], step, dense.topology) == Work()


def test_dealt_experts_are_visited_by_all_replicas() -> None:
    settings = settings_for("qwen3-30b-a3b", devices=4)
    cut = engine_for(settings, 2, data_parallel_size=2)
    dealt = engine_for(settings, 2, data_parallel_size=2, enable_expert_parallel=True)
    works = [
        expert_work(each.weights[0].layers[0], planned(each, Rows(0, 512)), each.topology)
        for each in (cut, dealt)
    ]
    # Half of each expert for 512 rows, or a quarter of the experts for 1,024.
    assert works[0].operations == pytest.approx(works[1].operations)


def test_states_are_read_and_written_once() -> None:
    engine = engine_for(settings_for("qwen3-next-80b-a3b", memory=400e9), 2)
    one = recurrent_work(planned(engine, Rows(100, 1)), engine.topology, 0)
    many = recurrent_work(planned(engine, Rows(100, 64)), engine.topology, 0)
    assert one.read_bytes == many.read_bytes == 2 * 16 * 128 * 128 * 4
    assert many.operations == 64 * one.operations
    none = engine_for(settings_for("llama-3.1-8b"), 1)
    assert recurrent_work(planned(none, Rows(1, 1)), none.topology, 0) == Work()
