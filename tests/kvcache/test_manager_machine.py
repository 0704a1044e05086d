"""Random lives of sequences over a tiny pool: content, counts and donors at every moment."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from heddle.config.visibility import Visibility
from heddle.errors import KVCacheFull, RequestError
from tests.kvcache.fake_rows import FakeRows
from tests.kvcache.test_manager import make_cache, spec

WINDOWS = st.sampled_from(
    [
        Visibility("window", 1),
        Visibility("window", 3),
        Visibility("window", 4, num_first=3),
        Visibility("chunk", 3),
    ]
)
MAX_ROWS = 4


class Sequence:
    """A live sequence: its tokens, what it owns, and how far it has got."""

    def __init__(self, blocks, tokens, num_computed):
        self.blocks, self.tokens, self.num_computed = blocks, tokens, num_computed


class ManagerMachine(RuleBasedStateMachine):
    @initialize(
        ranks=st.integers(1, 3),
        block_size=st.integers(1, 2),
        num_blocks=st.integers(3, 14),
        has_full=st.booleans(),
        windows=st.lists(st.tuples(WINDOWS, st.booleans()), max_size=2),  # (rule, is cut)
        states=st.sampled_from([0, 0, 1, 2, 3]),
        spare_states=st.integers(0, 3),
        unit=st.integers(1, 4),
        rotates=st.booleans(),
        caching=st.sampled_from([True, True, False]),
        pinned=st.integers(0, 5),
    )
    def make(
        self, ranks, block_size, num_blocks, has_full, windows, states, spare_states, unit,
        rotates, caching, pinned,
    ):  # fmt: skip
        groups = [spec(ranks=ranks, block_size=block_size)] * (has_full or not windows)
        groups += [spec(rule, ranks if is_cut else 1, block_size) for rule, is_cut in windows]
        num_slots = 1 + states + spare_states if states else 0
        self.cache = make_cache(
            num_blocks,
            groups=groups,
            max_step_rows=MAX_ROWS,
            caching=caching,
            num_state_slots=num_slots,
            states_per_sequence=max(states, 1),
            state_unit=unit,
            rotates=rotates,
            max_pinned_tokens=0 if states else min(pinned, num_blocks - 2) * groups[0].unit,
        )
        self.now = 0
        self.kept = []  # (tokens, how many of them, until)
        self.rows = FakeRows(num_blocks, groups, num_slots)
        self.live = []
        self.copied = {}  # source -> its rows when the copy was scheduled

    def pick(self, data):
        return data.draw(st.sampled_from(self.live))

    def tables(self, sequence):
        return [block for table in sequence.blocks.block_tables for block in table if block]

    def spoil_new(self, sequence, before):
        self.rows.spoil(set(self.tables(sequence)) - set(before))

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10))
    def start(self, tokens):
        blocks = self.cache.new_sequence()
        hit = self.cache.fitting(self.cache.lookup(blocks, tokens), len(tokens))
        if hit is None:
            if not self.live and not self.copied and self.cache.has_free_states:
                assert len(tokens) > self.cache.usable_tokens, "an empty pool refused what fits"
            return
        assert hit.num_tokens < len(tokens)
        cost, before = self.cache.start_cost(hit, len(tokens)), self.cache.num_available_blocks
        self.cache.start(blocks, hit, len(tokens))
        assert before - self.cache.num_available_blocks == cost
        sequence = Sequence(blocks, tokens, hit.num_tokens)
        self.spoil_new(sequence, {block for part in hit.groups for block in part.shared})
        for part in hit.groups:
            if part.num_copied:
                self.copied[part.copy_source] = dict(self.rows.rows[part.copy_source])
        self.live.append(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def run_step(self, data):
        """Each sequence computes some of its rows, the last ones as drafts that may be wrong."""
        plans = []
        for sequence in self.live:
            rest = len(sequence.tokens) - sequence.num_computed
            count = data.draw(st.integers(0, min(rest, MAX_ROWS)))
            if count:
                before = self.tables(sequence)
                self.cache.grow(sequence.blocks, sequence.num_computed + count)  # promised
                self.spoil_new(sequence, before)
                kept = data.draw(st.integers(1, min(count, self.cache.states_per_sequence)))
                plans.append((sequence, count, kept, data.draw(st.integers(0, kept - 1))))
        edits = self.cache.take_edits()
        self.rows.edit(edits)
        written = []
        for sequence, count, kept, _ in plans:
            start, end = sequence.num_computed, sequence.num_computed + count
            written += self.rows.write(sequence.blocks, sequence.tokens, start, end)
            self.rows.run_state(sequence.blocks, sequence.tokens, start, end, kept)
        assert len(written) == len(set(written)), "two sequences wrote into one block"
        assert not set(written) & set(self.copied), "a donor was written"
        for source, rows in self.copied.items():
            assert self.rows.rows[source] == rows
        self.copied.clear()
        for sequence, count, kept, accepted in plans:
            sequence.num_computed += count - kept + 1 + accepted
            self.cache.commit(sequence.blocks, sequence.tokens, sequence.num_computed, accepted)
        self.cache.end_step(edits.copies)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def extend(self, data, token):
        sequence = self.pick(data)
        before = self.tables(sequence)
        if sequence.num_computed + MAX_ROWS < len(sequence.tokens) + 1:
            return
        try:
            self.cache.grow(sequence.blocks, len(sequence.tokens) + 1)
        except KVCacheFull:
            assert self.tables(sequence) == before
            if self.live == [sequence] and not self.copied:
                assert len(sequence.tokens) + 1 > self.cache.usable_tokens
            return
        self.spoil_new(sequence, before)
        sequence.tokens = [*sequence.tokens, token]

    @precondition(lambda self: self.live and not self.copied)
    @rule(data=st.data(), quarantine=st.booleans(), has_state=st.booleans())
    def end(self, data, quarantine, has_state):
        sequence = self.pick(data)
        self.live.remove(sequence)
        if quarantine:
            self.cache.quarantine(sequence.blocks)
            self.kept.clear()  # some of it may be distrusted
        else:
            self.release(sequence, has_current_state=has_state)

    @precondition(lambda self: self.live and not self.copied)
    @rule(data=st.data(), seconds=st.integers(1, 4))
    def pin(self, data, seconds):
        sequence = self.pick(data)
        tokens = sequence.tokens[: data.draw(st.integers(1, len(sequence.tokens)))]
        before, available = self.cache.num_pinned_blocks, self.cache.num_available_blocks
        try:
            count = self.cache.pin(tokens, self.now + seconds)
        except RequestError:
            assert self.cache.num_pinned_blocks == before
            assert self.cache.num_available_blocks == available
            return
        assert 0 < count <= len(tokens)
        self.kept.append((tokens, count, self.now + seconds))

    @rule(seconds=st.integers(0, 4))
    def expire(self, seconds):
        self.now += seconds
        self.cache.expire_pins(self.now)
        self.kept = [entry for entry in self.kept if entry[2] > self.now]
        if not self.kept:
            assert self.cache.num_pinned_blocks == 0

    @invariant()
    def what_is_pinned_is_found(self):
        for tokens, count, _ in self.kept if hasattr(self, "cache") else ():
            found = self.cache.lookup(self.cache.new_sequence(), [*tokens, 7])
            assert found.num_tokens >= count

    def release(self, sequence, **options):
        self.cache.release(sequence.blocks, sequence.tokens, sequence.num_computed, **options)

    @rule()
    def reset(self):
        self.cache.reset_prefix_cache()
        self.kept.clear()
        assert self.cache.num_pinned_blocks == 0

    @precondition(lambda self: not self.copied)
    @rule()
    def drain(self):
        for sequence in self.live:
            self.release(sequence)
        self.live.clear()
        self.cache.audit([])
        kept = self.cache.num_pinned_blocks
        assert self.cache.num_available_blocks == self.cache.num_usable_blocks - kept

    @invariant()
    def counts_and_content_agree(self):
        if not hasattr(self, "cache"):
            return
        self.cache.audit([sequence.blocks for sequence in self.live])
        full = {
            block
            for sequence in self.live
            for group, table in zip(self.cache.groups, sequence.blocks.block_tables, strict=True)
            if group.visibility.is_full
            for block in table
        }
        windows = [
            chain.num_reserved
            for sequence in self.live
            for group, chain in zip(self.cache.groups, sequence.blocks.chains, strict=True)
            if not group.visibility.is_full
        ]
        available = self.cache.num_available_blocks
        assert available >= 0
        pins = list(self.cache._pins)  # which blocks they are is nobody's business but theirs
        assert len(pins) == self.cache.num_pinned_blocks
        full |= {block for block, at in pins if self.cache.groups[at].visibility.is_full}
        windows += [1 for _, at in pins if not self.cache.groups[at].visibility.is_full]
        if self.copied:
            return  # rows of a copy arrive with the next step
        assert available == self.cache.num_usable_blocks - len(full) - sum(windows)
        for sequence in self.live:
            self.rows.check_sequence(sequence.blocks, sequence.tokens, sequence.num_computed)

    @invariant()
    def window_blocks_have_one_use(self):
        if not hasattr(self, "cache"):
            return
        uses = Counter(
            (block, group)
            for sequence in self.live
            for group, table in enumerate(sequence.blocks.block_tables)
            for block in set(filter(None, table))
        )
        blocks = [block for block, _ in uses]
        assert len(set(blocks)) == len(blocks), "a page belongs to two groups"


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=80, stateful_step_count=40)
