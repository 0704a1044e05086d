"""Which block holds which tokens: the prefix index.

A node is (key of what comes before, its own tokens, block id). Nodes hang under the *key* of their
parent, not under the parent's node, so a child outlives the eviction of its parent and is found
again as soon as the parent's tokens are computed anew. A node of less than a full block is the tail
of a sequence that ended.

The index only answers. When a node appears or goes is decided by `BlockPool`, for a hash is part of
the state of a block.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from heddle.kvcache.children import Children, Tokens

MAX_GHOSTS = 256
"""Evicted first blocks that are remembered, to tell "evicted" from "never seen"."""

NO_BLOCK = 0
"""Stands for a block that is no longer there; id 0 is never given out."""


class Node(NamedTuple):
    """What a block is known to hold."""

    parent: bytes
    tokens: Tokens
    is_first: bool
    """The block starts a sequence."""


class PrefixIndex:
    """Nodes by block, and by parent key and tokens."""

    def __init__(self) -> None:
        self._nodes: dict[int, Node] = {}
        self._children = Children()
        self._ghosts = Children()
        self._ghost_order: deque[tuple[bytes, Tokens]] = deque()

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, block: int) -> bool:
        return block in self._nodes

    def insert(self, block: int, node: Node) -> bool:
        """Enter a block; False if another block already offers all of these tokens."""
        if self._children.covering(node.parent, node.tokens) is not None:
            return False
        self._nodes[block] = node
        self._children.add(node.parent, node.tokens, block)
        return True

    def drop(self, block: int) -> Node:
        """Forget a block, because its content is about to change or is not to be trusted."""
        node = self._nodes.pop(block)
        self._children.remove(node.parent, node.tokens, block)
        return node

    def evict(self, block: int) -> None:
        """Forget a block whose room is needed, and remember that it was here."""
        node = self.drop(block)
        if not node.is_first:
            return
        self._ghosts.add(node.parent, node.tokens, NO_BLOCK)
        self._ghost_order.append((node.parent, node.tokens))
        if len(self._ghost_order) > MAX_GHOSTS:
            self._forget_oldest_ghost()

    def has_children(self, parent: bytes) -> bool:
        """Something is known to follow this key; a cheap question before those below."""
        return parent in self._children

    def full(self, parent: bytes, tokens: Tokens) -> int | None:
        """Block that holds exactly this full block of tokens, or None."""
        return self._children.covering(parent, tokens)

    def longest(self, parent: bytes, tokens: Tokens) -> tuple[int, int]:
        """(block, shared) of the child with the longest prefix of `tokens`; (0, 0) if none."""
        return self._children.longest(parent, tokens)

    def was_evicted(self, root: bytes, tokens: Tokens) -> bool:
        """True if a first block that shared tokens with these was evicted, as far as remembered."""
        return self._ghosts.longest(root, tokens)[1] > 0

    def _forget_oldest_ghost(self) -> None:
        self._ghosts.remove(*self._ghost_order.popleft(), NO_BLOCK)
