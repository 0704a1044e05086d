"""A configuration meets this machine."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from heddle.config import EngineConfig, ParallelConfig
from heddle.config.link_costs import SHARED_MEMORY_COSTS, LinkCosts
from heddle.engine.executors.launch_info import LaunchInfo
from heddle.engine.machine import resolve_here
from heddle.engine.measured_costs import costs_path, store_costs
from heddle.errors import ConfigError, ModelFileError, TopologyError
from tests.support.tiny import build_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny(tmp_path_factory.mktemp("machine"), "llama-8-2"))


def test_one_rank_takes_the_cores_that_this_process_may_use(folder: str) -> None:
    resolved = resolve_here(EngineConfig(model=folder))
    assert resolved.num_threads == len(os.sched_getaffinity(0))
    assert (resolved.executor, resolved.model_path) == ("inline", folder)


def test_under_a_launcher_the_launched_ranks_are_used(folder: str) -> None:
    launch = LaunchInfo(rank=1, world_size=2, local_world_size=2)
    config = EngineConfig(model=folder, parallel=ParallelConfig(tensor_parallel_size=2))
    assert resolve_here(config, launch).executor == "torchrun"
    assert resolve_here(config).executor == "processes"


def test_constants_measured_here_are_used_and_said(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    resolved = resolve_here(EngineConfig(model=folder))
    assert resolved.link_costs == LinkCosts()
    assert "link costs: defaults" in resolved.reasons[-1]

    path = store_costs(LinkCosts(alpha=3e-5))
    resolved = resolve_here(EngineConfig(model=folder))
    assert resolved.link_costs == LinkCosts(alpha=3e-5)
    assert resolved.reasons[-1] == f"link costs: measured here, from {path}"

    pair = EngineConfig(model=folder, parallel=ParallelConfig(tensor_parallel_size=2))
    resolved = resolve_here(pair)  # of another link: not what was measured
    assert (resolved.cpu_comm_backend, resolved.link_costs) == ("shm", SHARED_MEMORY_COSTS)
    path = store_costs(LinkCosts(alpha=4e-6), costs_path("shm"))
    resolved = resolve_here(pair)
    assert resolved.link_costs == LinkCosts(alpha=4e-6)
    assert resolved.reasons[-1] == f"link costs: measured here, from {path}"
    resolved = resolve_here(dataclasses.replace(pair, cpu_comm_backend="gloo"))
    assert resolved.link_costs == LinkCosts(alpha=3e-5)

    resolved = resolve_here(EngineConfig(model=folder, link_costs=LinkCosts(alpha=1.0)))
    assert (resolved.link_costs.alpha, resolved.reasons[-1]) == (1.0, "link costs: as given")


def test_a_refused_layout_and_a_missing_model_are_refused_here(folder: str, tmp_path: Path) -> None:
    config = EngineConfig(model=folder, parallel=ParallelConfig(tensor_parallel_size=16))
    with pytest.raises(TopologyError, match="16"):
        resolve_here(config)
    with pytest.raises(ModelFileError, match="nowhere"):
        resolve_here(EngineConfig(model=str(tmp_path / "nowhere")))


def test_graphs_are_refused_here_as_ranks_compute_on_the_cpu(folder: str) -> None:
    with pytest.raises(
        ConfigError, match=r"cuda_graphs=True is not legal here: ranks compute on cpu .*nearest"
    ):
        resolve_here(EngineConfig(model=folder, cuda_graphs=True))
