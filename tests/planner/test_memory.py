"""A planned rank is a weighed rank, and planned room is the room of an engine's accounting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from heddle.config import CacheConfig
from heddle.engine.capacity import Capacity
from heddle.errors import TopologyError
from heddle.models.config_json import load_model_config
from heddle.models.weights.open import open_weights
from heddle.planner.memory import plan_engine, room_of
from heddle.planner.settings import DoesNotFit, Settings
from heddle.runner.weigh import distinct_ranks, weigh_rank
from heddle.step.topology import Topology
from tests.support.flagship import Case, resolve_case
from tests.support.planned import engine_for, layout_of, settings_for
from tests.support.tiny import build_tiny

POOL = 1 << 20
KINDS = ("llama-9-3", "deepseek-v3", "gemma3", "qwen3-next", "qwen2-moe")
LAYOUTS = ((1, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 4), (4, 1, 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("memory")


def settings_of(path: Path, devices: int) -> Settings:
    return settings_for(
        str(path),
        "CPU",
        devices,
        chunk=64,
        model=load_model_config(path),
        model_path=str(path),
        cache=CacheConfig(kv_cache_memory_bytes=POOL),
    )


@pytest.mark.parametrize("name", KINDS)
def test_the_sheet_of_a_rank_is_what_it_would_hold(folder: Path, name: str) -> None:
    path = build_tiny(folder, name)
    source, compared = open_weights(path), 0
    for tp, pcp, dcp in LAYOUTS:
        try:
            engine = engine_for(settings_of(path, tp * pcp), tp, pcp, dcp)
        except TopologyError:
            continue  # some kinds take no DCP
        held = [weigh_rank(engine.resolved, r, source) for r in distinct_ranks(engine.resolved)]
        most = max(held, key=lambda rank: rank.weights)
        sheet = engine.memory
        assert sheet.weights == most.weights
        assert (sheet.activations, sheet.exchange) == (most.activations, most.own_exchange)
        assert (sheet.kv_pool, sheet.states) == (most.cache, most.states)
        assert sheet.headroom == sheet.device - sheet.total
        compared += 1
    assert compared >= 3


@pytest.mark.parametrize("name", KINDS)
def test_planned_room_is_the_engine_s(folder: Path, name: str) -> None:
    path = build_tiny(folder, name)
    compared = 0
    for sizes in LAYOUTS:
        for case in (Case(sizes=sizes, block_size=4), Case(sizes=sizes, block_size=16, chunk=32)):
            try:
                resolved = resolve_case(path, case)
            except TopologyError:
                continue
            room, capacity = (
                room_of(resolved, Topology.from_resolved(resolved)),
                Capacity.of(resolved),
            )
            assert room.tokens_total == capacity.kv_tokens_total
            assert room.longest_prompt == capacity.longest_prompt
            assert room.prefix_unit == capacity.prefix_unit
            compared += 1
    assert compared >= 6


def test_the_pool_takes_what_the_rest_leaves() -> None:
    settings = settings_for("llama-3.1-8b", "H100", 2, window=131072)
    one, two = engine_for(settings, 2, 1, 1), engine_for(settings, 2, 1, 2)
    for engine in (one, two):
        sheet = engine.memory
        assert 0 <= sheet.headroom < (1 << 20) + sheet.token * 16
        assert engine.resolved.cache.kv_cache_memory_bytes is not None
    assert (one.memory.kv_copies, two.memory.kv_copies) == (1.0, 1.0)
    # DCP over 2 of 2 TP ranks: all 8 kv heads of half of the tokens, not half of them of all.
    assert two.memory.token == 2 * one.memory.token
    assert one.memory.token == 32 * 2 * 128 * 4 * 2
    assert two.room.tokens_total == pytest.approx(one.room.tokens_total, rel=0.01)


def test_split_kv_of_few_heads_multiplies_the_room() -> None:
    settings = settings_for("deepseek-r1", "B200", 8, memory=220e9)
    whole, split = engine_for(settings, 8, 1, 1), engine_for(settings, 8, 1, 8)
    assert whole.memory.kv_copies == 8.0
    assert 7.5 < split.room.tokens_total / whole.room.tokens_total <= 8.0


def test_weights_that_do_not_fit_are_refused_by_part() -> None:
    with pytest.raises(DoesNotFit, match=r"weights 811\.\d GB.*H100 has 80\.0 GB") as caught:
        engine_for(settings_for("llama-3.1-405b", "H100", 8))
    assert 811e9 < caught.value.needed_bytes < 830e9


def test_a_given_pool_that_does_not_fit_is_refused() -> None:
    settings = settings_for("llama-3.1-8b", "H100", 1)
    settings = replace(settings, cache=CacheConfig(kv_cache_memory_bytes=10**12))
    with pytest.raises(DoesNotFit, match="KV pool of at least 1,000,000,000,000 bytes"):
        plan_engine(settings, layout_of())


def test_concurrency_counts_whole_blocks_and_replicas() -> None:
    settings = settings_for("llama-3.1-8b", "H200", 4, cache=CacheConfig(num_blocks_override=None))
    engine = engine_for(settings, 1, 2, 2)
    usable = engine.resolved.num_blocks - 1
    assert engine.concurrency(33 * 1000) == min(usable // 1032, 128)
    twice = engine_for(settings, 1, 2, 2, data_parallel_size=2)
    assert twice.concurrency(33 * 1000) == 2 * engine.concurrency(33 * 1000)
