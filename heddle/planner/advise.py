"""Two or three layouts for a workload, each with its reasons, its flags, and what it rules out.

    first token    the soonest first token
    throughput     the most output tokens a second
    room           the most tokens in the pools, among layouts whose gap is at most twice the best

Only finalists are looked at: layouts that serve as many of the requests at once as any, and of them
those that keep the targets, where some do. The ranges of a sheet move all layouts together, so two
layouts are compared at the same end: one is ahead if it is, by a tenth and more, at both ends and
in the middle. Where none is ahead, those that another of them beats in some other respect are left
out, and of the rest the simplest is named, and it is said.

What a layout rules out is said in words: lengths, concurrency, and what a later change would cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from heddle.config import ParallelConfig
from heddle.planner.batches import Rows
from heddle.planner.cost import CostModel
from heddle.planner.devices import EDGES, Edge
from heddle.planner.memory import PlannedEngine
from heddle.planner.search import Candidate, degree_flags
from heddle.planner.workload import Prediction, Workload, keeps

_SLACK = 2.0
_APART = 1.1
"""Ratio from which on one of two figures is ahead."""
_CHUNKS = tuple(1 << power for power in range(4, 15))


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One recommended layout."""

    roles: tuple[str, ...]
    """What it is best at."""
    candidate: Candidate
    ties: tuple[str, ...] = ()
    """Layouts that are predicted a little ahead and are less simple, in words."""


def recommend(candidates: Sequence[Candidate], load: Workload) -> list[Advice]:
    """Up to three layouts, each best at something, as far as can be told.

    Args:
        candidates: of a search; those without ends are no finalists.
        load: with its targets; where no layout keeps them, all are looked at.
    """
    serving = [(each, each.prediction) for each in candidates if each.prediction and each.ends]
    most = max((found.concurrency for _, found in serving), default=0)
    whole = [pair for pair in serving if pair[1].concurrency == most]
    keeping = [pair for pair in whole if keeps(pair[1], load)] or whole
    if not keeping:
        return []
    best_gap = min(found.tpot for _, found in keeping)
    near = [each for each, found in keeping if found.tpot <= _SLACK * best_gap]
    all_of_them = [each for each, _ in keeping]
    chosen: dict[int, tuple[Candidate, list[str], list[str]]] = {}
    for role, among in (("first token", all_of_them), ("throughput", all_of_them), ("room", near)):
        best = min(among, key=lambda each: (_ROLES[role](each, "mid"), _simplicity(each)))
        alike = [each for each in among if not is_ahead(best, each, role)]
        named = min((each for each in alike if not _is_beaten(each, alike)), key=_simplicity)
        _, roles, ties = chosen.setdefault(id(named), (named, [], []))
        roles.append(role)
        if named is not best:
            ties.append(_tie(best, named, role))
    return [
        Advice(roles=tuple(roles), candidate=named, ties=tuple(ties))
        for named, roles, ties in chosen.values()
    ]


_ROLES: dict[str, Callable[[Candidate, Edge], float]] = {
    "first token": lambda each, edge: each.ends[edge].ttft,
    "throughput": lambda each, edge: 1 / each.ends[edge].tok_s,
    "room": lambda each, _: 1 / max(each.engine.room.tokens_total, 1),
}
"""What is to be small."""


def is_ahead(one: Candidate, other: Candidate, role: str) -> bool:
    """One finalist is better than another by so much that it can be told.

    Args:
        one, other: finalists.
        role: a name of `_ROLES`.
    """
    value = _ROLES[role]
    return all(value(other, edge) >= _APART * value(one, edge) for edge in EDGES)


def _is_beaten(candidate: Candidate, others: Sequence[Candidate]) -> bool:
    """Another one is ahead in something, and behind in nothing that can be told."""
    return any(
        any(is_ahead(other, candidate, role) for role in _ROLES)
        and not any(is_ahead(candidate, other, role) for role in _ROLES)
        for other in others
    )


def _simplicity(candidate: Candidate) -> tuple[float, ...]:
    """Axes that are split, ranks of a replica, and how far each is split; small is simple."""
    each = candidate.parallel
    sizes = (
        each.tensor_parallel_size,
        each.prefill_context_parallel_size,
        each.decode_context_parallel_size,
        each.pipeline_parallel_size,
    )
    axes = sum(size > 1 for size in sizes) + each.enable_expert_parallel
    ranks = each.world_size // each.data_parallel_size
    return axes, ranks, *sizes[1:]


def _tie(best: Candidate, named: Candidate, role: str) -> str:
    value = _ROLES[role]
    by = value(named, "mid") / value(best, "mid") - 1
    return (
        f"{degree_flags(best.parallel)} is predicted {by:.0%} ahead for {role}, which is less than "
        "can be told at every end of the ranges: the simpler layout is named"
    )


def flags_of(engine: PlannedEngine) -> str:
    """The flags with which an engine is what was planned, whatever is free on its machine."""
    resolved = engine.resolved
    cache, scheduler = resolved.cache, resolved.scheduler
    words = [
        degree_flags(resolved.parallel),
        f"--dtype {resolved.dtype}",
        f"--kv-cache-dtype {resolved.kv_cache_dtype}",
        f"--block-size {cache.block_size}",
        f"--cp-kv-cache-interleave-size {resolved.parallel.kv_interleave_size}",
        f"--max-model-len {scheduler.max_model_len}",
        f"--max-num-seqs {scheduler.max_num_seqs}",
        f"--max-num-batched-tokens {scheduler.max_num_batched_tokens}",
        f"--kv-cache-memory-bytes {cache.kv_cache_memory_bytes}",
    ]
    return " ".join(words)


