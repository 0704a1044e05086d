"""What a server says once, when it is ready: what runs, with what, where, and how much fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from heddle import __version__
from heddle.config.engine import EngineConfig, ResolvedConfig
from heddle.engine.replica import Replica
from heddle.layout.mesh import GROUP_KINDS
from heddle.server.config import SECRETS, ServerConfig
from heddle.step.topology import Topology

MIB = 1 << 20


def startup_lines(
    config: EngineConfig,
    settings: ServerConfig,
    plan: ResolvedConfig,
    replicas: Sequence[Replica],
    *,
    phases: Mapping[str, float],
    predicted: Mapping[int, Mapping[str, int]],
    resident: Sequence[int],
    routes: Sequence[str],
    socket: str,
    url: str,
) -> list[str]:
    """The lines, in the order in which they are written.

    Args:
        config: as it was asked for.
        settings: of the server.
        plan: what runs.
        replicas: with their pools.
        phases: seconds of each phase of the start-up, in order.
        predicted: bytes of each part of a rank's memory, by rank; empty: not known.
        resident: measured bytes of each rank's process; empty: not known.
        routes: paths that are served.
        socket: where the server listens.
        url: where clients find it.
    """
    cache = replicas[0].cache
    num_tokens = sum(r.cache.num_usable_blocks * r.cache.virtual_block_size for r in replicas)
    window = plan.scheduler.max_model_len
    return [
        f"heddle {__version__}, model {config.model} ({plan.model.architecture})",
        f"settings: {', '.join(changed_settings(config, settings)) or 'all defaults'}",
        f"listening on {socket}",
        *plan_lines(plan),
        "phases: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in phases.items()),
        *_memory_lines(predicted, resident),
        f"KV cache size: {num_tokens} tokens",
        f"Maximum concurrency for {window} tokens per request: {num_tokens / window:.2f}x",
        f"longest prompt: {min(window - 1, cache.usable_tokens)} tokens",
        _prefix_line(plan, cache.virtual_block_size),
        f"routes: {' '.join(routes)}",
        f"ready at {url}",
    ]


def changed_settings(config: EngineConfig, settings: ServerConfig) -> list[str]:
    """`name=value` of each setting that is not its default; secrets as a count."""
    found = [*_changes(config, skipped=("model",)), *_changes(settings)]
    return [f"{name}={_shown(name, value)}" for name, value in found]


def plan_lines(plan: ResolvedConfig) -> list[str]:
    """Degrees, groups, and the reason of each choice."""
    topology, parallel = Topology.from_resolved(plan), plan.parallel
    mesh = topology.mesh
    kinds = GROUP_KINDS if topology.has_expert_parallel else GROUP_KINDS[:-1]
    degrees = (
        f"TP {parallel.tensor_parallel_size}, PCP {parallel.prefill_context_parallel_size}, "
        f"DCP {parallel.decode_context_parallel_size}, PP {parallel.pipeline_parallel_size}, "
        f"DP {parallel.data_parallel_size}"
    )
    lines = [
        f"plan: {degrees}; {mesh.world_size} ranks, executor {plan.executor}, backend "
        f"{plan.backend}, kernels {plan.kernels}, dtype {plan.dtype}, KV {plan.kv_cache_dtype}"
    ]
    groups = [(kind, mesh.groups(kind)) for kind in kinds if mesh.group_size(kind) > 1]
    lines += [
        f"{kind} groups: " + " ".join(str(list(members)) for members in found)
        for kind, found in groups
    ]
    return lines + [f"chosen: {reason}" for reason in plan.reasons]


def _memory_lines(
    predicted: Mapping[int, Mapping[str, int]], resident: Sequence[int]
) -> Iterator[str]:
    """One line per rank; ranks without either number have none."""
    for rank in sorted({*predicted, *range(len(resident))}):
        parts = predicted.get(rank, {})
        texts = [f"{name} {size / MIB:.1f}" for name, size in parts.items() if size]
        if parts:
            texts.append(f"predicted {sum(parts.values()) / MIB:.1f}")
        if rank < len(resident):
            texts.append(f"measured {resident[rank] / MIB:.1f} with interpreter and libraries")
        yield f"memory of rank {rank}, MiB: {', '.join(texts)}"


def _prefix_line(plan: ResolvedConfig, unit: int) -> str:
    if not plan.cache.enable_prefix_caching:
        return "prefix cache: off"
    return f"prefix cache: blocks of {unit} tokens"


def _changes(config: object, skipped: Sequence[str] = ()) -> Iterator[tuple[str, object]]:
    assert dataclasses.is_dataclass(config)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in skipped or value == _default(field):
            continue
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _changes(value)
        else:
            yield field.name, value


def _default(field: dataclasses.Field[object]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _shown(name: str, value: object) -> str:
    if name in SECRETS:
        return f"({len(value) if isinstance(value, tuple) else 1} hidden)"
    return str(value)
