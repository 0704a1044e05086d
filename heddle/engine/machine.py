"""A configuration meets this machine: the model is found, free memory and cores are measured, and
what calls and arithmetic cost here is looked up.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os

from heddle.comm.shared_memory.segment import refusal as shared_memory_refusal
from heddle.config.engine import EngineConfig, ResolvedConfig
from heddle.config.folders import check_cache_dir
from heddle.engine.executors.launch_info import LaunchInfo
from heddle.engine.measured_costs import choose_costs
from heddle.engine.room import free_memory_bytes
from heddle.layout.resolve import resolve
from heddle.models.config_json import load_model_config
from heddle.models.sources import resolve_model_path


def resolve_here(config: EngineConfig, launch: LaunchInfo | None = None) -> ResolvedConfig:
    """Replace every `auto`, once, for this machine.

    Args:
        config: what the user asked for.
        launch: what a launcher told this process; with it, `auto` means the launched ranks.
    Raises:
        ConfigError, TopologyError: a setting or the layout is not legal.
        ModelFileError, UnsupportedError: the model cannot be read or run.
    """
    if launch is not None and config.executor == "auto":
        config = dataclasses.replace(config, executor="torchrun")
    path = str(resolve_model_path(config.model))
    free_memory = free_memory_bytes()
    num_cores = len(os.sched_getaffinity(0))
    ranks_on_host = None if launch is None else launch.local_world_size
    refusal = shared_memory_refusal(config.parallel.world_size, free_memory)
    if config.executor == "ray":
        from heddle.engine.executors.ray_executor import survey_hosts  # the package may be absent

        hosts = survey_hosts(config)
        num_cores = min(num_cores, hosts.num_cores)
        free_memory = min(free_memory, hosts.free_memory_bytes or free_memory)
        ranks_on_host, refusal = hosts.ranks_on_host, hosts.refusal or refusal
    resolved = resolve(
        config,
        load_model_config(path, config.hf_overrides, config.model_impl),
        free_memory_bytes=free_memory,
        num_cores=num_cores,
        ranks_on_host=ranks_on_host,
        has_numba=importlib.util.find_spec("numba") is not None,
        shared_memory_refusal=refusal,
        cuda_graphs_refusal=_cuda_graphs_refusal() if config.cuda_graphs else None,
        model_path=path,
    )
    if resolved.kernels == "numba":
        check_cache_dir()
    costs, why = choose_costs(
        config.link_costs,
        cpu_comm_backend=resolved.cpu_comm_backend,
        deterministic=config.deterministic,
    )
    return dataclasses.replace(resolved, link_costs=costs, reasons=(*resolved.reasons, why))


def _cuda_graphs_refusal() -> str | None:
    from heddle.kernels.recording.cuda_graphs import refusal  # these import torch
    from heddle.runner.worker import COMPUTE_DEVICE

    return refusal(COMPUTE_DEVICE)


def serve_launched_rank(config: EngineConfig, launch: LaunchInfo) -> None:
    """Be one of the launched ranks other than 0; returns when the driver says so.

    Args:
        config: as the driver's.
        launch: of this process.
    Raises:
        HeddleError: see `resolve_here` and `serve_rank`.
    """
    from heddle.engine.executors.torchrun import serve_rank  # imports torch

    serve_rank(resolve_here(config, launch), launch)
