"""What an engine needs of this host beside its settings, looked at before anything starts.

    memory         weights of all ranks here, and their pools
    descriptors    of the driver, for each rank
    a folder       for temporary files, in which ranks find each other

What is missing is named with its remedy, instead of a rank that dies of it a minute later.
"""

from __future__ import annotations

import resource
import tempfile
from pathlib import Path

import psutil

from heddle.config.engine import ResolvedConfig
from heddle.engine.executors.launch_info import LaunchInfo
from heddle.errors import ConfigError, counted
from heddle.layout.cache_rows import DTYPE_BYTES
from heddle.models.weights.stored import describe_stored

DESCRIPTORS_PER_RANK = 12
"""Channel, output, end and stacks of a rank, the page on which it says where it stands, and as
many again while it is being started."""
SPARE_DESCRIPTORS = 40
"""Files and sockets of the driver itself, and its helpers."""
_CONTROL_GROUP = Path("/sys/fs/cgroup")
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def free_memory_bytes(control_group: Path = _CONTROL_GROUP) -> int:
    """Memory that this process and its children may still take.

    Args:
        control_group: folder of the container's limits, where the system has them.
    """
    free = int(psutil.virtual_memory().available)
    try:
        most = (control_group / "memory.max").read_text().strip()
        used = int((control_group / "memory.current").read_text())
        # Pages of files count as used and are given back when they are needed.
        kept = (control_group / "memory.stat").read_text().split()
        idle_files = int(kept[kept.index("inactive_file") + 1])
    except (OSError, ValueError, IndexError):  # no container, or one of another kind
        return free
    return free if most == "max" else max(0, min(free, int(most) - used + idle_files))


def check_room(resolved: ResolvedConfig, launch: LaunchInfo | None = None) -> None:
    """See that an engine has what it needs on this host.

    Args:
        resolved: what would run.
        launch: what a launcher told this process.

    Raises:
        ConfigError: something is missing; with the remedy.
        ModelFileError, UnsupportedError: memory is scarce, and the checkpoint cannot be weighed.
    """
    _check_descriptors(needed_descriptors(resolved))
    if resolved.executor == "processes":
        _check_temporary_folder()
    # Of ranks on several hosts each host has a part; which one, is not known here.
    is_whole = launch is None or launch.local_world_size == resolved.parallel.world_size
    if resolved.executor != "ray" and is_whole:
        _check_memory(resolved, free_memory_bytes())


def check_room_again(resolved: ResolvedConfig) -> None:
    """See that new ranks in threads have room. A thread that hangs keeps its weights and its pool
    until it returns, which may be never.

    Args:
        resolved: what would run.
    Raises:
        ConfigError: there is not enough memory; with the remedy.
    """
    needed, free_bytes = weigh_ranks(resolved), free_memory_bytes()
    if needed > free_bytes:
        raise ConfigError(
            f"ranks that failed are not started anew: weights and pools of "
            f"{counted(resolved.parallel.world_size, 'rank')} take {needed:,} bytes, and "
            f"{free_bytes:,} bytes of memory are free; a thread that hangs keeps its own; choose "
            "executor=processes, whose ranks can be ended, or a smaller kv_cache_memory_bytes"
        )


def needed_descriptors(resolved: ResolvedConfig) -> int:
    """Files and sockets that a driver has open."""
    num_ranks = resolved.parallel.world_size if resolved.executor == "processes" else 0
    return SPARE_DESCRIPTORS + DESCRIPTORS_PER_RANK * num_ranks


def raise_descriptor_limit(needed: int) -> None:
    """Let this process have so many files and sockets open; for programs, never for a library.

    Raises:
        ConfigError: it may not have so many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _is_below(soft, needed) and not _is_below(hard, needed):
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    _check_descriptors(needed)


def _check_descriptors(needed: int) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _is_below(limit, needed):
        raise ConfigError(
            f"this process may have {limit} files and sockets open, and {needed} are needed; "
            f"raise the limit (ulimit -n {needed}), or choose fewer ranks or max_connections"
        )


def _is_below(limit: int, needed: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < needed


def _check_temporary_folder() -> None:
    try:
        with tempfile.TemporaryDirectory(prefix="heddle-"):
            pass
    except OSError as error:  # also that no usable folder is found
        raise ConfigError(
            f"no folder for temporary files can be had ({error.strerror or error}); name one that "
            "can be written to (TMPDIR)"
        ) from error


def _check_memory(resolved: ResolvedConfig, free_bytes: int) -> None:
    if 2 * _roughly(resolved) < free_bytes:  # to weigh takes seconds
        return
    needed = weigh_ranks(resolved)
    if needed > free_bytes:
        parallel = resolved.parallel
        copies = parallel.data_parallel_size * parallel.prefill_context_parallel_size
        fewer = f"fewer than {copies} copies of the weights (-dp, -pcp), " if copies > 1 else ""
        raise ConfigError(
            f"weights and pools of {counted(parallel.world_size, 'rank')} take {needed:,} bytes in "
            f"{resolved.dtype}, and {free_bytes:,} bytes of memory are free; choose {fewer}a "
            "narrower dtype, a smaller kv_cache_memory_bytes, or a smaller model"
        )


def _roughly(resolved: ResolvedConfig) -> int:
    """About what is held: pools that were asked for, and by the headers of the files a copy of the
    weights for each rank that does not share one.
    """
    parallel = resolved.parallel
    width = DTYPE_BYTES[resolved.dtype]
    stored = describe_stored(Path(resolved.model_path)).type_bytes
    one_copy = sum(size // _FLOATS.get(kind, 1) * width for kind, size in stored.items())
    num_copies = parallel.data_parallel_size * parallel.prefill_context_parallel_size
    pool = resolved.cache.kv_cache_memory_bytes or 0
    return one_copy * num_copies + pool * parallel.world_size


def weigh_ranks(resolved: ResolvedConfig) -> int:
    """Weights and pools of all ranks, to the byte; the ranks are built without memory.

    Raises:
        ModelFileError, UnsupportedError: the checkpoint cannot be loaded.
    """
    from heddle.models.weights.open import open_weights  # these import torch
    from heddle.runner.weigh import distinct_ranks, weigh_rank

    source = open_weights(Path(resolved.model_path))
    total = 0
    for first, ranks in distinct_ranks(resolved).items():
        held = weigh_rank(resolved, first, source)
        total += len(ranks) * (held.weights + held.cache + held.states)
    return total
