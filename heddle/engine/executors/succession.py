"""Executors one after another: each is made like the last one, once its ranks have failed.

What survives them is made once: the launcher, a process that has imported all that a rank needs, so
that new ranks are there in the time that their weights take.
"""

from __future__ import annotations

from collections.abc import Callable

from heddle.config.engine import ResolvedConfig
from heddle.engine.executors.base import Executor, RankProgress
from heddle.engine.executors.launch_info import LaunchInfo
from heddle.engine.executors.launcher import RankLauncher, modules_to_warm

RESTARTABLE = ("inline", "threads", "processes")
"""Executors whose ranks this process starts; those of a launcher or a cluster are started anew from
outside, together with the driver."""


class Succession:
    """Makes the executors of one engine.

    Args:
        create: see `create_executor`.
        watch: puts something between the driver and each executor; None: nothing.
        launch: what a launcher told this process.
    """

    def __init__(
        self,
        create: Callable[..., Executor],
        watch: Callable[[Executor], Executor] | None = None,
        launch: LaunchInfo | None = None,
    ) -> None:
        self._create, self._watch, self._launch = create, watch, launch
        self._launcher: RankLauncher | None = None

    def next(self, resolved: ResolvedConfig, on_progress: RankProgress | None = None) -> Executor:
        """An executor, not started; the one before it is closed.

        Raises:
            ConfigError: see `create_executor`.
        """
        executor = self._create(
            resolved,
            launch=self._launch,
            on_progress=on_progress,
            launcher=self._warm_launcher(resolved) if resolved.executor == "processes" else None,
        )
        return executor if self._watch is None else self._watch(executor)

    def close(self) -> None:
        """End the launcher; a second call does nothing."""
        if self._launcher is not None:
            self._launcher.close()

    def _warm_launcher(self, resolved: ResolvedConfig) -> RankLauncher:
        launcher = self._launcher
        if launcher is None or not launcher.is_alive or launcher.is_silent:
            self.close()
            backend = resolved.cpu_comm_backend or "gloo"  # unnamed: made without `resolve`
            launcher = RankLauncher(warm_modules=modules_to_warm(backend, resolved.kernels))
            self._launcher = launcher
        return launcher
