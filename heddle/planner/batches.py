"""Batches of a shape: what a step's plan depends on, without tokens that anybody wrote.

A plan reads lengths, not block tables, so tables are left empty; such a batch can be planned and
priced, and is never sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from heddle.step.batch import GlobalBatch, SampleSpec, ScheduledRequest, StateUse
from heddle.step.draw_params import DrawParams
from heddle.step.topology import Topology

_SAMPLE = SampleSpec(
    params=DrawParams(is_greedy=True, temperature=0.0), seed=0, choice=0, position=0
)


class Rows(NamedTuple):
    """One sequence's part of a step."""

    cached: int
    """Tokens computed before."""
    new: int
    """Rows of this step, at least 1."""
    samples: bool = True
    """The last row is drawn from; not so for a piece of a prompt that is not its last."""


def create_batch(topology: Topology, parts: Sequence[Rows]) -> GlobalBatch:
    """A batch of these parts, in order.

    Args:
        topology: whose plan is wanted.
        parts: one per sequence.
    """
    fingerprint = topology.fingerprint()
    tables = (b"",) * len(topology.groups)
    has_state = topology.model.recurrent is not None
    return GlobalBatch(
        epoch=0,
        step=0,
        requests=tuple(
            ScheduledRequest(
                request_id=index,
                token_ids=_zeros(part.new),
                num_computed_tokens=part.cached,
                packed_tables=tables,
                layout_fingerprint=fingerprint,
                samples=(_SAMPLE,) if part.samples else (),
                state=_state(index, part) if has_state else None,
            )
            for index, part in enumerate(parts)
        ),
    )


def _state(index: int, part: Rows) -> StateUse:
    return StateUse(source=index + 1 if part.cached else 0, targets=(index + 1,))


@lru_cache(maxsize=64)
def _zeros(count: int) -> tuple[int, ...]:
    return (0,) * count
