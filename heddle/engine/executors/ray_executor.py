"""Ranks as processes on the nodes of a Ray cluster: Ray says where, and no step goes through it.

The driver is the one of `processes`, with the same frames to the same rank processes; an actor
beside each starts it on its node (`ray_host`). Ranks that all live on the driver's node share
memory; ranks of several nodes talk over gloo.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from heddle.comm.shared_memory.segment import create_segment
from heddle.config.engine import EngineConfig
from heddle.engine.executors.messages import Start
from heddle.engine.executors.processes import ProcessesExecutor
from heddle.engine.executors.ranks import Ranks
from heddle.engine.executors.ray_cluster import join_cluster
from heddle.engine.executors.ray_nodes import Hosts, describe_hosts, place_ranks
from heddle.engine.executors.ray_ranks import RayRanks
from heddle.errors import RankFailed


def survey_hosts(config: EngineConfig) -> Hosts:
    """What a configuration must know of the nodes that its ranks will live on.

    Raises:
        UnsupportedError, ConfigError: see `join_cluster` and `place_ranks`.
    """
    nodes = join_cluster().nodes()
    cpus = 1 if config.num_threads is None else max(config.num_threads, 1)
    return describe_hosts(place_ranks(nodes, config.parallel.world_size, cpus))


class RayExecutor(ProcessesExecutor):
    """One process per rank, on nodes of a Ray cluster; nothing of them is left after `close`."""

    def _create_ranks(self, labels: Sequence[str]) -> Ranks:
        resolved, cluster = self._resolved, join_cluster()
        placed = place_ranks(cluster.nodes(), self.world_size, resolved.num_threads)
        segment = None
        if resolved.cpu_comm_backend == "shm":
            if refusal := describe_hosts(placed).refusal:
                raise RankFailed(f"the Ray cluster has changed since it was surveyed: {refusal}")
            segment = create_segment(self.world_size)
        return RayRanks(labels, cluster, placed, resolved.num_threads, segment)

    def _start_of(self, rank: int, folder: str) -> Start:
        start = super()._start_of(rank, folder)
        ranks = self._running()
        assert isinstance(ranks, RayRanks)
        return msgspec.structs.replace(start, rendezvous=ranks.rendezvous)
