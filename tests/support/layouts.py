"""Layout choices for tests: every kind of fault, and a reader of proposed flags."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from heddle.config.parallel import ParallelConfig
from heddle.layout.choice import LayoutChoice, ModelFacts

SHORT = {
    "-tp": "tensor_parallel_size",
    "-pcp": "prefill_context_parallel_size",
    "-dcp": "decode_context_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "--cp-kv-cache-interleave-size": "kv_interleave_size",
}


def degrees(tp: int, pcp: int, dcp: int, **others: Any) -> ParallelConfig:
    return ParallelConfig(
        tensor_parallel_size=tp,
        prefill_context_parallel_size=pcp,
        decode_context_parallel_size=dcp,
        **others,
    )


def read_flags(asked: LayoutChoice, flags: str) -> LayoutChoice:
    """What a user gets who adds the flags to what was asked before."""
    words = flags.split()
    changes: dict[str, Any] = {}
    while words:
        flag = words.pop(0)
        name = SHORT.get(flag, flag.removeprefix("--").removeprefix("no-").replace("-", "_"))
        if words and not words[0].startswith("-"):
            word = words.pop(0)
            changes[name] = int(word) if word.isdigit() else word
        else:
            changes[name] = not flag.startswith("--no-")
    own = {name: changes.pop(name) for name in ("block_size", "max_model_len") if name in changes}
    return replace(asked, parallel=replace(asked.parallel, **changes), **own)


_sizes = st.integers(-1, 24)
_heads = st.builds(
    ModelFacts,
    num_query_heads=st.sampled_from([4, 6, 8, 9, 12]),
    num_kv_heads=st.sampled_from([1, 2, 3]),
    window=st.sampled_from([None, 4096]),
    num_layers=st.sampled_from([None, 1, 6, 40]),
    num_experts=st.sampled_from([None, 0, 1, 5, 64]),
)


@st.composite
def choices(draw: st.DrawFn) -> LayoutChoice:
    """Any choice, most of them broken in several ways."""
    return LayoutChoice(
        parallel=degrees(
            draw(_sizes),
            draw(st.integers(0, 8)),
            draw(_sizes),
            pipeline_parallel_size=draw(st.sampled_from([1, 1, 2, 0])),
            data_parallel_size=draw(st.sampled_from([1, 1, 3])),
            enable_expert_parallel=draw(st.sampled_from([False, False, True])),
            kv_interleave_size=draw(st.sampled_from([1, 2, 3, 16, 32, -1])),
            dcp_comm_backend=draw(st.sampled_from(["auto", "a2a", "ag_rs", "ring"])),
            cp_context_exchange=draw(st.sampled_from(["auto", "gather_q", "pass_q", "ring_kv"])),
            cp_lanes=draw(st.sampled_from([None, None, 4, 6, 0])),
            cp_start_rank_rotation=draw(st.sampled_from([False, False, True])),
            dcp_q_replicate=draw(st.sampled_from([False, False, True])),
            context_workspace_tokens=draw(st.sampled_from([None, None, 1, 64])),
        ),
        block_size=draw(st.sampled_from([16, 16, 4, 0])),
        max_model_len=draw(st.sampled_from([None, 100, 8192])),
        model=draw(st.none() | _heads),
    )
