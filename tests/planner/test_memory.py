"""A planned rank is a weighed rank and takes what was planned while it runs; planned room is the
room of an engine's accounting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3 import DeepseekV3Config

from heddle.config import CacheConfig, SamplingParams
from heddle.engine.capacity import Capacity
from heddle.engine.driver import Driver
from heddle.engine.executors.threads import ThreadsExecutor
from heddle.engine.inputs import PromptInput
from heddle.errors import TopologyError
from heddle.models.config_json import load_model_config
from heddle.models.weights.open import open_weights
from heddle.planner.memory import PlannedEngine, plan_engine, room_of
from heddle.planner.settings import DoesNotFit, Settings
from heddle.runner.weigh import distinct_ranks, held_bytes, weigh_rank
from heddle.runner.worker import RankWorker
from heddle.step.topology import Topology
from tests.support.flagship import Case, resolve_case
from tests.support.live_bytes import LiveBytes
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


def latent_checkpoint(folder: Path) -> Path:
    """A DeepSeek whose widths the compiled kernels take, as those of the real ones are."""
    path = folder / "latent"
    if not path.exists():
        sizes = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
        config = DeepseekV3Config(**LATENT, **sizes, architectures=["DeepseekV3ForCausalLM"])
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


LATENT: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 100,
    "moe_intermediate_size": 22,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "max_position_embeddings": 512,
}


def run_and_watch(engine: PlannedEngine) -> list[int]:
    """Most bytes that the tensors of each rank took: what it keeps, and what a step made on top."""
    peaks: dict[int, int] = {}

    def watched(worker: RankWorker) -> Callable[..., Any]:
        kept, run = held_bytes(worker.model) + held_bytes(worker.store), worker.execute

        def execute(*arguments: Any) -> Any:
            with LiveBytes(worker) as live:
                reply = run(*arguments)
            rank = worker.global_rank
            peaks[rank] = max(peaks.get(rank, 0), kept + live.peak_bytes)
            return reply

        return execute

    resolved = replace(engine.resolved, executor="threads", num_threads=1)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with ThreadsExecutor(resolved) as executor:
        for worker in executor.workers:
            worker.execute = watched(worker)  # type: ignore[method-assign]
        driver = Driver(resolved, executor, None)
        for length in (420, 30, 50):
            driver.add(PromptInput(token_ids=(tuple(range(3, 123)) * 4)[:length]), params)
        while driver.has_work:
            driver.step()
    return list(peaks.values())


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 4)], ids=str)
@pytest.mark.parametrize("kind", ["demo's heads", "latent"])
def test_tensors_of_a_running_rank_take_what_was_planned(
    folder: Path, kind: str, sizes: tuple[int, int, int]
) -> None:
    """Within 10%: weights, pool, and rows of the largest step behind a long context."""
    path = latent_checkpoint(folder) if kind == "latent" else build_tiny(folder, "llama-9-3")
    engine = engine_for(settings_of(path, sizes[0] * sizes[1]), *sizes)
    sheet = engine.memory
    foretold = sheet.weights + sheet.kv_pool + sheet.states + sheet.activations
    found = run_and_watch(engine)
    assert len(found) == sizes[0] * sizes[1]
    assert max(found) == pytest.approx(foretold, rel=0.1)


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
