"""On which rank a block chain starts.

The last round of a sequence is ragged and fills from its start rank on. If all start on rank 0, it
holds `I * (N - 1) / (2 * N)` tokens more than the mean per sequence; starting each where least lies
levels this out.

Legend: `N` ranks of a DCP group, `I` interleave, `u` start rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from heddle.kvcache.groups import GroupSpec
from heddle.kvcache.sequence import SequenceBlocks
from heddle.layout.kv import KVLayout


def num_start_ranks(specs: Sequence[GroupSpec]) -> int:
    """`N`: start ranks to choose from; 1 where no group is shared out."""
    sizes = {spec.layout.world_size for spec in specs} - {1}
    assert len(sizes) <= 1, "groups that are shared out are shared by the same ranks"
    return max(sizes, default=1)


def least_loaded(specs: Sequence[GroupSpec], live: Iterable[SequenceBlocks]) -> int:
    """The rank that stores the fewest tokens of the live sequences, the lowest of equals."""
    num_ranks = num_start_ranks(specs)
    loads = [0] * num_ranks
    layouts = [[spec.layout_at(rank) for rank in range(num_ranks)] for spec in specs]
    for sequence in live:
        for spec, choices in zip(specs, layouts, strict=True):
            if spec.layout.world_size > 1:
                layout = choices[sequence.start_rank]
                for rank, count in enumerate(_stored(spec, layout, sequence.num_tokens)):
                    loads[rank] += count
    return loads.index(min(loads))


def _stored(spec: GroupSpec, layout: KVLayout, num_tokens: int) -> list[int]:
    """Tokens that each rank stores of a sequence; a window counts from its first block on."""
    rule, unit = spec.visibility, spec.unit
    first = 0 if rule.is_full else rule.needed_from(num_tokens) // unit * unit
    return [
        layout.local_len(num_tokens, rank) - layout.local_len(first, rank)
        for rank in range(layout.world_size)
    ]
