"""Prefixes that stay findable for a while, whatever else needs room.

    cached --pin--> owned by the pin, too --until it expires--> cached, or owned by others alone

A pin is one more owner of each block that a prompt would find. No step evicts it and no preemption
frees it, so pins may have no more than a part of the pool that no request is promised: an admitted
request fits into the rest alone, and never has to wait for a pin to expire.

A block has one expiry, the latest that was asked for: pinning the same prefix again costs nothing.
Time is an argument. What is distrusted or forgotten is no longer pinned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from heddle.errors import ConfigError, RequestError, counted
from heddle.kvcache.blocks import BlockPool
from heddle.kvcache.group_cache import GroupCache
from heddle.kvcache.hits import PrefixHit


class _Pinned(NamedTuple):
    group: int
    until: float


class PrefixPins:
    """Blocks that are kept, and until when.

    Args:
        pool: of all groups.
        group_caches: that the blocks belong to.
        max_blocks: most blocks that are kept at once.
    """

    def __init__(
        self, pool: BlockPool, group_caches: Sequence[GroupCache], max_blocks: int
    ) -> None:
        self._pool, self._group_caches = pool, tuple(group_caches)
        self.max_blocks = max_blocks
        self._pinned: dict[int, _Pinned] = {}
        self._first_expiry = float("inf")

    def __len__(self) -> int:
        return len(self._pinned)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(block, cache group) of each block that is kept."""
        return ((block, pinned.group) for block, pinned in self._pinned.items())

    def keep(self, hit: PrefixHit, until: float, num_available: int) -> None:
        """Keep the blocks of a hit.

        Args:
            hit: with nothing allocated since it was found.
            until: seconds of the clock that `expire` is told.
            num_available: blocks that nobody has or was promised.
        Raises:
            RequestError: (`pin_refused`) there is no hit, or no room for it; nothing has changed.
        """
        if not hit.num_tokens:
            raise _refused(f"nothing of it is cached ({hit.explain()})")
        new = [(group, block) for group, block in _blocks(hit) if block not in self._pinned]
        what = f"its {counted(hit.num_tokens, 'token')} take {counted(len(new), 'more block')}"
        left = self.max_blocks - len(self._pinned)
        if len(new) > left:
            raise _refused(
                f"{what}; {left} of {self.max_blocks} are left, raised by --max-pinned-tokens"
            )
        if self._cost(new) > num_available:
            raise _refused(f"{what}; running requests have all but {num_available}")
        for group, block in _blocks(hit):
            if block not in self._pinned:
                self._group_caches[group].hold(block)
                self._pinned[block] = _Pinned(group, until)
            elif until > self._pinned[block].until:
                self._pinned[block] = _Pinned(group, until)
        self._first_expiry = min(self._first_expiry, until)

    def expire(self, now: float) -> None:
        """Let go of what was kept until `now` or earlier."""
        if now < self._first_expiry:
            return
        self.forget([block for block, pinned in self._pinned.items() if pinned.until <= now])
        expiries = (pinned.until for pinned in self._pinned.values())
        self._first_expiry = min(expiries, default=float("inf"))

    def forget(self, blocks: Iterable[int]) -> None:
        """Let go of those of the blocks that are kept."""
        for block in blocks:
            pinned = self._pinned.pop(block, None)
            if pinned is not None:
                self._group_caches[pinned.group].unpin(block)

    def forget_all(self) -> None:
        """Let go of everything."""
        self.forget(list(self._pinned))

    def _cost(self, new: Sequence[tuple[int, int]]) -> int:
        """Available blocks that keeping these would use up."""
        return sum(
            self._group_caches[group].promises or not self._pool.references(block)
            for group, block in new
        )


def num_pinned_blocks(max_tokens: int, unit: int, num_usable: int, *, has_states: bool) -> int:
    """Blocks that pins may keep.

    Args:
        max_tokens: as set.
        unit: tokens of a block of the first cache group.
        num_usable: blocks of the pool.
        has_states: the model has recurrent layers, which go on from snapshots, not from blocks.
    Raises:
        ConfigError: pins would be of no use, or leave no block to requests.
    Example:
        >>> num_pinned_blocks(100, unit=32, num_usable=8, has_states=False)
        3
    """
    if not max_tokens:
        return 0
    if has_states:
        raise ConfigError(
            f"max_pinned_tokens={max_tokens} is not legal with recurrent layers, which go on from "
            "snapshots, not from blocks (nearest: 0)"
        )
    count = max_tokens // unit
    if not 0 < count < num_usable:
        nearest = max(min(count, num_usable - 1) * unit, unit if num_usable > 1 else 0)
        raise ConfigError(
            f"max_pinned_tokens={max_tokens} is not legal with {num_usable} blocks of {unit} "
            f"tokens; pins keep whole blocks, and leave one to requests (nearest: {nearest})"
        )
    return count


def _refused(why: str) -> RequestError:
    return RequestError(f"the prefix cannot be pinned: {why}", "pin_refused")


def _blocks(hit: PrefixHit) -> Iterator[tuple[int, int]]:
    """(cache group, block) of each block that a hit needs; what others hang on comes last, so that
    it is also evicted last.
    """
    for group, part in enumerate(hit.groups):
        for block in reversed(part.shared):
            yield group, block
