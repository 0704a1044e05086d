"""The one number that stands for "nowhere".

Counts carry their unit in their name: `global_` and `local_` tokens, `num_blocks` of one rank,
`num_virtual_blocks` of a DCP group. At one rank all of them coincide, so a mix-up is invisible
there and wrong everywhere else.
"""

from __future__ import annotations

PAD_SLOT_ID = -1
"""Slot of a row that this rank does not store."""
