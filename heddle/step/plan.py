"""One global batch -> one plan, the same on every rank.

The driver derives the plan to know its digest; each rank derives it again from the batch it
received and refuses the step when the digests differ, before its first collective. Nothing here
depends on a rank, a local length or a clock.

Legend: `P` PCP size, `T` new rows of the step, `C` cached tokens, `q` new tokens of a request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from heddle.errors import LayoutMismatch
from heddle.layout.rows import RowClass, RowLayout, create_row_layout
from heddle.step.batch import GlobalBatch, ScheduledRequest
from heddle.step.context import ContextChunk, plan_context_chunks
from heddle.step.coverage import expected_coverage
from heddle.step.logits import LogitsPlan, plan_logits
from heddle.step.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Everything that all ranks agree on about one step."""

    batch: GlobalBatch
    rows: RowLayout
    classes: tuple[RowClass, ...]
    """Per request."""
    copy_exchange: str
    """`none` without COPY rows, else how their partials return."""
    context_exchange: str
    """`none` when no distributed request has cached context, else how it is met."""
    merge_exchange: str
    """How partials return under `gather_q`."""
    context_chunks: tuple[ContextChunk, ...]
    """Pieces gathered one after another; empty unless context is met piece by piece."""
    logits: LogitsPlan
    reasons: tuple[str, ...]
    """Why each exchange was chosen."""
    coverage: int
    """Sum that the KV writes of each store copy must add up to."""
    digest: int
    """BLAKE2b-64 of the batch and of every choice above."""


def plan(batch: GlobalBatch, topology: Topology) -> StepPlan:
    """Derive the plan of a step.

    Args:
        batch: the whole batch.
        topology: constants of the engine.
    Raises:
        LayoutMismatch: a request carries the fingerprint of another KV layout.
    """
    _check_fingerprints(batch, topology)
    pcp_size = topology.mesh.pcp_size
    placed = [
        topology.row_policy(index, len(request.token_ids), pcp_size)
        for index, request in enumerate(batch.requests)
    ]
    rows = create_row_layout(placed, pcp_size)
    classes = tuple(request.row_class for request in placed)
    copy_exchange, copy_reason = _copy_exchange(rows, topology)
    context_exchange, context_reason = _context_exchange(batch, classes, topology)
    chunks = _context_chunks(batch, classes, topology, context_exchange)
    logits = plan_logits(list(_logits_rows(batch, rows)), rows)
    exchanges = (copy_exchange, context_exchange, topology.merge_exchange)
    return StepPlan(
        batch=batch,
        rows=rows,
        classes=classes,
        copy_exchange=copy_exchange,
        context_exchange=context_exchange,
        merge_exchange=topology.merge_exchange,
        context_chunks=chunks,
        logits=logits,
        reasons=(copy_reason, context_reason),
        coverage=expected_coverage(batch, topology),
        digest=_digest(batch, rows, classes, exchanges, chunks, logits),
    )


def _check_fingerprints(batch: GlobalBatch, topology: Topology) -> None:
    """A sequence made for another layout must not be read through this one."""
    for request in batch.requests:
        expected = topology.fingerprint(request.start_rank)
        if request.layout_fingerprint != expected:
            raise LayoutMismatch(
                f"request {request.request_id} carries KV layout fingerprint "
                f"{request.layout_fingerprint:#018x}, but this engine's layout is {expected:#018x} "
                f"({topology.kv_layout(request.start_rank)}, kv dtype {topology.kv_cache_dtype}); "
                "recompute the sequence under this layout"
            )


def _copy_exchange(rows: RowLayout, topology: Topology) -> tuple[str, str]:
    """How partials of COPY rows return, with the reason."""
    if rows.num_copy == 0:
        return "none", "copy rows: none in the batch"
    return topology.copy_exchange, f"copy rows: {topology.copy_exchange}, chosen at start"


def _context_exchange(
    batch: GlobalBatch, classes: tuple[RowClass, ...], topology: Topology
) -> tuple[str, str]:
    """How distributed rows meet cached context: skipped only if no request of the whole batch has
    any.
    """
    longest = max(
        (request.num_computed_tokens for request in _distributed(batch, classes)), default=0
    )
    if longest == 0:
        return "none", "context: no distributed request has cached tokens"
    return (
        topology.context_exchange,
        f"context: {topology.context_exchange}, chosen at start; longest {longest} tokens",
    )


def _context_chunks(
    batch: GlobalBatch, classes: tuple[RowClass, ...], topology: Topology, exchange: str
) -> tuple[ContextChunk, ...]:
    """Pieces of context, where it is met piece by piece."""
    if exchange not in ("gather_kv", "local"):
        return ()
    contexts = [
        (index, request.num_computed_tokens, topology.kv_layout(request.start_rank))
        for index, request in enumerate(batch.requests)
        if classes[index] is not RowClass.COPY
    ]
    if exchange == "local" and not topology.model.is_mla:
        # Keys are read in place and nothing is expanded, so no workspace bounds a piece.
        return plan_context_chunks(contexts, sum(length for _, length, _ in contexts))
    return plan_context_chunks(contexts, topology.context_workspace_tokens)


def _distributed(batch: GlobalBatch, classes: tuple[RowClass, ...]) -> Iterator[ScheduledRequest]:
    for request, row_class in zip(batch.requests, classes, strict=True):
        if row_class is not RowClass.COPY:
            yield request


def _logits_rows(batch: GlobalBatch, rows: RowLayout) -> Iterator[int]:
    """Global rows that feed the head: prompt-logprob rows, then the sampled row, request by
    request.
    """
    for request, first in zip(batch.requests, rows.request_starts, strict=False):
        yield from range(int(first), int(first) + len(request.prompt_logprob_targets))
        if request.sample is not None:
            yield int(first) + len(request.token_ids) - 1


def _digest(
    batch: GlobalBatch,
    rows: RowLayout,
    classes: tuple[RowClass, ...],
    exchanges: tuple[str, ...],
    chunks: tuple[ContextChunk, ...],
    logits: LogitsPlan,
) -> int:
    """BLAKE2b-64 over the batch and what was derived from it.

    Classes are named beside `gather`: on one PCP rank a copied and a split request lie alike.
    """
    hasher = hashlib.blake2b(digest_size=8)
    hasher.update(msgspec.msgpack.encode(batch))
    hasher.update(rows.gather.tobytes())
    hasher.update(rows.restore.tobytes())
    hasher.update(logits.order.tobytes())
    hasher.update(
        msgspec.msgpack.encode(
            (classes, exchanges, [(chunk.padded_local_rows, _pieces(chunk)) for chunk in chunks])
        )
    )
    return int.from_bytes(hasher.digest(), "little")


def _pieces(chunk: ContextChunk) -> list[tuple[int, int, int]]:
    return [(piece.request, piece.start, piece.end) for piece in chunk.pieces]
