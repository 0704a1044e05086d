"""Looking at one row of a step: which one it is, and what came of it.

A batch may name a request whose numbers are looked at in this step. The row is its first one that
feeds sampling, the last whose token is known; each rank that computes it says what attention gave
for it in every layer, and the deciding rank adds its raw logits. Nothing else of the step changes.

    tokens of the sequence   t0 t1 ... t(L-1) | the token that is drawn
                                       row      logits
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from heddle.step.batch import GlobalBatch, RankReply, ScheduledRequest
from heddle.step.localize import RankStep

NO_PROBE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What a step brought to light about one sequence."""

    request_id: int
    """Of the sequence; the driver's number."""
    epoch: int
    step: int
    token_ids: tuple[int, ...]
    """`[L]`: all tokens up to the row."""
    num_prompt_tokens: int
    rope_length: int
    """Longest length that the sequence may reach."""
    token_id: int | None
    """What was drawn; None: the row was not finite."""
    is_greedy: bool
    """Each token is the most likely one, and nothing was in the way of it."""
    logits: bytes
    """Raw row, little-endian in the compute dtype."""
    layers: dict[int, dict[int, bytes]]
    """Layer -> global rank -> `[lanes, Dv]` in the compute dtype, of ranks that had the row."""


def probed_request(batch: GlobalBatch) -> tuple[int, ScheduledRequest] | None:
    """Index and part of the request that is looked at; None: none is."""
    for index, request in enumerate(batch.requests):
        if request.request_id == batch.probe:
            return index, request
    return None


def probed_row(step: RankStep) -> int | None:
    """The row among the local ones; None: it is computed elsewhere, or nobody looks."""
    found = probed_request(step.plan.batch)
    if found is None or not found[1].samples:
        return None
    index, request = found
    last = request.num_computed_tokens + len(request.token_ids) - len(request.samples)
    rows = np.flatnonzero((step.request_of_row == index) & (step.positions == last))
    return int(rows[0]) if len(rows) else None


def rows_by_layer(replies: Sequence[RankReply], first_rank: int) -> dict[int, dict[int, bytes]]:
    """What all ranks of a replica saw: layer -> global rank -> row."""
    found: dict[int, dict[int, bytes]] = {}
    for rank, reply in enumerate(replies, start=first_rank):
        for layer, row in reply.probe:
            found.setdefault(layer, {})[rank] = row
    return dict(sorted(found.items()))
