"""A word for each stored row, which says what it is the key and value of.

    word(p) = sum over i <= p of mix(scope, i, token i)       modulo 2**64

Keys and values at position p follow from the tokens up to p and from the scope of the sequence, so
rows of equal words may stand for each other, as in a shared prefix, and rows of other words never.
Only with `debug_kv` do words travel with a step: 8 bytes for every token of every context.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from heddle.kvcache.keys import CacheScope
from heddle.scheduler.batch import ScheduledBatch, ScheduledPart
from heddle.step.batch import KVDebug
from heddle.step.coverage import mix_rows


def kv_words(token_ids: Sequence[int], scope: CacheScope) -> npt.NDArray[np.uint64]:
    """`[positions]`: the word of each position of a sequence.

    Example:
        >>> first, second = kv_words([5, 6, 7], CacheScope()), kv_words([5, 6, 8], CacheScope())
        >>> (first == second).tolist()
        [True, True, False]
    """
    body = msgspec.msgpack.encode((scope.salt, scope.adapter, scope.rope_variant, scope.embeddings))
    root = int.from_bytes(hashlib.blake2b(body, digest_size=7).digest(), "little")
    tokens = np.array(token_ids, dtype=np.int64)
    with np.errstate(over="ignore"):
        return np.cumsum(mix_rows(root, np.arange(len(tokens)), tokens), dtype=np.uint64)


def kv_debug(scheduled: ScheduledBatch, freed_blocks: Sequence[int]) -> KVDebug:
    """What a step carries so that ranks can look before they read.

    Args:
        scheduled: the step.
        freed_blocks: without an owner or content since the step before; some may be in use again.
    """
    return KVDebug(
        freed_blocks=tuple(freed_blocks),
        words=tuple(_words_of(part).tobytes() for part in scheduled.parts),
    )


def _words_of(part: ScheduledPart) -> npt.NDArray[np.uint64]:
    """Of all rows that the part reads or writes."""
    before = part.request.token_ids[: part.num_computed_tokens]
    return kv_words([*before, *part.token_ids], part.request.cache_scope)
