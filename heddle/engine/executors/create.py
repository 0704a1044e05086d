"""From the name of an executor to the executor."""

from __future__ import annotations

import logging
import threading

from heddle.config.engine import ResolvedConfig
from heddle.engine.executors.base import Executor, RankProgress
from heddle.engine.executors.launch_info import LaunchInfo
from heddle.engine.executors.launcher import RankLauncher
from heddle.errors import ConfigError

logger = logging.getLogger(__name__)


def create_executor(
    resolved: ResolvedConfig,
    *,
    on_progress: RankProgress | None = None,
    launch: LaunchInfo | None = None,
    launcher: RankLauncher | None = None,
    closing: threading.Event | None = None,
) -> Executor:
    """The executor that `resolved.executor` names, not started yet.

    Args:
        resolved: what will run; `executor` is `inline`, `threads`, `processes`, `ray` or
            `torchrun`.
        on_progress: told (rank, done, total) while weights load.
        launch: what a launcher told this process; `torchrun` needs it.
        launcher: warm, for rank processes, and left running; None: one of the executor's own.
        closing: set, by any thread, when the ranks of `threads` and `processes` are not wanted any
            more: a start that waits for them fails at once. None: they always are.
    Raises:
        ConfigError: the name is none of these, or there is no launcher.
    """
    if resolved.enable_fault_injection:
        logger.warning(
            "FAULT INJECTION IS ENABLED: THIS ENGINE FAILS ON PURPOSE; "
            "life %d of its ranks, faults: %s",
            resolved.epoch,
            "; ".join(map(str, resolved.faults)) or "none",
        )
    # Each kind is imported only when chosen: processes need no torch in the driver.
    if resolved.executor == "inline":
        from heddle.engine.executors.inline import InlineExecutor

        return InlineExecutor(resolved, on_progress=on_progress)
    if resolved.executor == "threads":
        from heddle.engine.executors.threads import ThreadsExecutor

        return ThreadsExecutor(resolved, on_progress=on_progress, closing=closing)
    if resolved.executor == "processes":
        from heddle.engine.executors.processes import ProcessesExecutor

        return ProcessesExecutor(
            resolved, on_progress=on_progress, launcher=launcher, closing=closing
        )
    if resolved.executor == "ray":
        from heddle.engine.executors.ray_executor import RayExecutor

        return RayExecutor(resolved, on_progress=on_progress)
    if resolved.executor == "torchrun":
        if launch is None:
            raise ConfigError(
                "executor=torchrun without a launcher; start under torchrun, which sets RANK and "
                "WORLD_SIZE, or use executor=processes"
            )
        from heddle.engine.executors.torchrun import TorchrunExecutor

        return TorchrunExecutor(resolved, launch, on_progress=on_progress)
    raise ConfigError(
        f"executor={resolved.executor} is not known; legal here: inline, threads, "
        "processes, ray, torchrun"
    )
