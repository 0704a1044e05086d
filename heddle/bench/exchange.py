"""What the collectives of a layout cost on this machine, beside what the plan believes they cost.

    believed = alpha + received bytes / beta        `heddle.config.link_costs`

Plans weigh ways of exchanging with that formula, so where the two columns differ by far, `heddle
doctor` should measure the constants anew.
"""

from __future__ import annotations

from typing import Any

from heddle.bench.exchange_rank import WORKER, ExchangeCase, exchange_cases, mesh_of
from heddle.config.engine import EngineConfig, ResolvedConfig
from heddle.engine.executors.base import Executor
from heddle.engine.executors.processes import ProcessesExecutor
from heddle.engine.executors.threads import ThreadsExecutor
from heddle.engine.machine import resolve_here
from heddle.errors import ConfigError
from heddle.step.batch import GlobalBatch
from heddle.step.traffic import Collective, cost_of


def measure_exchange(config: EngineConfig) -> dict[str, Any]:
    """Time every collective of every group of a layout.

    Args:
        config: layout, and how its ranks live; nothing of the model is loaded.
    Returns:
        `{engine..., collectives: [{group, ranks, op, bytes, seconds, believed_seconds}]}`; seconds
        are those of the slowest rank.
    Raises:
        ConfigError: the layout has one rank, replicas, or no group.
    """
    resolved = resolve_here(config)
    cases = exchange_cases(resolved)
    if not cases or resolved.parallel.data_parallel_size > 1:
        raise ConfigError(
            "this layout has no exchange to time; give one replica with -tp, -pcp or -dcp above 1 "
            "(nearest: -pcp 2 -dcp 2)"
        )
    with _create(resolved) as executor:
        seconds = [_run(executor, step) for step in range(len(cases))]
    rows = [_row(case, found, resolved) for case, found in zip(cases, seconds, strict=True)]
    return {
        "executor": resolved.executor,
        "cpu_comm_backend": resolved.cpu_comm_backend,
        "collectives": rows,
    }


def _create(resolved: ResolvedConfig) -> Executor:
    if resolved.executor == "threads":
        return ThreadsExecutor(resolved, worker=WORKER)
    if resolved.executor == "processes":
        return ProcessesExecutor(resolved, worker=WORKER)
    raise ConfigError(
        f"executor={resolved.executor} cannot be timed here; legal here: threads, processes"
    )


def _run(executor: Executor, step: int) -> float:
    batch = GlobalBatch(epoch=0, step=step, requests=())
    return max(reply.seconds for reply in executor.execute(batch, digest=0))


def _row(case: ExchangeCase, seconds: float, resolved: ResolvedConfig) -> dict[str, Any]:
    mesh, costs = mesh_of(resolved), resolved.link_costs
    call = Collective(case.op, case.kind, (case.num_bytes // 4,), "float32")
    received = cost_of([call], mesh).received_bytes
    return {
        "group": case.kind,
        "ranks": len(mesh.groups(case.kind)[0]),
        "op": case.op,
        "bytes": case.num_bytes,
        "seconds": seconds,
        "believed_seconds": costs.alpha + received / costs.beta,
    }
