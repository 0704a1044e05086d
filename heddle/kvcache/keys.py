"""Names of cached content: a chain of sha256, one link per full virtual block.

    root   = H(model, kv dtype, layout fingerprint, place, salt)
    key(i) = H(key(i - 1), tokens of block i)          key(-1) = root

A key names everything that the KV of its block depends on: all tokens up to the block's end, and
what turns tokens into bytes on each rank. Two layouts, cache groups or salts never share a key.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheIdentity:
    """What all sequences of one pool have in common."""

    model: str
    """Model and revision."""
    kv_cache_dtype: str
    """Element type of the pool."""
    layout_fingerprint: int
    """`KVLayout.fingerprint`: 0 <= value < 2**64."""
    place: str = ""
    """What tells the chains of one sequence apart: cache group and start rank."""


def root_key(identity: CacheIdentity, salt: str | None = None) -> bytes:
    """Start of a chain.

    Args:
        identity: of the pool.
        salt: separates caches; None and the empty text are the common cache.
    """
    digest = hashlib.sha256(struct.pack("<Q", identity.layout_fingerprint))
    for text in (identity.model, identity.kv_cache_dtype, identity.place, salt or ""):
        data = text.encode("utf-8", "surrogatepass")
        digest.update(struct.pack("<Q", len(data)) + data)
    return digest.digest()


def chain_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of the block that holds `tokens` (each 0 <= id < 2**64) after the chain `parent`.

    Example:
        >>> chain_key(b"root", [1, 2]) == chain_key(b"root", [1, 2, 0])
        False
    """
    return hashlib.sha256(parent + struct.pack(f"<{len(tokens)}Q", *tokens)).digest()
