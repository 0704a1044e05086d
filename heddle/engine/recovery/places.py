"""Open sequences, and who of them is computed now.

    all may run         each is queued with its replica
    A is on trial       A's sequences are queued, all others are held

Nothing of a step is accounted for before all its ranks agree. So new ranks need nothing but this
list: each sequence is queued once more, as after a preemption, with the outputs that were told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from heddle.engine.answer import Answer
from heddle.engine.recovery.suspects import Suspects
from heddle.engine.replica import Replica
from heddle.engine.request_state import RequestState
from heddle.scheduler.progress import Progress
from heddle.scheduler.request import Request
from heddle.step.build import BadWordIds


@dataclass(frozen=True, slots=True)
class Place:
    """Where the tokens of a sequence go."""

    state: RequestState
    answer: Answer
    replica: Replica
    bad_words: BadWordIds

    @property
    def sequence(self) -> Request:
        """As the scheduler knows it."""
        return self.state.sequences[self.answer.index]

    @property
    def progress(self) -> Progress:
        """Of a sequence that waits for the end of trials."""
        num_total = self.sequence.num_prompt_tokens
        return Progress(
            num_computed=0, num_total=num_total, num_cached=0, num_ahead=0, is_running=False
        )


class Places(Mapping[int, Place]):
    """By id of the sequence, in the order in which they came.

    Args:
        suspects: say who may run.
    """

    def __init__(self, suspects: Suspects) -> None:
        self._suspects = suspects
        self._places: dict[int, Place] = {}
        self._held: set[int] = set()

    def __getitem__(self, sequence_id: int) -> Place:
        return self._places[sequence_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def must_move(self) -> bool:
        """Others may run than do; once no step is under way, `seat` is due."""
        return self._suspects.has_moved

    @property
    def num_held(self) -> int:
        """Sequences that wait for the end of trials."""
        return len(self._held)

    def held(self) -> Iterator[Place]:
        """Of those that wait for the end of trials, in the order in which they came."""
        return (self._places[number] for number in sorted(self._held))

    def add(self, sequence_id: int, place: Place) -> None:
        """Queue a new sequence, or let it wait."""
        self._enqueue(place)
        self._places[sequence_id] = place

    def remove(self, sequence: Request) -> None:
        """Let go of a sequence that has ended; a second call does nothing."""
        place = self._places.pop(sequence.request_id, None)
        self._held.discard(sequence.request_id)
        if place is not None:
            place.replica.forget(sequence)

    def requests_under_way(self, replicas: Sequence[Replica]) -> list[str]:
        """Requests in the steps that have not ended, oldest first."""
        numbers = {r.request_id for replica in replicas for r in replica.requests_under_way()}
        ids = (place.state.request_id for n, place in self._places.items() if n in numbers)
        return list(dict.fromkeys(ids))

    def seat(self) -> None:
        """Queue those who may run, and no others; no step is under way."""
        for number, place in self._places.items():
            if number not in self._held:
                place.replica.withdraw(place.sequence)
        self._seat_all()

    def move(self, replicas: Sequence[Replica], now: float) -> None:
        """Queue those who may run with other replicas, which hold nothing.

        Args:
            replicas: by index.
            now: monotonic seconds, for what is left of pins.
        """
        for number, place in self._places.items():
            place.state.renew_pin(now)
            replica = replicas[place.replica.index]
            self._places[number] = dataclasses.replace(place, replica=replica)
        self._seat_all()

    def _seat_all(self) -> None:
        self._held.clear()
        for place in self._places.values():
            self._enqueue(place)
        on_trial = self._suspects.on_trial
        self._suspects.seat(
            number for number, place in self._places.items() if place.state.request_id == on_trial
        )

    def _enqueue(self, place: Place) -> None:
        """Give a sequence to its replica, or let it wait for the end of trials."""
        if self._suspects.may_run(place.state.request_id):
            place.replica.admit(place.sequence, place.bad_words, place.answer.matcher)
        else:
            self._held.add(place.sequence.request_id)
