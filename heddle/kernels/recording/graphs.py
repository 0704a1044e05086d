"""Passes as graphs of a device, by what they look like.

Rows are padded to a few counts, so that few graphs serve every step. A pass is computed as it is
until two in a row have read the same memory (`PassWatch`); the next of its looks is captured, and
later ones are replayed. Buffers are the inputs of the captured pass: nothing is allocated after.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch

from heddle.kernels.recording.graph_pieces import GraphApi, GraphPieces
from heddle.kernels.recording.inputs import Input
from heddle.kernels.recording.pass_watch import PassWatch
from heddle.step.batch import RecordingUse

ROW_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Rows of a captured pass."""
MAX_GRAPHS = 64
"""Passes of different looks that are kept; the one that was not asked for longest goes first."""
MAX_WARM_UPS = 4
"""Passes of a key that may read new memory, as of constants that are made when first asked for."""


class Graphs:
    """A `Player` for devices that capture what is launched.

    Args:
        api: of the device.
        row_counts: ascending.
    """

    def __init__(self, api: GraphApi, row_counts: Sequence[int] = ROW_COUNTS) -> None:
        self.num_captured = 0
        self.num_repeated = 0
        self.eager: Counter[str] = Counter()
        """Why passes were computed as they are, and how many for each reason."""
        self._num_bytes = 0
        self._api = api
        self._row_counts = tuple(row_counts)
        self._refusals: dict[Hashable, str] = {}
        self._watched: dict[Hashable, _WarmUp] = {}
        self._captured: OrderedDict[Hashable, GraphPieces] = OrderedDict()

    @property
    def captured(self) -> tuple[GraphPieces, ...]:
        """The passes that are replayed."""
        return tuple(self._captured.values())

    @property
    def has_fixed_sizes(self) -> bool:
        """See `Player.has_fixed_sizes`."""
        return True

    def num_rows(self, num_rows: int, unlike: Callable[[], str | None]) -> int | None:
        """See `Player.num_rows`; the least count that is captured and fits."""
        reason = unlike()
        if reason is None and num_rows == 0:
            reason = "no rows"
        if reason is None and num_rows > self._row_counts[-1]:
            reason = f"more than {self._row_counts[-1]} rows"
        if reason is not None:
            self.eager[reason] += 1
            return None
        return min(count for count in self._row_counts if count >= num_rows)

    def run(
        self, key: Hashable, inputs: Sequence[Input], compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """See `Player.run`."""
        key = (key, *[(i.shape, i.dtype) for i in inputs if isinstance(i, torch.Tensor)])
        if key in self._refusals:
            self.eager[self._refusals[key]] += 1
            return compute()
        pieces = self._captured.get(key)
        if pieces is not None:
            self._captured.move_to_end(key)
            self.num_repeated += 1
            return pieces.repeat(inputs)
        if key in self._watched and self._watched[key].is_over:
            del self._watched[key]
            return self._capture(key, inputs, compute)
        return self._warm_up(key, inputs, compute)

    def use_since(self, num_repeated: int) -> RecordingUse:
        """See `Player.use_since`."""
        is_repeated = self.num_repeated > num_repeated
        return RecordingUse(is_repeated, len(self._captured), self._num_bytes)

    def _warm_up(
        self, key: Hashable, inputs: Sequence[Input], compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        watch = PassWatch(inputs)
        result = watch.watch(compute)
        self.eager["warm-up"] += 1
        refusal = self._watched.setdefault(key, _WarmUp()).add(watch)
        if refusal is not None:
            del self._watched[key]
            self._refusals[key] = refusal
        return result

    def _capture(
        self, key: Hashable, inputs: Sequence[Input], compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        pieces = GraphPieces(inputs, self._api)
        result = pieces.capture(compute)
        self.num_captured += 1
        self._num_bytes = self._api.num_bytes
        self._captured[key] = pieces
        if len(self._captured) > MAX_GRAPHS:
            self._captured.popitem(last=False)
        return result


class _WarmUp:
    """The passes of a key before one is captured."""

    def __init__(self) -> None:
        self.is_over = False
        self._last: PassWatch | None = None
        self._num_passes = 0

    def add(self, watch: PassWatch) -> str | None:
        """Why no pass of the key is ever captured; None: nothing is known against it."""
        self._num_passes += 1
        before, self._last = self._last, watch
        if watch.refusal is not None:
            return watch.refusal
        forgotten = None if before is None else watch.forgotten(before)
        self.is_over = before is not None and forgotten is None
        return forgotten if self._num_passes >= MAX_WARM_UPS else None
