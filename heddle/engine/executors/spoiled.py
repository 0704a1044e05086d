"""Faults on purpose in what reaches a rank: steps that are lost, come twice, or in another order.

Only where rules wait for it; else a rank receives as it always does.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable

from heddle.engine.executors.messages import Step, ToRank
from heddle.faults.injector import Injector
from heddle.faults.watch import phase_of

OVERSIZED = struct.pack("<4sI", b"HDL\x01", 0xFFFFFFFF)
"""The head of a frame that no driver takes: it announces a body of 4 GiB."""


def spoiled(receive: Callable[[], ToRank], injector: Injector | None) -> Callable[[], ToRank]:
    """How a rank receives: as given, or past the faults that wait for it."""
    return receive if injector is None else SpoiledMessages(receive, injector).receive


class SpoiledMessages:
    """Of one rank."""

    def __init__(self, receive: Callable[[], ToRank], injector: Injector) -> None:
        self._receive = receive
        self._injector = injector
        self._waiting: deque[ToRank] = deque()
        self._held: Step | None = None

    def receive(self) -> ToRank:
        """The next message that gets through."""
        while not self._waiting:
            message = self._receive()
            self._waiting.append(message)
            if isinstance(message, Step):
                self._spoil(message)
            elif self._held is not None:
                self._held = None  # nothing came that it could change places with
        return self._waiting.popleft()

    def _spoil(self, message: Step) -> None:
        if self._held is not None:
            self._waiting.append(self._held)
            self._held = None
        phase = phase_of(message.batch)
        for rule in self._injector.due(("message",), phase, message.batch.step):
            if rule.action == "dup_header":
                self._waiting.append(message)
            else:
                self._waiting.pop()
                self._held = message if rule.action == "swap_headers" else None
                return
