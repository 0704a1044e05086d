"""The block chains of one cache group.

    full attention   a start takes the blocks of all known tokens, growth asks the pool
    window           a start is promised what it can have at once and takes what its hit holds;
                     each step takes the blocks of its rows and, once it has ended, gives back
                     those that no query to come can see. They stay findable until evicted.

Legend: `V` virtual block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from heddle.kvcache.blocks import BlockPool
from heddle.kvcache.chain import BlockChain, block_tokens
from heddle.kvcache.groups import GroupSpec
from heddle.kvcache.hits import GroupHit
from heddle.kvcache.prefix import NO_BLOCK, Node
from heddle.kvcache.reservations import Reservations
from heddle.layout.cache_need import blocks_needed, first_needed_block, num_first_blocks


class GroupCache:
    """Takes blocks for chains of one group, names what they hold, and gives them back.

    Args:
        spec: of the group.
        pool: of all groups.
        reservations: of all groups; kept for window groups only.
        max_step_rows: most rows of one sequence in one step.
    """

    def __init__(
        self, spec: GroupSpec, pool: BlockPool, reservations: Reservations, max_step_rows: int
    ) -> None:
        self.spec = spec
        self._pool, self._reservations = pool, reservations
        self._max_step_rows = max_step_rows

    @property
    def promises(self) -> bool:
        """Blocks are promised at the start."""
        return not self.spec.visibility.is_full

    # Start and growth.

    def start_cost(self, hit: GroupHit, num_tokens: int) -> int:
        """Available blocks that a start would use up: promised ones, or new ones and hit ones that
        nobody owns.
        """
        if self.promises:
            # The source of a copy may lose its owners while the copy is under way.
            return self._promise(num_tokens) + bool(hit.num_copied)
        unowned = sum(not self._pool.references(block) for block in hit.shared)
        return self.spec.layout.num_virtual_blocks(num_tokens) - len(hit.blocks) + unowned

    def share(self, chain: BlockChain, hit: GroupHit, num_tokens: int) -> None:
        """First half of a start: the hit's blocks get an owner, so that nothing evicts them."""
        assert not chain.block_table, "a chain starts once"
        if self.promises:
            chain.num_reserved = self._promise(num_tokens)
            self._reservations.promise(chain.num_reserved)
        for block in hit.shared:
            self._pool.share(block)
        for block in filter(None, hit.blocks):
            self._note_held(block)
        if hit.num_copied:
            self.pin(hit.copy_source)
        chain.block_table = list(hit.blocks)
        chain.num_holes = hit.blocks.count(NO_BLOCK)
        chain.num_registered = len(hit.blocks)

    def extend(self, chain: BlockChain, num_tokens: int) -> None:
        """Take blocks up to `num_tokens` tokens; `growth_cost` of them are available."""
        if self.promises:
            extra = self.growth_cost(chain, num_tokens)
            chain.num_reserved += extra
            self._reservations.promise(extra)
        table = chain.block_table
        missing = self._missing(chain, num_tokens)
        if not missing:
            return  # as in most steps of a decode
        for block in self._pool.allocate(missing, after=_last(table)):
            table.append(block)
            self._note_held(block)

    def growth_cost(self, chain: BlockChain, num_tokens: int) -> int:
        """Available blocks that growth to `num_tokens` tokens would use up."""
        missing = self._missing(chain, num_tokens)
        if self.promises:
            return max(chain.num_held + missing - chain.num_reserved, 0)
        return missing

    # Content.

    def register(self, chain: BlockChain, tokens: Sequence[int], end: int) -> None:
        """Make blocks findable that are full at position `end`."""
        unit = self.spec.unit
        for index in range(chain.num_registered, end // unit):
            piece = block_tokens(tokens, index, unit, end)
            self._register(chain, index, piece)
            chain.learn_key(index, piece)
            chain.num_registered = index + 1

    def register_tail(self, chain: BlockChain, tokens: Sequence[int], end: int) -> None:
        """Make the rest of a chain findable, past its full blocks."""
        index = end // self.spec.unit
        tail = block_tokens(tokens, index, self.spec.unit, end)
        if tail:
            self._register(chain, index, tail)

    # Giving back.

    def trim(self, chain: BlockChain, num_computed_tokens: int, num_left: int) -> None:
        """After a step: give back what no query to come can see, and promises beyond need.

        Args:
            chain: of the sequence.
            num_computed_tokens: position of the next query.
            num_left: known tokens that are not computed.
        """
        if not self.promises:
            return
        rule, unit, table = self.spec.visibility, self.spec.unit, chain.block_table
        end = min(first_needed_block(rule, unit, num_computed_tokens), len(table))
        for index in range(num_first_blocks(rule, unit), end)[::-1]:
            if table[index] == NO_BLOCK:
                break  # what lies before it went in an earlier step
            self._give_back(table[index])
            table[index] = NO_BLOCK
            chain.num_holes += 1
        rows = min(max(num_left, 1), self._max_step_rows)
        need = blocks_needed(rule, unit, num_computed_tokens + max(num_left, 1), rows)
        self._promise_less(chain, max(need, chain.num_held))

    def drop(self, chain: BlockChain) -> None:
        """The chain has ended; what was registered stays findable until evicted."""
        # The tail is evicted before what it hangs on.
        for block in filter(None, reversed(chain.block_table)):
            self._give_back(block)
        self._promise_less(chain, 0)
        chain.clear()

    def quarantine(self, chain: BlockChain) -> None:
        """The chain has ended and is not to be trusted."""
        for block in filter(None, chain.block_table):
            self._pool.quarantine(block)
        self.drop(chain)

    def hold(self, block: int) -> None:
        """One more owner for a block that is owned or cached, which is no chain, until `unpin`."""
        self._pool.share(block)
        self.pin(block)

    def pin(self, block: int) -> None:
        """A shared block is the source of a copy until `unpin`."""
        if self.promises:
            self._reservations.promise(1)
            self._reservations.hold(block)

    def unpin(self, block: int) -> None:
        """The copy is done, or nobody holds the block any longer."""
        if self.promises:
            self._reservations.promise(-1)
        self._give_back(block)

    def held(self, chain: BlockChain) -> Iterator[int]:
        """Blocks of a chain that its promise covers."""
        return filter(None, chain.block_table) if self.promises else iter(())

    def _promise(self, num_tokens: int) -> int:
        rows = min(num_tokens, self._max_step_rows)
        return blocks_needed(self.spec.visibility, self.spec.unit, num_tokens, rows)

    def _promise_less(self, chain: BlockChain, count: int) -> None:
        if count < chain.num_reserved:
            self._reservations.promise(count - chain.num_reserved)
            chain.num_reserved = count

    def _missing(self, chain: BlockChain, num_tokens: int) -> int:
        return max(-(-num_tokens // self.spec.unit) - len(chain.block_table), 0)

    def _note_held(self, block: int) -> None:
        if self.promises:
            self._reservations.hold(block)

    def _give_back(self, block: int) -> None:
        if self.promises:
            self._reservations.let_go(block)
        self._pool.release(block)

    def _register(self, chain: BlockChain, index: int, piece: tuple[int, ...]) -> None:
        block = chain.block_table[index]
        if block != NO_BLOCK:
            node = Node(chain.parent_key(index), piece, is_first=index == 0)
            self._pool.register(block, node)


def _last(table: Sequence[int]) -> int | None:
    """The block whose successor would continue the table, if it still has one."""
    return table[-1] or None if table else None
