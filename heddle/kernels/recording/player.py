"""Who computes the passes over a rank's layers that look like earlier ones.

Recordings   notes launches on the CPU, and launches them again together
Graphs       has a CUDA device capture a pass, and launches it again as one
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch

from heddle.kernels.recording.inputs import Input
from heddle.step.batch import RecordingUse


class Player(Protocol):
    """Keeps passes by what they look like."""

    num_repeated: int
    """Passes that were launched again."""

    @property
    def has_fixed_sizes(self) -> bool:
        """Rows are padded to a few counts, and plans of paged attention have a table per row, so
        that looks do not depend on how many requests there are.
        """
        ...

    def num_rows(self, num_rows: int, unlike: Callable[[], str | None]) -> int | None:
        """Rows that a step is to compute, pads included; None: it is computed anew, as it is.

        Args:
            num_rows: COPY rows of the step.
            unlike: tells why it is like no other step; None: it may be like some.
        """
        ...

    def run(
        self, key: Hashable, inputs: Sequence[Input], compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """The result of a pass.

        Args:
            key: passes of equal keys do the same things to inputs of equal shapes and types.
            inputs: everything it reads that may differ between passes of a key.
            compute: the pass.

        Returns:
            A tensor that may be overwritten by the next pass.
        """
        ...

    def use_since(self, num_repeated: int) -> RecordingUse:
        """What a step tells of them.

        Args:
            num_repeated: as it was when the step began.
        """
        ...
