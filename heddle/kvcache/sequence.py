"""All that one sequence owns in the cache: a block chain per cache group, and state slots.

A sequence that may start on several ranks (start-rank rotation) has a set of chains for each while
it looks for a hit; when it starts, the rank is chosen for life.

States of a sequence with `k` slots, drafts in the step:

    slots [a b c]     current a: the state after the computed tokens
    step of 3 rows    source a, targets a b c: the state after each of the last rows
    1 draft accepted  current b; the next step reads b and writes b c a
"""

from __future__ import annotations

from dataclasses import dataclass, field

from heddle.kvcache.chain import BlockChain
from heddle.kvcache.keys import COMMON, CacheScope
from heddle.kvcache.states import Prefix


@dataclass(slots=True)
class SequenceStates:
    """Recurrent state of a sequence."""

    chain: BlockChain
    """Names its prefixes at unit borders; it has no blocks."""
    slots: list[int] = field(default_factory=list)
    """Owned while it runs; the current one first."""
    has_state: bool = False
    """The current slot holds the state after the computed tokens; False: they are none."""
    used: list[Prefix] = field(default_factory=list)
    """Snapshots that it resumed or took."""

    def use(self, num_kept: int) -> tuple[int, tuple[int, ...]]:
        """(source, targets) of a step that keeps the states after its last `num_kept` rows."""
        return self.slots[0] if self.has_state else 0, tuple(self.slots[:num_kept])

    def advance(self, row: int) -> None:
        """The step has ended; the state after the `row`-th kept row is the current one."""
        self.slots = self.slots[row:] + self.slots[:row]
        self.has_state = True


@dataclass(slots=True, eq=False)
class SequenceBlocks:
    """Owned by a request; changed by `KVCacheManager` alone."""

    scope: CacheScope = COMMON
    candidates: dict[int, list[BlockChain]] = field(default_factory=dict)
    """By start rank: a chain per cache group. One entry once it has started."""
    start_rank: int = 0
    """`u` of its chains."""
    states: SequenceStates | None = None
    num_tokens: int = 0
    """Tokens that it has blocks for."""

    @property
    def chains(self) -> list[BlockChain]:
        """Its chain in each cache group."""
        return self.candidates.get(self.start_rank, [])

    @property
    def block_tables(self) -> tuple[list[int], ...]:
        """Per cache group: block ids in order of position; 0: nobody will read that block."""
        return tuple(chain.block_table for chain in self.chains)

    def state_use(self, num_kept: int) -> tuple[int, tuple[int, ...]] | None:
        """(source slot, target slots) of its next step, which keeps the states after its last
        `num_kept` rows; None without recurrent layers. Source 0 stands for zeros.
        """
        return None if self.states is None else self.states.use(num_kept)
