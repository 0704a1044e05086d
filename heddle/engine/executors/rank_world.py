"""How a rank process meets the others: in the memory that the driver gave it, or over gloo.

Either way the other ranks learn at once when this one fails: it says so in the shared memory, or
its connections end with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from heddle.engine.executors.messages import Start

if TYPE_CHECKING:  # torch is imported once the process is set up
    from heddle.comm.base import World


@contextmanager
def create_rank_world(start: Start, segment: int | None) -> Iterator[World]:
    """The world of a rank, left at the end.

    Args:
        start: says which rank this is.
        segment: descriptor of shared memory; None: gloo.
    Raises:
        RankFailed: the ranks do not come together in time.
    """
    parallel, limit = start.resolved.parallel, start.resolved.group_timeout_seconds
    if segment is None:
        from heddle.comm.torch_group import create_torch_world

        over_gloo = create_torch_world(
            rank=start.global_rank,
            world_size=parallel.world_size,
            store_path=os.path.join(start.store_directory, "store"),
            timeout_seconds=limit,
            longest_wait_seconds=start.resolved.step_timeout_seconds,
            interface="lo" if sys.platform == "linux" else "lo0",
        )
        yield over_gloo
        over_gloo.destroy()
        return
    from heddle.comm.shared_memory.world import create_shared_world

    shared = create_shared_world(
        rank=start.global_rank,
        world_size=parallel.world_size,
        descriptor=segment,
        timeout_seconds=limit,
    )
    try:
        yield shared
    except BaseException as error:
        shared.abort(error)
        raise
    shared.destroy()
