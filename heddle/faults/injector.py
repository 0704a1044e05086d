"""Which fault is due, and the faults of a whole process.

An injector belongs to one rank in one life. It is made only where rules were given, so a rank
without them asks nothing.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable, Collection, Iterable

from heddle.config.faults import STEP_PHASES, FaultRule

_RESUMED_SECONDS = 600.0
"""Who resumes a stopped rank to look at its stacks finds it asleep for this long."""


class Injector:
    """The rules of one rank that have not fired."""

    def __init__(self, rules: Iterable[FaultRule]) -> None:
        self._armed = list(rules)

    @property
    def reaches_layers(self) -> bool:
        """Some rule looks into the layers of a step, so these must be computed in Python."""
        return any(
            rule.phase in STEP_PHASES and rule.kind in ("process", "call", "data")
            for rule in self._armed
        )

    def due(
        self,
        kinds: Collection[str],
        phase: str,
        step: int,
        fits: Callable[[FaultRule], bool] | None = None,
    ) -> list[FaultRule]:
        """The rules that fire now; each is given out once, `poison_token` always.

        Args:
            kinds: of `FaultKind`; who asks carries these out.
            phase: where the rank stands.
            step: the one under way, or the last one; -1: none was.
            fits: only rules of which this holds; None: all.
        """
        found = [
            rule
            for rule in self._armed
            if rule.kind in kinds
            and rule.phase == phase
            and rule.step <= max(step, 0)
            and (fits is None or fits(rule))
        ]
        for rule in found:
            if rule.action != "poison_token":
                self._armed.remove(rule)
        return found


def create_injector(rules: Collection[FaultRule], rank: int, epoch: int) -> Injector | None:
    """The rules that concern a rank in a life; None: there are none.

    A rule for all ranks that reaches a rank by its number as well fires twice.
    """
    own = [rule for rule in rules if rule.concerns(rank, epoch)]
    return Injector(own) if own else None


def suffer(rule: FaultRule) -> None:
    """Carry out a fault of the process; may not return.

    Raises:
        RuntimeError: by the action `raise`.
    """
    value = rule.args[0] if rule.args else 0.0
    if rule.action == "raise":
        raise RuntimeError(f"injected by {rule}")
    if rule.action == "exit":
        os._exit(int(value))
    if rule.action == "abort":
        os.abort()
    if rule.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif rule.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(_RESUMED_SECONDS)
    elif rule.action == "sleep":
        time.sleep(value)
    elif rule.action == "spin_gil":
        ctypes.PyDLL(None).usleep(int(value * 1e6))  # PyDLL keeps the interpreter's lock
    elif rule.action == "fd_limit":
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (used, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