def why(candidate: Candidate, load: Workload) -> list[str]:
    """Reasons for a layout, with the figures that carry them."""
    engine, parallel = candidate.engine, candidate.parallel
    memory, room = engine.memory, engine.room
    lines = [
        f"weights take {_gb(memory.weights)} of {_gb(memory.device)} a rank and leave "
        f"{_gb(memory.kv_pool + memory.states)} for KV: {room.tokens_total:,} tokens in all"
    ]
    pcp, dcp = parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size
    if pcp > 1:
        rows = -(-engine.chunk // pcp)
        lines.append(f"prompt rows are split: {rows:,} of a chunk of {engine.chunk:,} on each rank")
    if dcp > 1:
        copies = f"{memory.kv_copies:g} times" if memory.kv_copies > 1 else "once"
        lines.append(
            f"each rank stores 1 of {dcp} tokens and reads as much in a decode step; an element of "
            f"the KV is kept {copies}"
        )
    if candidate.prediction is not None:
        lines += _speed_lines(candidate.prediction, load)
    return lines


def _speed_lines(found: Prediction, load: Workload) -> list[str]:
    lines = [
        f"first token after {found.ttft:.3g} s, {found.tpot * 1e3:.3g} ms between tokens, "
        f"{found.tok_s:,.0f} tokens a second with {found.concurrency} requests at once"
    ]
    for name, value, target in (
        ("first token", found.ttft, load.ttft),
        ("time between tokens", found.tpot, load.tpot),
    ):
        if target is not None:
            word = "keeps" if value <= target else "misses"
            lines.append(f"{word} the target of {target:g} s for the {name}")
    return lines


def rules_out(candidate: Candidate, load: Workload) -> list[str]:
    """What a layout cannot do, or makes dearer."""
    engine, parallel = candidate.engine, candidate.parallel
    found = [*_length_limits(engine, load), *_concurrency_limits(candidate, load)]
    found += _shape_limits(parallel, engine)
    return found


def _length_limits(engine: PlannedEngine, load: Workload) -> list[str]:
    room, lines = engine.room, []
    if room.longest_prompt < room.window - 1:
        lines.append(
            f"prompts above {room.longest_prompt:,} tokens: the pool is smaller than the window of "
            f"{room.window:,}"
        )
    elif load.num_tokens > room.window:
        lines.append(f"requests above the window of {room.window:,} tokens")
    return lines


def _concurrency_limits(candidate: Candidate, load: Workload) -> list[str]:
    fitting = candidate.engine.concurrency(load.num_tokens)
    lines = [f"more than {fitting:,} requests of {load.num_tokens:,} tokens at once"]
    if candidate.prediction is None:
        lines = [f"requests of {load.num_tokens:,} tokens: none fits"]
    elif fitting < load.concurrency:
        lines.append(f"{load.concurrency - fitting:,} of {load.concurrency:,} requests would wait")
    idle = candidate.engine.settings.num_devices - candidate.num_devices
    return [*lines, f"the use of {idle} devices"] if idle else lines


def _shape_limits(parallel: ParallelConfig, engine: PlannedEngine) -> list[str]:
    lines = []
    pcp, dcp = parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size
    if pcp > 1:
        lines.append(
            f"a split of prompts below {2 * pcp} rows and of decode rows: {pcp} ranks compute "
            "copies, or some of them; from where on a split pays is said below"
        )
    if dcp > 1:
        lines.append(
            f"prefix hits below {engine.room.prefix_unit} shared tokens, and a stored cache of "
            "another DCP size or interleave"
        )
    if parallel.data_parallel_size > 1:
        lines.append("prefixes shared between replicas: each has a cache of its own")
    if parallel.pipeline_parallel_size > 1:
        lines.append("a faster single stream by its stages: they work on several chunks at once")
    if engine.memory.kv_copies > 1:
        lines.append(
            f"full use of the pools: an element of the KV is kept {engine.memory.kv_copies:g} times"
        )
    return lines


def largest_chunk(engine: PlannedEngine, load: Workload, gap: float) -> int | None:
    """Rows of the largest chunk that keeps the steps of running requests below a gap; None: none.

    Args:
        engine: planned; chunks above its own are not looked at.
        load: contexts and requests at once.
        gap: seconds.
    """
    model = CostModel(engine)
    count = max(load.concurrency // engine.parallel.data_parallel_size, 1)
    decodes = [Rows(load.prompt_len + load.output_len // 2, 1)] * (count - 1)

    def step(rows: int) -> float:
        return model.step([Rows(max(load.prompt_len - rows, 0), rows), *decodes]).seconds

    fitting = [rows for rows in _CHUNKS if rows <= engine.chunk and step(rows) <= gap]
    return max(fitting, default=None)


def interleave_reason() -> str:
    """Why an interleave of 1 is printed."""
    return (
        "interleave 1: ranks differ by one token at most; a larger one moves whole runs, and a "
        "stored cache is readable under the same interleave only"
    )


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
