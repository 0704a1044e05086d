"""Batches that ranks work on, oldest first.

A pipeline has a batch in each stage. A request is in at most one of them: its next rows need the
token of the last ones. They end in the order in which they were submitted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from heddle.scheduler.batch import ScheduledBatch
from heddle.scheduler.request import Request


class Flight:
    """What is under way."""

    def __init__(self) -> None:
        self._batches: deque[ScheduledBatch] = deque()
        self._request_ids: set[int] = set()

    def __len__(self) -> int:
        return len(self._batches)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._request_ids

    @property
    def head(self) -> ScheduledBatch | None:
        """The batch that ends next."""
        return self._batches[0] if self._batches else None

    @property
    def num_partial(self) -> int:
        """Prompts under way that will be part-way through."""
        return sum(not part.samples for batch in self._batches for part in batch.parts)

    def requests(self) -> Iterator[Request]:
        """All requests under way."""
        return (part.request for batch in self._batches for part in batch.parts)

    def submit(self, batch: ScheduledBatch) -> None:
        """A batch goes to the ranks; none of its requests is under way."""
        self._batches.append(batch)
        self._request_ids.update(part.request.request_id for part in batch.parts)

    def end_head(self) -> None:
        """The oldest batch has ended on all ranks."""
        for part in self._batches.popleft().parts:
            self._request_ids.remove(part.request.request_id)
