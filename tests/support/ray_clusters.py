"""Clusters for tests of the Ray executor: a fake one always, real ones where Ray is installed.

A real cluster keeps to loopback, has no dashboard, reports nothing, and ends with its block.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_ray import FakeRay

HAS_RAY = importlib.util.find_spec("ray") is not None
STORE_BYTES = 80 << 20
LOOPBACK_ONLY = {
    # Else Ray takes the host's own address in place of 127.0.0.1.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
}


@dataclass(frozen=True)
class RunningCluster:
    """A cluster that this process has joined."""

    ray: Any
    num_nodes: int
    address: str
    """For other processes; empty if there is none."""

    @property
    def is_fake(self) -> bool:
        return isinstance(self.ray, FakeRay)

    @property
    def link(self) -> str:
        """What two ranks with a CPU each are connected by."""
        return "shm" if self.num_nodes == 1 else "gloo"


@contextmanager
def fake_cluster(cpus: Sequence[int]) -> Iterator[RunningCluster]:
    """A cluster without Ray."""
    fake = FakeRay(cpus)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ray", fake)
        patch.setitem(sys.modules, "ray.util.scheduling_strategies", fake.strategies)
        try:
            yield RunningCluster(fake, len(cpus), "")
        finally:
            for actor in fake.actors:
                actor.end()


@contextmanager
def real_cluster(cpus: Sequence[int], folder: Path) -> Iterator[RunningCluster]:
    """A cluster of Ray's own processes on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LOOPBACK_ONLY.items():
            patch.setenv(name, value)
        import ray
        from ray.cluster_utils import Cluster

        cluster = Cluster()
        try:
            for count in cpus:
                cluster.add_node(
                    num_cpus=count,
                    object_store_memory=STORE_BYTES,
                    node_ip_address="127.0.0.1",
                    include_dashboard=False,
                    temp_dir=str(folder),
                )
            ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
            yield RunningCluster(ray, len(cpus), cluster.address)
        finally:
            ray.shutdown()
            cluster.shutdown()
