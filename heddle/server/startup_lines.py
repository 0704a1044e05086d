"""What a server says once: what will run, with what, and how much fits; then, where it serves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from heddle import __version__
from heddle.config.engine import EngineConfig, ResolvedConfig
from heddle.engine.capacity import Capacity
from heddle.engine.executors.launch_info import LaunchInfo
from heddle.errors import counted
from heddle.layout.mesh import GROUP_KINDS
from heddle.server.config import SECRETS, ServerConfig, is_loopback
from heddle.step.topology import Topology

MIB = 1 << 20


def opening_lines(
    config: EngineConfig,
    settings: ServerConfig,
    plan: ResolvedConfig,
    predicted: Mapping[int, Mapping[str, int]],
) -> list[str]:
    """What is about to be loaded, before it is; in the order in which it is written.

    Args:
        config: as it was asked for.
        settings: of the server.
        plan: what will run.
        predicted: bytes of each part of a rank's memory, by rank; empty: not known.
    """
    window, capacity = plan.scheduler.max_model_len, Capacity.of(plan)
    stored = capacity.kv_tokens_total
    return [
        f"heddle {__version__}, model {config.model} ({plan.model.architecture})",
        f"settings: {', '.join(changed_settings(config, settings)) or 'all defaults'}",
        *plan_lines(plan),
        *(f"memory of rank {rank}, MiB: {_parts(parts)}" for rank, parts in predicted.items()),
        f"KV cache size: {counted(stored, 'token')}",
        f"Maximum concurrency for {counted(window, 'token')} per request: {stored / window:.2f}x",
        f"longest prompt: {counted(capacity.longest_prompt, 'token')}",
        _prefix_line(plan, capacity.prefix_unit),
    ]


def exposure_warnings(
    settings: ServerConfig, plan: ResolvedConfig, launch: LaunchInfo | None
) -> list[str]:
    """What others on the network could do; none where everything is on loopback.

    Args:
        settings: of the server.
        plan: what will run.
        launch: what a launcher told this process.
    """
    found = []
    if not (settings.is_loopback or settings.uds):
        if not settings.has_keys:
            found.append(f"{settings.host}: everybody who reaches this port may use it")
        if not settings.ssl_certfile:
            found.append(
                f"{settings.host}: keys and prompts travel in the clear; --ssl-certfile, or a "
                "proxy that speaks TLS"
            )
    address = None if launch is None else launch.master_address
    meets_elsewhere = address is not None and not is_loopback(address)
    if meets_elsewhere or (plan.executor == "ray" and plan.cpu_comm_backend != "shm"):
        found.append(
            "ranks of several hosts talk over torch.distributed, which neither authenticates nor "
            "encrypts: whoever reaches their ports can read and change what they compute; they "
            "belong on a private network"
        )
    return found


def closing_lines(
    resident: Sequence[int], routes: Sequence[str], url: str, sockets: Sequence[str] = ()
) -> list[str]:
    """What is told when it serves.

    Args:
        resident: measured bytes of each rank's process; empty: not known.
        routes: paths that are served.
        url: where clients find it.
        sockets: every address on which this process and its descendants listen.
    """
    measured = ", ".join(f"rank {rank} {size / MIB:.1f}" for rank, size in enumerate(resident))
    memory = f"memory measured, MiB, with interpreter and libraries: {measured}"
    return [
        *([memory] if resident else ()),
        *([f"all listening sockets: {', '.join(sockets)}"] if sockets else ()),
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
        f"plan: {degrees}; {counted(mesh.world_size, 'rank')}, executor {plan.executor}, backend "
        f"{plan.backend}, kernels {plan.kernels}, dtype {plan.dtype}, KV {plan.kv_cache_dtype}"
    ]
    groups = [(kind, mesh.groups(kind)) for kind in kinds if mesh.group_size(kind) > 1]
    lines += [
        f"{kind} groups: " + " ".join(str(list(members)) for members in found)
        for kind, found in groups
    ]
    return lines + [f"chosen: {reason}" for reason in plan.reasons]


def _parts(parts: Mapping[str, int]) -> str:
    texts = [f"{name} {size / MIB:.1f}" for name, size in parts.items() if size]
    return ", ".join([*texts, f"predicted {sum(parts.values()) / MIB:.1f}"])


def _prefix_line(plan: ResolvedConfig, unit: int) -> str:
    if not plan.cache.enable_prefix_caching:
        return "prefix cache: off"
    return f"prefix cache: blocks of {counted(unit, 'token')}"


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
