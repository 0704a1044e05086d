"""Executors one after another: each is made like the last one, once its ranks have failed.

What survives them is made once: the launcher, a process that has imported all that a rank needs, so
that new ranks are there in the time that their weights take. What they rely on is looked at again:
that the checkpoint is the one that the first ranks loaded, and that there is room.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path

from heddle.config.engine import ResolvedConfig
from heddle.engine.executors.base import Executor, RankProgress
from heddle.engine.executors.launch_info import LaunchInfo
from heddle.engine.executors.launcher import RankLauncher, modules_to_warm
from heddle.engine.recovery.loaded_files import Marks, marks_of, model_files, what_changed
from heddle.engine.room import check_room_again
from heddle.errors import ModelFileError

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
        self._loaded: Marks | None = None
        self.closing = threading.Event()
        """Set, by any thread, when no ranks are wanted any more; see `create_executor`."""

    def next(self, resolved: ResolvedConfig, on_progress: RankProgress | None = None) -> Executor:
        """An executor, not started; the one before it is closed.

        Raises:
            ConfigError: see `create_executor`; or there is no room for it beside what is left of
                those before it.
            ModelFileError: the checkpoint is not the one that the first executor was made for.
        """
        found = marks_of(model_files(Path(resolved.model_path)))
        if self._loaded is None:
            self._loaded = found
        else:
            _check_same(self._loaded, found)
            if resolved.executor == "threads":  # one that hangs cannot be ended
                gc.collect()
                check_room_again(resolved)
        executor = self._create(
            resolved,
            launch=self._launch,
            on_progress=on_progress,
            launcher=self._warm_launcher(resolved) if resolved.executor == "processes" else None,
            closing=self.closing,
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


def _check_same(loaded: Marks, found: Marks) -> None:
    change = what_changed(loaded, found)
    if change:
        raise ModelFileError(
            f"the checkpoint is not the one that the engine was started with ({change}); ranks "
            "that failed are not started anew, for they would go on with other weights; start the "
            "engine again"
        )
