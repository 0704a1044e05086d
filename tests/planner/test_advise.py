from __future__ import annotations

from dataclasses import replace

import pytest

from heddle.planner.advise import (
    flags_of,
    interleave_reason,
    largest_chunk,
    recommend,
    rules_out,
    why,
)
from heddle.planner.batches import Rows
from heddle.planner.cost import CostModel
from heddle.planner.search import Found, Search
from heddle.planner.workload import Workload
from tests.support.planned import engine_for, settings_for

LOAD = Workload(prompt_len=30_000, output_len=200, concurrency=8)


@pytest.fixture(scope="module")
def found() -> Found:
    settings = settings_for("llama-3.1-8b", "H200", 4, chunk_per_pcp_rank=True)
    return Search(settings=settings, load=LOAD).run()


def test_each_recommended_layout_is_best_at_something(found: Found) -> None:
    advice = recommend(found.candidates, LOAD)
    roles = [role for entry in advice for role in entry.roles]
    assert sorted(roles) == ["first token", "room", "throughput"]
    assert 1 <= len(advice) <= 3
    predictions = [c.prediction for c in found.candidates if c.prediction is not None]
    by_role = {role: entry.candidate for entry in advice for role in entry.roles}
    assert by_role["throughput"].prediction.tok_s == max(p.tok_s for p in predictions)
    assert by_role["first token"].prediction.ttft == min(p.ttft for p in predictions)


def test_targets_come_first(found: Found) -> None:
    gaps = sorted(c.prediction.tpot for c in found.candidates if c.prediction is not None)
    target = replace(LOAD, tpot=gaps[2])
    for entry in recommend(found.candidates, target):
        assert entry.candidate.prediction is not None
        assert entry.candidate.prediction.tpot <= gaps[2]
    impossible = replace(LOAD, tpot=gaps[0] / 2)
    chosen = recommend(found.candidates, impossible)
    assert chosen
    assert any("misses the target" in line for line in why(chosen[0].candidate, impossible))


def test_layouts_that_serve_fewer_at_once_are_not_recommended(found: Found) -> None:
    crowded = replace(LOAD, concurrency=16)
    few = replace(found.candidates[0].prediction, concurrency=2, ttft=0.0)
    candidates = [replace(found.candidates[0], prediction=few), *found.candidates[1:]]
    for entry in recommend(candidates, crowded):
        assert entry.candidate is not candidates[0]


def test_nothing_is_recommended_where_nothing_fits() -> None:
    assert recommend([], LOAD) == []


def test_flags_name_everything_that_the_room_depends_on(found: Found) -> None:
    engine = found.candidates[0].engine
    words = flags_of(engine).split()
    for flag in ("-tp", "-pcp", "-dcp", "--dtype", "--kv-cache-dtype", "--block-size"):
        assert flag in words
    pool = words[words.index("--kv-cache-memory-bytes") + 1]
    assert int(pool) == engine.resolved.cache.kv_cache_memory_bytes
    chunk = words[words.index("--max-num-batched-tokens") + 1]
    assert int(chunk) == engine.chunk


def test_limits_are_said_in_words(found: Found) -> None:
    said = {
        (
            c.parallel.prefill_context_parallel_size > 1,
            c.parallel.data_parallel_size > 1,
        ): "; ".join(rules_out(c, LOAD))
        for c in found.candidates
    }
    assert len(said) >= 3
    for (splits_rows, has_replicas), text in said.items():
        assert ("a gain for prompts below" in text) == splits_rows
        assert ("prefixes shared between replicas" in text) == has_replicas
        assert "requests of 30,200 tokens at once" in text


def test_a_pool_below_the_window_is_named() -> None:
    settings = settings_for("llama-3.1-8b", "RTX-5090", 1)
    candidate = Search(settings=settings, load=LOAD).run().candidates[0]
    room = candidate.engine.room
    assert room.longest_prompt < room.window - 1
    assert f"prompts above {room.longest_prompt:,} tokens" in rules_out(candidate, LOAD)[0]
    long = replace(LOAD, prompt_len=room.longest_prompt + 1)
    hopeless = Search(settings=settings, load=long).run().candidates[0]
    assert "none fits" in "; ".join(rules_out(hopeless, long))


def test_the_largest_chunk_keeps_the_gap() -> None:
    engine = engine_for(settings_for("llama-3.1-8b", chunk=8192), 2)
    model = CostModel(engine)
    decodes = [Rows(LOAD.prompt_len + 100, 1)] * 7
    at_512 = model.step([Rows(LOAD.prompt_len - 512, 512), *decodes]).seconds
    assert largest_chunk(engine, LOAD, at_512 * 1.0001) == 512
    assert largest_chunk(engine, LOAD, 1e9) == 8192
    assert largest_chunk(engine, LOAD, 1e-9) is None


def test_the_interleave_has_a_reason() -> None:
    assert "interleave 1" in interleave_reason()
