"""Recordings by what their passes look like."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch

from heddle.kernels.recording.inputs import Input
from heddle.kernels.recording.recording import Recording
from heddle.step.batch import RecordingUse

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
        self._num_kept = self._num_bytes = 0
        self._num_threads = num_threads
        self._kept: OrderedDict[Hashable, Recording | None] = OrderedDict()

    def use_since(self, num_repeated: int) -> RecordingUse:
        """See `Player.use_since`."""
        is_repeated = self.num_repeated > num_repeated
        return RecordingUse(is_repeated, self._num_kept, self._num_bytes)

    @property
    def has_fixed_sizes(self) -> bool:
        """See `Player.has_fixed_sizes`; on a CPU, arithmetic on pads costs more than it saves."""
        return False

    def num_rows(self, num_rows: int, unlike: Callable[[], str | None]) -> int | None:  # noqa: ARG002
        """See `Player.num_rows`; looks say by themselves what is like nothing else."""
        return num_rows

    def run(
        self, key: Hashable, inputs: Sequence[Input], compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """See `Player.run`."""
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
        self._count(recording, 1)
        if len(self._kept) > MAX_RECORDINGS:
            self._count(self._kept.popitem(last=False)[1], -1)

    def _count(self, recording: Recording | None, sign: int) -> None:
        """One comes or goes."""
        if recording is not None:
            self._num_kept += sign
            self._num_bytes += sign * recording.num_bytes
