"""The simulator with the clock off is the engine: same steps, same hits, same preemptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.config import ParallelConfig, ResolvedConfig
from heddle.config.model import MoEConfig
from heddle.engine.driver import Driver
from heddle.engine.llm import LLM
from heddle.planner.trace import TracedRequest
from tests.support.fake_executor import FakeExecutor, resolved_config
from tests.support.simulated import decided_by_driver, decided_by_simulation

VOCAB_SIZE = 256


def layout(tp: int, pcp: int, dcp: int, **fields: Any) -> ParallelConfig:
    return ParallelConfig(
        tensor_parallel_size=tp,
        prefill_context_parallel_size=pcp,
        decode_context_parallel_size=dcp,
        **fields,
    )


LAYOUTS = {
    "one rank": layout(1, 1, 1),
    "tp 2 dcp 2": layout(2, 1, 2),
    "pcp 2": layout(1, 2, 1),
    "tp 2 pcp 2 dcp 4": layout(2, 2, 4),
    "rotated": layout(2, 1, 2, cp_start_rank_rotation=True),
    "two stages": layout(1, 1, 1, pipeline_parallel_size=2),
}


def driver_of(resolved: ResolvedConfig) -> Driver:
    return Driver(resolved, FakeExecutor(resolved), None)


arrivals = st.lists(
    st.builds(
        lambda gap, prompt, output, hashes: (gap, TracedRequest(prompt, output, tuple(hashes))),
        st.sampled_from([0, 0, 0, 1, 2, 9]),
        st.integers(1, 60),
        st.integers(1, 14),
        st.lists(st.integers(0, 1), max_size=6),
    ),
    min_size=1,
    max_size=9,
)
pools = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(10, 40),
        "max_num_batched_tokens": st.sampled_from([4, 16, 64]),
        "max_num_seqs": st.integers(1, 8),
        "max_num_partial_prefills": st.integers(1, 3),
    }
)


def timed(wanted: list[tuple[int, TracedRequest]]) -> list[TracedRequest]:
    """Gaps made times; a hash names its whole past, as in a trace."""
    now, found = 0, []
    for gap, request in wanted:
        now += gap
        hashes = []
        for value in request.prefix_hashes:
            hashes.append(2 * (hashes[-1] if hashes else 0) + value + 1)
        found.append(request._replace(arrival=float(now), prefix_hashes=tuple(hashes)))
    return found


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=12)
@given(wanted=arrivals, pool=pools)
def test_with_the_clock_off_it_decides_what_the_engine_decides(
    name: str, wanted: list[tuple[int, TracedRequest]], pool: dict[str, int]
) -> None:
    resolved = resolved_config(vocab_size=VOCAB_SIZE, parallel=LAYOUTS[name], **pool)
    requests = timed(wanted)
    theirs = decided_by_driver(driver_of(resolved), requests)
    ours, _ = decided_by_simulation(resolved, requests)
    assert ours == theirs
    # Arrivals meet ends of steps here to the instant, also in the middle of a run.
    fast, _ = decided_by_simulation(resolved, requests, skips=True)
    assert (fast.ends, fast.hits, fast.refused) == (ours.ends, ours.hits, ours.refused)


@settings(max_examples=25)
@given(wanted=arrivals, pool=pools)
def test_replicas_in_lockstep_get_the_requests_that_an_engine_gives_them(
    wanted: list[tuple[int, TracedRequest]], pool: dict[str, int]
) -> None:
    moe = MoEConfig(
        num_experts=4,
        num_experts_per_token=2,
        expert_intermediate_size=8,
        scoring="softmax",
        normalize_top_k=True,
    )
    parallel = layout(1, 1, 1, data_parallel_size=3, enable_expert_parallel=True)
    resolved = resolved_config(vocab_size=VOCAB_SIZE, parallel=parallel, moe=moe, **pool)
    requests = timed(wanted)
    theirs = decided_by_driver(driver_of(resolved), requests)
    ours, _ = decided_by_simulation(resolved, requests)
    assert ours == theirs
    # Replicas that need not wait for each other decide the same where all steps take as long.
    apart = layout(1, 1, 1, data_parallel_size=3)
    free = resolved_config(vocab_size=VOCAB_SIZE, parallel=apart, **pool)
    alone, _ = decided_by_simulation(free, requests)
    assert sorted(alone.steps) == sorted(ours.steps)
    assert (alone.hits, alone.ends) == (ours.hits, ours.ends)


def test_pressure_is_met_by_the_cases_above() -> None:
    """Pools of these sizes preempt, hit and refuse; or the laws above would hold of nothing."""
    resolved = resolved_config(vocab_size=VOCAB_SIZE, num_blocks=12, max_num_batched_tokens=64)
    requests = [TracedRequest(12, 14, (1, 2), 0.0), TracedRequest(12, 14, (1, 3), 3.0)]
    requests += [TracedRequest(13, 14, (), 4.0), TracedRequest(60, 2, (), 5.0)]
    ours, simulation = decided_by_simulation(resolved, requests)
    assert ours == decided_by_driver(driver_of(resolved), requests)
    assert simulation.tally.preemptions > 0
    assert ours.hits[1] == 8
    assert ours.refused == 1


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "threads": (
        "llama-6-2",
        {
            "tensor_parallel_size": 2,
            "prefill_context_parallel_size": 2,
            "decode_context_parallel_size": 4,
        },
    ),
    "windows": ("gemma3", {}),
    "states": ("qwen3-next", {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_real_ranks_are_given_the_steps_that_were_foretold(name: str, tmp_path: Path) -> None:
    from tests.support.tiny import build_tiny  # imports transformers: seconds

    model, degrees = MODELS[name]
    folder = build_tiny(tmp_path, model)
    unit = degrees.get("decode_context_parallel_size", 1)
    with LLM(
        str(folder),
        executor="threads" if degrees else "inline",
        block_size=4,
        num_gpu_blocks_override=96 // unit,
        max_num_batched_tokens=16,
        max_num_seqs=3,
        max_model_len=64,
        **degrees,
    ) as llm:
        requests = [
            TracedRequest(20, 9, (1, 2, 3), 0.0),
            TracedRequest(23, 9, (1, 2, 5), 1.0),
            TracedRequest(5, 12, (), 1.0),
            TracedRequest(30, 12, (), 2.0),
            TracedRequest(24, 4, (1, 2, 3), 30.0),
        ]
        theirs = decided_by_driver(llm.driver, requests)
        ours, simulation = decided_by_simulation(llm.driver.resolved, requests)
    assert ours == theirs
    assert len(ours.steps) > 25
    fast, _ = decided_by_simulation(llm.driver.resolved, requests, skips=True)
    assert (fast.ends, fast.hits) == (ours.ends, ours.hits)
    assert sum(ours.hits.values()) > 0
    assert simulation.tally.num_steps == len(ours.steps)
