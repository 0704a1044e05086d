"""KV storage without tensors: a row is a name of all tokens up to it, so wrong content is visible.

A row really depends on every token before it and on nothing else; so here it is a chained hash, and
a block that holds another prompt's rows, another group's, or stale ones, never compares equal. The
same names stand for recurrent states.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from heddle.kvcache.copies import CacheEdits
from heddle.kvcache.groups import GroupSpec
from heddle.kvcache.sequence import SequenceBlocks
from tests.support.visible import seen_by

Row = int | str
GARBAGE = "garbage"
ZERO = "zero"
NO_TOKENS = 0
"""The state before the first token."""


def rows_of(tokens: Sequence[int], name: Row = NO_TOKENS) -> list[Row]:
    """The right row of each position, after a prefix of this name."""
    rows: list[Row] = []
    for token in tokens:
        name = hash((name, token))
        rows.append(name)
    return rows


def state_of(tokens: Sequence[int]) -> Row:
    """The right state after all of these tokens."""
    return rows_of(tokens)[-1] if tokens else NO_TOKENS


class FakeRows:
    """Rows of each block: one per position that a virtual block of its group covers."""

    def __init__(self, num_blocks: int, groups: Sequence[GroupSpec], num_slots: int = 0) -> None:
        self.groups = list(groups)
        self.rows: list[dict[int, Row]] = [{} for _ in range(num_blocks)]
        self.owners = [-1] * num_blocks  # group whose rows lie there
        self.states: list[Row] = [GARBAGE] * num_slots

    def spoil(self, blocks: Iterable[int]) -> None:
        """What was in newly allocated blocks is not to be relied on."""
        for block in blocks:
            self.rows[block], self.owners[block] = {}, -1

    def edit(self, edits: CacheEdits) -> None:
        """Wipes, then copies, as ranks do before the first write of a step."""
        for block in edits.wiped_blocks:
            self.rows[block], self.owners[block] = {}, -1
        copies = edits.copies
        assert not {c.source_block for c in copies} & {c.target_block for c in copies}
        for copy in copies:
            unit = self.groups[copy.group].unit
            assert copy.start % unit == 0
            assert copy.start < copy.end <= copy.start + unit
            assert self.owners[copy.source_block] == copy.group
            source = self.rows[copy.source_block]
            self.rows[copy.target_block] = {
                at: source.get(at, GARBAGE) for at in range(copy.end - copy.start)
            }
            self.owners[copy.target_block] = copy.group
        for source_slot, target_slot in edits.state_copies:
            assert target_slot > 0
            self.states[target_slot] = self.states[source_slot]

    def write(
        self, blocks: SequenceBlocks, tokens: Sequence[int], start: int, end: int
    ) -> set[int]:
        """Compute positions [start, end); returns the blocks that were written."""
        written = set()
        right = rows_of(tokens[:end])
        for group, spec in enumerate(self.groups):
            table = blocks.block_tables[group]
            for position in range(start, end):
                block = table[position // spec.unit]
                assert block, "a row has no block to be written to"
                if self.owners[block] != group:
                    self.rows[block], self.owners[block] = {}, group
                self.rows[block][position % spec.unit] = right[position]
                written.add(block)
            seen = {
                at for position in range(start, end) for at in seen_by(spec.visibility, position)
            }
            self.check(group, table, right, seen)
        return written

    def run_state(
        self, blocks: SequenceBlocks, tokens: Sequence[int], start: int, end: int, num_kept: int
    ) -> None:
        """Take the state from position `start` to `end`; keep those after the last rows."""
        use = blocks.state_use(num_kept)
        if use is None:
            return
        source, targets = use
        before = self.states[source] if source else NO_TOKENS
        assert before == state_of(tokens[:start]), "the state is not that of the prefix"
        assert len(set(targets)) == len(targets) == num_kept
        assert 0 not in targets
        for at, slot in enumerate(targets):
            self.states[slot] = state_of(tokens[: end - num_kept + 1 + at])

    def check(
        self, group: int, table: Sequence[int], right: Sequence[Row], positions: Iterable[int]
    ) -> None:
        """The rows of these positions are there, and are the right ones."""
        unit = self.groups[group].unit
        for position in positions:
            block = table[position // unit]
            assert block, f"position {position} is seen, and its block was given back"
            assert self.owners[block] == group, "another group has written here"
            assert self.rows[block].get(position % unit) == right[position], "not the prefix's row"

    def check_sequence(self, blocks: SequenceBlocks, tokens: Sequence[int], count: int) -> None:
        """All that the query at position `count` and later ones see before it is right."""
        right = rows_of(tokens[:count])
        for group, spec in enumerate(self.groups):
            seen = [at for at in seen_by(spec.visibility, count) if at < count]
            self.check(group, blocks.block_tables[group], right, seen)
