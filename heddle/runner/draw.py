"""Random numbers without state: a draw is a function of (seed, choice, output position) alone.

So neighbours, batch order, preemption, replay and topology cannot change a draw, today or years
from now.

    u = (BLAKE2b-64(seed, choice, position as little-endian u64) >> 11) * 2**-53
"""

from __future__ import annotations

import hashlib
import struct

_WORD = 2**64


def uniform(seed: int, choice: int, position: int) -> float:
    """The draw of one output position.

    Args:
        seed: of the request; taken modulo 2**64.
        choice: index among the `n` answers of the request, >= 0.
        position: output position, from 0.
    Returns:
        A float64 in [0, 1), a multiple of 2**-53.
    Source: docs/sampling.md, "The draw".
    Example:
        >>> uniform(0, 0, 0) == uniform(2**64, 0, 0)
        True
    """
    return (_hash(seed, choice, position) >> 11) * 2.0**-53


def request_seed(engine_seed: int, ordinal: int) -> int:
    """Seed of a request that names none, so that a whole offline run repeats.

    Args:
        engine_seed: of the engine; taken modulo 2**64.
        ordinal: how many requests the engine admitted before this one.
    Returns:
        An integer in [0, 2**64).
    """
    return _hash(engine_seed, ordinal)


def _hash(*words: int) -> int:
    data = struct.pack(f"<{len(words)}Q", *(word % _WORD for word in words))
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
