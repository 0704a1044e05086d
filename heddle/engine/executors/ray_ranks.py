"""Rank processes on the nodes of a Ray cluster, seen from the driver as those of its own host are.

Their channels, lines and ends come over sockets (`ray_listener`, `ray_host`), so a step meets no
Ray; Ray is asked when an actor does not come, is gone, or is to give its rank's stacks.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

from heddle.engine.executors.failure import Failure
from heddle.engine.executors.launcher import RankHandle
from heddle.engine.executors.lifecycle import RanksFailed
from heddle.engine.executors.messages import Rendezvous
from heddle.engine.executors.ranks import Ranks
from heddle.engine.executors.ray_cluster import Cluster, RankHosts
from heddle.engine.executors.ray_listener import RankListener
from heddle.engine.executors.ray_nodes import Node
from heddle.errors import RankFailed, counted

_WHY_SECONDS = 5.0
"""How long Ray may take to find out why an actor is gone."""
_STACKS_SECONDS = 2.0


class RayRanks(Ranks):
    """N rank processes, each beside an actor of Ray."""

    def __init__(
        self,
        labels: Sequence[str],
        cluster: Cluster,
        placed: Sequence[Node],
        cpus_per_rank: int,
        segment: int | None,
    ) -> None:
        """Start nothing yet.

        Args:
            labels: one for each rank, for its lines of output.
            cluster: starts the actors.
            placed: the node of each rank.
            cpus_per_rank: that each actor holds.
            segment: descriptor of memory that all ranks share, closed here once they have it; only
                where all of them live on the driver's node.
        """
        super().__init__(labels)
        self._cluster, self._placed, self._cpus = cluster, tuple(placed), cpus_per_rank
        self._segment = segment
        self._hosts: RankHosts | None = None
        self.rendezvous: Rendezvous | None = None
        """Where ranks of several nodes meet, once launched; None on a single node."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids in order of rank; none where some live on other hosts."""
        return super().pids if all(node.is_own for node in self._placed) else ()

    def launch(self, deadline: float) -> None:
        """Have all processes started; see `Ranks.launch`."""
        is_local = all(node.is_own for node in self._placed)
        own = next((node.address for node in self._cluster.nodes() if node.is_own), "127.0.0.1")
        token = secrets.token_hex(32)
        try:
            listener = RankListener(None if is_local else own, token)
            self._resources.callback(listener.close)
            hosts = self._hosts = self._cluster.start_hosts(
                self._placed, self._cpus, listener.address, token
            )
            self._resources.callback(hosts.close)
            self._admit(listener, hosts, deadline)
            if not is_local:
                self.rendezvous = Rendezvous(self._placed[0].address, listener.rendezvous_port)
            listener.close()
        finally:
            if self._segment is not None:
                os.close(self._segment)
            self._relay.start()
        self._watch_all(deadline)

    def dump_stacks(self) -> dict[int, str]:
        """Stacks of every rank; see `Ranks.dump_stacks`."""
        return {} if self._hosts is None else self._hosts.stacks(_STACKS_SECONDS)

    def _admit(self, listener: RankListener, hosts: RankHosts, deadline: float) -> None:
        """Take up all ranks as their actors come."""

        def glance() -> None:
            if gone := hosts.ended():
                raise RanksFailed([_gone(rank, hosts.why(rank, _WHY_SECONDS)) for rank in gone])

        world_size = self._relay.num_ranks
        admitted = listener.admit_all(world_size, deadline, glance, self._segment)
        if admitted is None:
            late = f"Ray did not start its actor in time, with {counted(self._cpus, 'CPU')} on "
            raise RanksFailed(
                [_gone(rank, late + node.address) for rank, node in enumerate(self._placed)]
            )
        for rank in range(world_size):
            output = admitted[rank, "output"]
            self._relay.read_from(rank, output.fileno())
            output.close()
            handle = _RayHandle(rank, admitted[rank, "lifeline"], _asks(hosts, rank))
            self._resources.callback(handle.close)
            channel = admitted[rank, "channel"]
            self._resources.callback(channel.close)
            self._enlist(handle, channel)


class _RayHandle(RankHandle):
    """One rank process, at the other end of a lifeline."""

    def __init__(self, rank: int, lifeline: socket.socket, ask_why: Callable[[], str]) -> None:
        lifeline.setblocking(True)
        super().__init__(lifeline.fileno())
        self._rank, self._lifeline, self._ask_why = rank, lifeline, ask_why

    def read_pid(self, deadline: float) -> None:
        """Wait until the actor has started the process.

        Raises:
            RanksFailed: it has not; Ray is asked why.
        """
        try:
            super().read_pid(deadline)
        except (RankFailed, OSError):
            raise RanksFailed([_gone(self._rank, self._ask_why())]) from None

    def read_exit(self) -> None:
        """Take note of the end; Ray is asked where the actor is gone too."""
        with suppress(OSError):
            super().read_exit()
        self.is_gone = True
        if self.exit_code is None:
            self.why = self._ask_why()

    def signal(self, number: int) -> None:
        """End the process by letting go of it; other signals do not travel."""
        if number == signal.SIGKILL and not self.is_gone:
            with suppress(OSError):  # it lets go of us at this moment
                self._lifeline.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Give the lifeline back."""
        self._lifeline.close()


def _gone(rank: int, text: str) -> Failure:
    return Failure(rank=rank, text=text)


def _asks(hosts: RankHosts, rank: int) -> Callable[[], str]:
    return lambda: hosts.why(rank, _WHY_SECONDS)
