"""The search for a prompt's longest known prefix, on one start rank, over all parts of a model."""

from __future__ import annotations

from collections.abc import Sequence

from heddle.kvcache.chain import BlockChain
from heddle.kvcache.groups import GroupSpec
from heddle.kvcache.hits import NoHit, PrefixHit
from heddle.kvcache.lookup import GroupLookup, PartLookup, longest_common
from heddle.kvcache.prefix import PrefixIndex
from heddle.kvcache.states import StateLookup


class PrefixSearch:
    """Asks every cache group, and the recurrent layers where there are some.

    Args:
        specs: of the cache groups.
        chains: of the sequence on the start rank, one per group; learn keys.
        index: what all blocks hold.
        states: the snapshots of the prompt; None without recurrent layers.
        state_unit: tokens between snapshots.
        tokens: of the prompt, at least one; the last is never hit.
        start_rank: `u` of the chains.
    """

    def __init__(
        self,
        specs: Sequence[GroupSpec],
        chains: Sequence[BlockChain],
        index: PrefixIndex,
        *,
        states: StateLookup | None,
        state_unit: int,
        tokens: Sequence[int],
        start_rank: int,
    ) -> None:
        self._specs, self._chains, self._index = specs, chains, index
        self._states, self._state_unit = states, state_unit
        self._tokens, self._limit = tokens, len(tokens) - 1
        self._start_rank = start_rank

    def find(self, *, whole_blocks: bool = False) -> PrefixHit:
        """The longest hit.

        Args:
            whole_blocks: True: none that needs a copy of a part of a block.
        """
        groups = [
            GroupLookup(
                spec, chain, self._index, self._tokens, self._limit, whole_blocks=whole_blocks
            )
            for spec, chain in zip(self._specs, self._chains, strict=True)
        ]
        parts: list[PartLookup] = [*groups]
        if self._states is not None:
            parts.append(self._states)
        end = longest_common(parts, self._limit)
        reason, num_dropped, unit = None, 0, self._specs[0].unit if groups else self._state_unit
        if not end:
            reason, num_dropped = self._why_nothing(groups)
            unit = self._state_unit if num_dropped else unit
        return PrefixHit(
            unit=unit,
            num_tokens=end,
            groups=tuple(lookup.hit(end) for lookup in groups),
            snapshot=self._states.find(end)[0] if self._states is not None and end else 0,
            start_rank=self._start_rank,
            reason=reason,
            num_dropped=num_dropped,
        )

    def _why_nothing(self, groups: Sequence[GroupLookup]) -> tuple[NoHit, int]:
        """The reason for no hit, and tokens that the groups share below the first snapshot."""
        shared = longest_common(groups, self._limit) if self._states is not None and groups else 0
        if 0 < shared < self._state_unit:
            return NoHit.BELOW_UNIT, shared
        for lookup, chain in zip(groups, self._chains, strict=True):
            # What full attention still has, a window or a snapshot has lost.
            is_left = lookup.is_full and lookup.best(self._limit) > 0
            if is_left or self._index.was_evicted(chain.root, lookup.first_tokens()):
                return NoHit.EVICTED, 0
        return NoHit.NOTHING_SHARED, 0
