"""Counts that must not be mixed.

At one rank all of these coincide, so a mix-up is invisible there and wrong everywhere else.
"""

from __future__ import annotations

from typing import NewType

GlobalTokens = NewType("GlobalTokens", int)
"""Tokens of a whole sequence, over all ranks."""

LocalTokens = NewType("LocalTokens", int)
"""Tokens that one rank of a DCP group stores."""

Blocks = NewType("Blocks", int)
"""Physical pages on one rank: `block_size` tokens each."""

VirtualBlocks = NewType("VirtualBlocks", int)
"""Block ids of a DCP group: `block_size * dcp_size` tokens each."""

PAD_SLOT_ID = -1
"""Slot of a row that this rank does not store."""
