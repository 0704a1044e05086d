"""State slots of sequences, and the snapshots that let others resume them.

    start        own slots; the snapshot of a hit is copied into the first
    each step    the current state moves on; at a unit border it is copied into a snapshot
    end          the current slot itself becomes the snapshot of the exact end

Copies are told to the ranks with the next step, in the order in which they were decided, so a slot
may be reused as soon as the copy out of it is noted.
"""

from __future__ import annotations

from collections.abc import Sequence

from heddle.kvcache.chain import BlockChain, block_tokens
from heddle.kvcache.sequence import SequenceStates
from heddle.kvcache.states import Prefix, StateLookup, StatePool


class StateCache:
    """The state slots of one pool; does nothing where there are none.

    Args:
        num_slots: slot 0 included; 0: the model has no recurrent layers.
        per_sequence: slots of a running sequence.
        unit: tokens between snapshots.
    """

    def __init__(self, num_slots: int, per_sequence: int, unit: int) -> None:
        assert not num_slots or num_slots > per_sequence, "one sequence must fit"
        self.is_used = num_slots > 0
        self.per_sequence = per_sequence
        self.unit = unit
        self._pool = StatePool(num_slots)
        self._copies: list[tuple[int, int]] = []

    @property
    def has_room(self) -> bool:
        """One more sequence can start."""
        return not self.is_used or self._pool.num_available >= self.per_sequence

    def new(self, root: bytes) -> SequenceStates:
        """States of a sequence that owns no slots yet."""
        return SequenceStates(BlockChain(root=root))

    def lookup(self, states: SequenceStates, tokens: Sequence[int]) -> StateLookup:
        """The snapshots of a prompt."""
        return StateLookup(self._pool, states.chain, self.unit, tokens)

    def start(self, states: SequenceStates, snapshot: int) -> None:
        """Give a sequence its slots and the state of a snapshot; 0: it starts from zeros."""
        if snapshot:
            states.used.append(self._pool.resume(snapshot))
        slots = self._pool.allocate(self.per_sequence)
        if snapshot in slots:  # the last snapshot there was: taken over, not copied
            slots.sort(key=lambda slot: slot != snapshot)
        elif snapshot:
            self._copies.append((snapshot, slots[0]))
        states.slots, states.has_state = slots, snapshot > 0

    def snapshot(self, states: SequenceStates, tokens: Sequence[int], num_computed: int) -> None:
        """Copy the current state aside, if it is news and a slot is free or evictable."""
        prefix = self._prefix(states, tokens, num_computed)
        if not self._pool.touch(prefix) and self._pool.num_available:
            (slot,) = self._pool.allocate(1)
            self._copies.append((states.slots[0], slot))
            self._pool.keep(slot, prefix)
            states.used.append(prefix)

    def end(
        self, states: SequenceStates, tokens: Sequence[int], num_computed: int, *, keeps: bool
    ) -> None:
        """Take a sequence's slots back; the current one becomes a snapshot if it `keeps` it."""
        slots = states.slots
        if keeps and states.has_state:
            self._pool.keep(slots[0], self._prefix(states, tokens, num_computed))
            slots = slots[1:]
        self._pool.give_back(slots)
        self._clear(states)

    def distrust(self, states: SequenceStates) -> None:
        """Take the slots back and forget every snapshot that the sequence used or made."""
        self._pool.forget(states.used)
        self._pool.give_back(states.slots)
        self._clear(states)

    def forget_all(self) -> None:
        """Drop all snapshots."""
        self._pool.forget_all()

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """(source, target) of copies for the next step, each told once."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def audit(self, sequences: Sequence[SequenceStates]) -> None:
        """Check that each slot is free, a snapshot, or owned by one of `sequences`.

        Raises:
            AssertionError: names what is wrong.
        """
        self._pool.audit([slot for states in sequences for slot in states.slots])

    def _prefix(self, states: SequenceStates, tokens: Sequence[int], end: int) -> Prefix:
        states.chain.learn_keys(tokens, self.unit, end)
        index = end // self.unit
        return Prefix(states.chain.parent_key(index), block_tokens(tokens, index, self.unit, end))

    def _clear(self, states: SequenceStates) -> None:
        states.slots, states.has_state = [], False
        states.used.clear()
