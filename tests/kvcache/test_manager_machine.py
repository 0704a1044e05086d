"""Random lives of sequences over a tiny pool: content, counts and donors at every moment."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from heddle.errors import KVCacheFull
from tests.kvcache.fake_rows import FakeRows, rows_of
from tests.kvcache.test_manager import make_cache


class Sequence:
    """A live sequence: its tokens, its chain and how far it has got."""

    def __init__(self, chain, tokens, num_computed):
        self.chain, self.tokens, self.num_computed = chain, tokens, num_computed


class ManagerMachine(RuleBasedStateMachine):
    @initialize(ranks=st.integers(1, 3), block_size=st.integers(1, 2), num_blocks=st.integers(3, 9))
    def make(self, ranks, block_size, num_blocks):
        self.cache = make_cache(num_blocks, ranks=ranks, block_size=block_size)
        self.unit = ranks * block_size
        self.rows = FakeRows(num_blocks, self.unit)
        self.live = []
        self.copied = {}  # source -> its rows when the copy was scheduled

    def pick(self, data):
        return data.draw(st.sampled_from(self.live))

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10))
    def start(self, tokens):
        chain = self.cache.new_chain()
        hit = self.cache.fitting(self.cache.lookup(chain, tokens), len(tokens))
        if hit is None:
            return
        assert hit.num_tokens < len(tokens)
        before = self.cache.num_available_blocks
        self.cache.start(chain, hit, len(tokens))
        new = chain.block_table[len(hit.blocks) :]
        assert before - self.cache.num_available_blocks >= len(new)
        self.rows.spoil(new)
        if hit.num_copied:
            self.copied[hit.copy_source] = list(self.rows.rows[hit.copy_source])
        self.live.append(Sequence(chain, tokens, hit.num_tokens))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def run_step(self, data):
        """A step in which each sequence computes some of its rows, and may draw a token after."""
        self.rows.edit(*self.cache.take_edits())
        written = []
        for sequence in self.live:
            rest = len(sequence.tokens) - sequence.num_computed
            count = data.draw(st.integers(0, rest))
            start = sequence.num_computed
            table = sequence.chain.block_table
            written += self.rows.write(table, sequence.tokens, start, start + count)
            sequence.num_computed += count
        assert len(written) == len(set(written)), "two sequences wrote into one block"
        assert not set(written) & set(self.copied), "a donor was written"
        for source, rows in self.copied.items():
            assert self.rows.rows[source] == rows
        self.copied.clear()
        for sequence in self.live:
            self.cache.commit(sequence.chain, sequence.tokens, sequence.num_computed)
        self.cache.end_step()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def extend(self, data, token):
        sequence = self.pick(data)
        table = list(sequence.chain.block_table)
        try:
            self.cache.grow(sequence.chain, len(sequence.tokens) + 1)
        except KVCacheFull:
            assert sequence.chain.block_table == table
            return
        self.rows.spoil(sequence.chain.block_table[len(table) :])
        sequence.tokens = [*sequence.tokens, token]

    @precondition(lambda self: self.live and not self.copied)
    @rule(data=st.data(), quarantine=st.booleans())
    def end(self, data, quarantine):
        sequence = self.pick(data)
        self.live.remove(sequence)
        if quarantine:
            self.cache.quarantine(sequence.chain)
        else:
            self.cache.release(sequence.chain, sequence.tokens, sequence.num_computed)

    @rule()
    def reset(self):
        self.cache.reset_prefix_cache()

    @precondition(lambda self: not self.copied)
    @rule()
    def drain(self):
        for sequence in self.live:
            self.cache.release(sequence.chain, sequence.tokens, sequence.num_computed)
        self.live.clear()
        self.cache.audit([])
        assert self.cache.num_available_blocks == self.cache.num_usable_blocks

    @invariant()
    def counts_and_content_agree(self):
        if not hasattr(self, "cache"):
            return
        self.cache.audit([sequence.chain for sequence in self.live])
        held = {block for sequence in self.live for block in sequence.chain.block_table}
        held |= set(self.copied)
        assert self.cache.num_available_blocks == self.cache.num_usable_blocks - len(held)
        if self.copied:
            return  # rows of a copy arrive with the next step
        for sequence in self.live:
            count = sequence.num_computed
            rows = self.rows.read(sequence.chain.block_table, count)
            assert rows == rows_of(sequence.tokens)[:count]


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=80, stateful_step_count=40)
