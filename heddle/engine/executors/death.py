"""How a rank process makes sure that it does not outlive its driver.

Two means, because each alone has a gap: a pipe whose end of file is the driver's death works for
every descendant and on every system, but a thread must run to see it; the kernel's parent death
signal ends even a stopped process, but only follows the launcher, and only on Linux.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


class DeathWatch:
    """A thread that ends this process when the driver has died, whatever the main thread does."""

    def __init__(self, death: int) -> None:
        """Watch from now on.

        Args:
            death: read end of a pipe that nobody writes to; only the driver holds the other end.
        """
        self.clean_up = ""
        """Folder to remove then, or nothing."""
        threading.Thread(
            target=self._watch, args=(death,), name="heddle-death-watch", daemon=True
        ).start()

    def _watch(self, death: int) -> None:
        os.read(death, 1)
        if self.clean_up:
            shutil.rmtree(self.clean_up, ignore_errors=True)
        os._exit(1)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent, the launcher, ends; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
