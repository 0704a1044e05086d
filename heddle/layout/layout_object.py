"""The `layout` object: the same ten keys wherever a layout is told as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from heddle.config import ParallelConfig


def layout_object(
    parallel: ParallelConfig, *, block_size: int, executor: str
) -> dict[str, int | str]:
    """A layout as data.

    Args:
        parallel: degrees and exchanges.
        block_size: tokens of a page on one rank.
        executor: where ranks live, or what was asked for.
    """
    return {
        "tp": parallel.tensor_parallel_size,
        "pcp": parallel.prefill_context_parallel_size,
        "dcp": parallel.decode_context_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "dp": parallel.data_parallel_size,
        "interleave": parallel.kv_interleave_size,
        "block_size": block_size,
        "exchange": parallel.dcp_comm_backend,
        "executor": executor,
        "world_size": parallel.world_size,
    }


def degrees_text(layout: Mapping[str, Any]) -> str:
    """The degrees of a layout in words; axes outside the plane only where they add ranks.

    Example:
        >>> degrees_text({"tp": 1, "pcp": 2, "dcp": 2, "pp": 3, "dp": 1})
        'tp 1 pcp 2 dcp 2 pp 3'
    """
    plane = " ".join(f"{axis} {layout[axis]}" for axis in ("tp", "pcp", "dcp"))
    outer = (f" {axis} {layout[axis]}" for axis in ("pp", "dp") if layout[axis] > 1)
    return plane + "".join(outer)
