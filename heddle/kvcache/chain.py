"""The blocks of one sequence in one cache group, and the names of what they hold.

block_table  [ 0   6   9 ]     V = 4, 10 tokens computed; 0: nobody will read that block again
tokens        0-3 4-7 8-9.
keys         [k0  k1]          keys of full blocks; tokens only grow, so a key stays true
num_registered 2               leading blocks that were offered to the prefix index
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from heddle.kvcache.children import Tokens
from heddle.kvcache.keys import chain_key


@dataclass(slots=True)
class BlockChain:
    """Owned by a sequence; changed by its `GroupCache` alone."""

    root: bytes
    block_table: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    num_registered: int = 0
    num_holes: int = 0
    """Zeros in the table."""
    num_reserved: int = 0
    """Blocks that it may have at once without asking; 0 where every block is asked for."""

    @property
    def num_held(self) -> int:
        """Blocks of the table."""
        return len(self.block_table) - self.num_holes

    def parent_key(self, index: int) -> bytes:
        """Key of everything before block `index`; its blocks' keys must be known."""
        return self.keys[index - 1] if index else self.root

    def learn_key(self, index: int, tokens: Tokens) -> None:
        """Note the key of full block `index`, which all before it have."""
        if index == len(self.keys):
            self.keys.append(chain_key(self.parent_key(index), tokens))

    def learn_keys(self, tokens: Sequence[int], unit: int, end: int) -> None:
        """Note the keys of all blocks that are full at position `end`."""
        for index in range(len(self.keys), end // unit):
            self.learn_key(index, block_tokens(tokens, index, unit, end))

    def clear(self) -> None:
        """No blocks any more; keys stay true."""
        self.block_table, self.num_registered, self.num_holes = [], 0, 0


def block_tokens(tokens: Sequence[int], index: int, size: int, end: int) -> Tokens:
    """Tokens of block `index`, cut at position `end`.

    Example:
        >>> block_tokens([7, 8, 9], index=1, size=2, end=3)
        (9,)
    """
    return tuple(tokens[index * size : min((index + 1) * size, end)])
