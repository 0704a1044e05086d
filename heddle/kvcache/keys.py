"""Names of cached content: a chain of sha256, one link per full virtual block.

    root   = H(model, kv dtype, layout fingerprint, place, scope)
    key(i) = H(key(i - 1), tokens of block i)          key(-1) = root

A key names everything that the KV of its block depends on: all tokens up to the block's end, and
what turns tokens into bytes on each rank. Two layouts, cache groups or scopes never share a key.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheScope:
    """What the KV of one sequence depends on beside its tokens; only equal scopes share blocks."""

    salt: str | None = None
    """Separates callers; None and the empty text are the common cache."""
    adapter: str = ""
    """Adapter that its rows go through, by a name that is never given twice; empty: none."""
    rope_variant: int = 0
    """Which rotary table its length selects, 0 <= value < 2**64."""
    embeddings: bytes = b""
    """Digest of the embeddings that stand for its first tokens; empty: they are tokens."""


COMMON = CacheScope()


def root_key(identity: CacheIdentity, scope: CacheScope = COMMON) -> bytes:
    """Start of a chain.

    Args:
        identity: of the pool.
        scope: of the sequence.
    """
    digest = hashlib.sha256(struct.pack("<QQ", identity.layout_fingerprint, scope.rope_variant))
    texts = (
        identity.model,
        identity.kv_cache_dtype,
        identity.place,
        scope.salt or "",
        scope.adapter,
    )
    for data in (*(text.encode("utf-8", "surrogatepass") for text in texts), scope.embeddings):
        digest.update(struct.pack("<Q", len(data)) + data)
    return digest.digest()


def chain_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of the block that holds `tokens` (each 0 <= id < 2**64) after the chain `parent`.

    Example:
        >>> chain_key(b"root", [1, 2]) == chain_key(b"root", [1, 2, 0])
        False
    """
    return hashlib.sha256(parent + struct.pack(f"<{len(tokens)}Q", *tokens)).digest()
