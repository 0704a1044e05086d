from __future__ import annotations

from dataclasses import replace

import pytest

from heddle.planner.advise import (
    flags_of,
    interleave_reason,
    is_ahead,
    largest_chunk,
    recommend,
    rules_out,
    why,
)
from heddle.planner.batches import Rows
from heddle.planner.cost import CostModel
from heddle.planner.search import Found, Search
from heddle.planner.workload import Prediction, Workload
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
    # Of layouts within a tenth of the best, the simplest is named.
    assert by_role["throughput"].prediction.tok_s >= max(p.tok_s for p in predictions) / 1.1
    assert by_role["first token"].prediction.ttft <= min(p.ttft for p in predictions) * 1.1
    assert all(c.ends for c in by_role.values())


def end(prediction: Prediction, factor: float) -> dict[str, Prediction]:
    """At all ends of the ranges, `factor` times as slow."""
    slow = replace(prediction, ttft=prediction.ttft * factor, tok_s=prediction.tok_s / factor)
    return {
        "low": replace(slow, ttft=2 * slow.ttft, tok_s=slow.tok_s / 2),
        "mid": slow,
        "high": replace(slow, ttft=slow.ttft / 2, tok_s=2 * slow.tok_s),
    }


@pytest.mark.parametrize(("factor", "is_told"), [(1.05, False), (1.2, True)])
def test_the_simpler_layout_is_named_where_none_can_be_told_ahead(
    found: Found, factor: float, is_told: bool
) -> None:
    served = [c for c in found.candidates if c.prediction is not None]
    simple = next(c for c in served if c.parallel.world_size == c.parallel.tensor_parallel_size)
    split = next(c for c in served if c.parallel.decode_context_parallel_size > 1)
    base = simple.prediction
    assert base is not None
    pair = [
        replace(simple, prediction=base, ends=end(base, factor)),
        replace(split, prediction=base, ends=end(base, 1.0)),
    ]
    assert is_ahead(pair[1], pair[0], "first token") == is_told
    assert not is_ahead(pair[0], pair[1], "first token")
    (entry,) = [a for a in recommend(pair, LOAD) if "first token" in a.roles]
    assert (entry.candidate is pair[1]) == is_told
    said = [line for line in entry.ties if "for first token" in line]
    assert len(said) == (not is_told)
    if said:
        assert "5% ahead" in said[0]
        assert "the simpler layout is named" in said[0]


def test_a_simple_layout_that_is_far_behind_in_another_respect_is_not_named() -> None:
    """Llama 3.1 70B on 8 H200: replicas of two ranks serve as many tokens, after three times the
    wait.
    """
    settings = settings_for("llama-3.1-70b", "H200", 8, chunk_per_pcp_rank=True)
    load = Workload(prompt_len=32768, output_len=500, concurrency=16)
    candidates = Search(settings=settings, load=load).run().candidates
    waits = {
        (c.parallel.tensor_parallel_size, c.parallel.data_parallel_size): c.prediction.ttft
        for c in candidates
        if c.prediction is not None and c.parallel.world_size == 8 and c.ends
    }
    assert waits[2, 4] > 2 * waits[8, 1]
    for entry in recommend(candidates, load):
        assert entry.candidate.prediction is not None
        assert entry.candidate.prediction.ttft < 1.5 * min(waits.values())


def test_one_end_at_which_it_is_behind_is_enough(found: Found) -> None:
    served = [c for c in found.candidates if c.prediction is not None][:2]
    base = served[0].prediction
    assert base is not None
    ends = end(base, 1.5)
    one = replace(served[0], ends=end(base, 1.0))
    other = replace(served[1], ends={**ends, "high": replace(ends["high"], ttft=base.ttft / 2)})
    assert not is_ahead(one, other, "first token")
    assert is_ahead(one, replace(served[1], ends=ends), "first token")


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
    few = replace(found.candidates[0].prediction, concurrency=2, ttft=1e-9)
    ends = dict.fromkeys(("low", "mid", "high"), few)
    candidates = [replace(found.candidates[0], prediction=few, ends=ends), *found.candidates[1:]]
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
        assert ("a split of prompts below" in text) == splits_rows
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
