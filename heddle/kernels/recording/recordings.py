"""Recordings by what their passes look like."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch

from heddle.kernels.recording.recording import Input, Recording

MAX_RECORDINGS = 64
"""Passes of different looks that are kept; the one that was not asked for longest goes first."""

MAX_REFUSALS = 8
"""Kinds of passes that were refused, after which no further kind is tried."""


class Recordings:
    """A pass is recorded when its key is met for the second time, and repeated from then on.

    Args:
        num_threads: of a launch of several kernels.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_repeated = 0
        """Passes that were repeated."""
        self.refusals: dict[Hashable, str] = {}
        """Why a pass is computed anew each time."""
        self._num_threads = num_threads
        self._kept: OrderedDict[Hashable, Recording | None] = OrderedDict()

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
        key = (key, *[(i.shape, i.dtype) for i in inputs if isinstance(i, torch.Tensor)])
        if key in self.refusals or len(self.refusals) >= MAX_REFUSALS:
            return compute()
        if key not in self._kept:
            self._keep(key, None)  # many passes are met only once
            return compute()
        recording = self._kept[key]
        self._kept.move_to_end(key)
        if recording is not None:
            self.num_repeated += 1
            return recording.repeat(inputs)
        recording = Recording(inputs, self._num_threads)
        result = recording.record(compute)
        if recording.refusal is None:
            self._keep(key, recording)
        else:
            del self._kept[key]
            self.refusals[key] = recording.refusal
        return result

    def _keep(self, key: Hashable, recording: Recording | None) -> None:
        self._kept[key] = recording
        if len(self._kept) > MAX_RECORDINGS:
            self._kept.popitem(last=False)
