"""How a rank process meets the others: in the memory that the driver gave it, or over gloo.

Either way the other ranks learn at once when this one fails: it says so in the shared memory, or
its connections end with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from heddle.engine.executors.interface import LOOPBACK, choose_interface
from heddle.engine.executors.launch_info import LaunchInfo
from heddle.engine.executors.messages import Start

if TYPE_CHECKING:  # torch is imported once the process is set up
    from heddle.comm.base import World
    from heddle.comm.torch_group import TorchWorld


@contextmanager
def create_rank_world(start: Start, segment: int | None) -> Iterator[World]:
    """The world of a rank, left at the end.

    Args:
        start: says which rank this is.
        segment: descriptor of shared memory; None: gloo.
    Raises:
        RankFailed: the ranks do not come together in time.
    """
    if segment is None:
        over_gloo = _create_gloo_world(start)
        yield over_gloo
        over_gloo.destroy()
        return
    from heddle.comm.shared_memory.world import create_shared_world

    shared = create_shared_world(
        rank=start.global_rank,
        world_size=start.resolved.parallel.world_size,
        descriptor=segment,
        timeout_seconds=start.resolved.group_timeout_seconds,
    )
    try:
        yield shared
    except BaseException as error:
        shared.abort(error)
        raise
    shared.destroy()


def _create_gloo_world(start: Start) -> TorchWorld:
    """Ranks of one host meet at a file; those of several where rank 0 listens."""
    from heddle.comm.torch_group import create_torch_world

    rendezvous, store_path = start.rendezvous, None
    world_size = start.resolved.parallel.world_size
    if rendezvous is None:
        store_path = os.path.join(start.store_directory, "store")
        interface: str | None = LOOPBACK
    else:
        os.environ |= {"MASTER_ADDR": rendezvous.address, "MASTER_PORT": str(rendezvous.port)}
        launch = LaunchInfo(
            rank=start.global_rank,
            world_size=world_size,
            local_world_size=1,
            master_address=rendezvous.address,
            interface=os.environ.get("GLOO_SOCKET_IFNAME"),
        )
        interface = choose_interface(launch)
    return create_torch_world(
        rank=start.global_rank,
        world_size=world_size,
        store_path=store_path,
        timeout_seconds=start.resolved.group_timeout_seconds,
        longest_wait_seconds=start.resolved.step_timeout_seconds,
        interface=interface,
    )
