"""Which node of a Ray cluster each rank lives on: decided from what the cluster has, before a rank
starts.

    nodes by CPUs, the driver's first -> as few as hold all ranks -> even shares, in order of rank

The first of these keeps ranks in shared memory where one host can hold them all; the last keeps
groups of neighbouring ranks (TP first) within a host. Totals are counted, not what is free at the
moment: the answer must be the same whenever it is asked. Ray itself waits until the CPUs are free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from heddle.errors import ConfigError, counted


class Node(NamedTuple):
    """A node of a cluster."""

    node_id: str
    address: str
    """Where the other nodes reach it."""
    cpus: int
    memory_bytes: int
    """What its processes may take together."""
    is_own: bool
    """The driver lives there."""


class Hosts(NamedTuple):
    """What the configuration must know of the nodes that ranks will live on."""

    ranks_on_host: int
    """Of the fullest node."""
    num_cores: int
    """Of the node with the fewest."""
    free_memory_bytes: int | None
    """Of the other node with the least; None: there is no other."""
    refusal: str | None
    """Why the ranks cannot share memory; None: all of them live on the driver's node."""


def place_ranks(nodes: Sequence[Node], world_size: int, cpus_per_rank: int) -> tuple[Node, ...]:
    """The node of each rank.

    Args:
        nodes: of the cluster.
        world_size: ranks to place.
        cpus_per_rank: CPUs that each will hold.
    Raises:
        ConfigError: the cluster is too small.
    Example:
        >>> a, b = Node("a", "10.0.0.1", 4, 0, True), Node("b", "10.0.0.2", 8, 0, False)
        >>> [node.node_id for node in place_ranks([b, a], 4, 1)]
        ['a', 'a', 'a', 'a']
        >>> [node.node_id for node in place_ranks([b, a], 5, 2)]
        ['a', 'a', 'b', 'b', 'b']
    """
    ordered = sorted(nodes, key=lambda node: (not node.is_own, -node.cpus, node.node_id))
    room = [node.cpus // cpus_per_rank for node in ordered]
    if sum(room) < world_size:
        asked = f"{counted(world_size, 'rank')} of {counted(cpus_per_rank, 'CPU')} each"
        cluster = f"{counted(len(nodes), 'node')} with {counted(sum(n.cpus for n in nodes), 'CPU')}"
        raise ConfigError(
            f"{asked} are not legal with executor=ray; the cluster has room for {sum(room)} of "
            f"them, on {cluster} (nearest: fewer ranks, a smaller num_threads)"
        )
    if room[0] < world_size <= max(room):  # another host than the driver's can hold them all
        return (ordered[room.index(max(room))],) * world_size
    num_nodes = next(size for size in range(1, len(room) + 1) if sum(room[:size]) >= world_size)
    shares = _even_shares(room[:num_nodes], world_size)
    return tuple(node for node, share in zip(ordered, shares, strict=False) for _ in range(share))


def _even_shares(room: Sequence[int], count: int) -> list[int]:
    """Split a count as evenly as the room of each allows; the sum of `room` is enough."""
    shares = [0] * len(room)
    for _ in range(count):
        least = min(
            (place for place in range(len(room)) if shares[place] < room[place]),
            key=lambda place: shares[place],
        )
        shares[least] += 1
    return shares


def describe_hosts(placed: Sequence[Node]) -> Hosts:
    """What follows from a placement.

    Args:
        placed: the node of each rank.
    Example:
        >>> a, b = Node("a", "10.0.0.1", 4, 9, True), Node("b", "10.0.0.2", 8, 7, False)
        >>> describe_hosts([a, a, b])._replace(refusal="")
        Hosts(ranks_on_host=2, num_cores=4, free_memory_bytes=7, refusal='')
        >>> describe_hosts([a, a, b]).refusal
        'Ray has placed ranks on 2 hosts'
    """
    used = set(placed)
    others = [node.memory_bytes for node in used if not node.is_own]
    refusal = f"Ray has placed ranks on {len(used)} hosts" if len(used) > 1 else None
    if refusal is None and others:
        refusal = "Ray has placed the ranks on another host than the driver's"
    return Hosts(
        ranks_on_host=max(placed.count(node) for node in used),
        num_cores=min(node.cpus for node in used),
        free_memory_bytes=min(others, default=None),
        refusal=refusal,
    )
