"""Steps of made-up models on real ranks: what `heddle doctor --calibrate` measures of an engine.

Each runs on one rank that has all cores and on two ranks that share them, as processes of an
engine, whose weights are random and whose pools are full. The two ranks split rows (PCP) where
rates are wanted: both then decode the same rows and say nothing. They cut heads (TP) where the
price of a call is wanted. `heddle.planner.calibrate` has the models and their steps, and makes
rates of the seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from heddle.bench.filled_steps import FilledSteps
from heddle.bench.paged_case import CaseSize
from heddle.comm.base import World
from heddle.comm.shared_memory.segment import refusal
from heddle.config.cache import CacheConfig
from heddle.config.engine import EngineConfig, ResolvedConfig
from heddle.config.model import ModelConfig
from heddle.config.parallel import ParallelConfig
from heddle.config.scheduler import SchedulerConfig
from heddle.engine.executors.processes import ProcessesExecutor
from heddle.engine.room import free_memory_bytes
from heddle.faults.watch import RankWatch
from heddle.kernels.warmup import compile_elsewhere, operations
from heddle.layout.resolve import resolve
from heddle.models.weights.memory import MemorySource
from heddle.planner.batches import Rows
from heddle.planner.calibrate import (
    CHUNK,
    CONTEXT,
    DECODE,
    NARROW,
    NUM_RANKS,
    SHALLOW,
    STREAMS,
    WIDE,
    wide_steps,
)
from heddle.runner.worker import RankWorker

WORKER = "heddle.cli.checkup_steps:create_made_up_rank"
Steps = Mapping[str, Sequence[Rows]]
_BLOCK_SIZE = 16
_WARM = 2
"""Passes of one look until it is recorded; the next is repeated."""
_REPEATS = 5


def measure_steps() -> dict[str, dict[str, float]]:
    """Seconds of each step: on `one` rank, on two that `split` rows, on two that `cut` heads."""
    layouts = {
        "one": ParallelConfig(),
        "split": ParallelConfig(prefill_context_parallel_size=NUM_RANKS),
        "cut": ParallelConfig(tensor_parallel_size=NUM_RANKS),
    }
    return {name: _measure_layout(name, parallel) for name, parallel in layouts.items()}


def _measure_layout(name: str, parallel: ParallelConfig) -> dict[str, float]:
    found = {
        label: measure(model, parallel, DECODE)["decode"]
        for label, model in (("narrow", NARROW), ("shallow", SHALLOW))
    }
    return (
        found if name == "cut" else found | measure(WIDE, parallel, wide_steps(parallel.world_size))
    )


def measure(model: ModelConfig, parallel: ParallelConfig, steps: Steps) -> dict[str, float]:
    """Seconds of each step, from sending it to the last answer: the least of some, since whatever
    else runs on a machine makes a step longer and never shorter.

    Args:
        model: without a checkpoint.
        parallel: of at most `NUM_RANKS` ranks.
        steps: by name; the sequences of a step are alike.
    """
    resolved = resolve_made_up(model, parallel)
    compile_elsewhere(operations(resolved.kernels, resolved.backend), lambda _: None)
    with ProcessesExecutor(resolved, worker=WORKER) as executor:
        filled = FilledSteps(resolved, executor)
        return {name: _seconds(partial(filled.seconds, size_of(s))) for name, s in steps.items()}


def size_of(parts: Sequence[Rows]) -> CaseSize:
    """A step as a benchmark says it."""
    first = parts[0]
    return CaseSize(context=first.cached + first.new, num_rows=first.new, num_streams=len(parts))


def _seconds(step: Callable[[], float]) -> float:
    for _ in range(_WARM):
        step()
    return min(step() for _ in range(_REPEATS))


def resolve_made_up(model: ModelConfig, parallel: ParallelConfig) -> ResolvedConfig:
    """A model without a checkpoint, as an engine would run it here."""
    free = free_memory_bytes()
    longest = CONTEXT + NUM_RANKS * CHUNK
    config = EngineConfig(
        model="made-up",
        parallel=parallel,
        cache=CacheConfig(num_blocks_override=1 + STREAMS * longest // _BLOCK_SIZE),
        scheduler=SchedulerConfig(max_num_batched_tokens=NUM_RANKS * CHUNK, max_num_seqs=STREAMS),
        executor="processes",
    )
    return resolve(
        config,
        model,
        free_memory_bytes=free,
        num_cores=len(os.sched_getaffinity(0)),
        shared_memory_refusal=refusal(parallel.world_size, free),
        model_path="made-up",
    )


def create_made_up_rank(
    resolved: ResolvedConfig,
    global_rank: int,
    world: World,
    on_progress: Callable[[int, int], None] | None = None,
    *,
    watch: RankWatch | None = None,
) -> RankWorker:
    """A rank with random weights and a full pool; arguments as of `WorkerFactory`."""
    source = MemorySource(random_weights(resolved.model))
    worker = RankWorker(resolved, global_rank, world, on_progress, source=source, watch=watch)
    for rows in worker.store.tensors:
        rows.normal_()
    return worker


def random_weights(model: ModelConfig) -> dict[str, torch.Tensor]:
    """A checkpoint of a Llama whose rows keep their size.

    Args:
        model: grouped-query attention, tied embeddings.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(outputs: int, inputs: int) -> torch.Tensor:
        return torch.randn(outputs, inputs, generator=generator).div_(inputs**0.5)

    width, inner = model.hidden_size, model.intermediate_size
    queries = model.num_query_heads * model.head_dim
    keys = model.num_kv_heads * model.head_dim
    found = {
        "model.embed_tokens.weight": drawn(model.vocab_size, width),
        "model.norm.weight": torch.ones(width),
    }
    for layer in range(model.num_layers):
        place = f"model.layers.{layer}"
        found |= {
            f"{place}.self_attn.q_proj.weight": drawn(queries, width),
            f"{place}.self_attn.k_proj.weight": drawn(keys, width),
            f"{place}.self_attn.v_proj.weight": drawn(keys, width),
            f"{place}.self_attn.o_proj.weight": drawn(width, queries),
            f"{place}.mlp.gate_proj.weight": drawn(inner, width),
            f"{place}.mlp.up_proj.weight": drawn(inner, width),
            f"{place}.mlp.down_proj.weight": drawn(width, inner),
            f"{place}.input_layernorm.weight": torch.ones(width),
            f"{place}.post_attention_layernorm.weight": torch.ones(width),
        }
    return found
