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
from functools import lru_cache

import msgspec

from heddle.errors import LayoutMismatch
from heddle.layout.rows import RowClass, RowLayout, create_row_layout
from heddle.step.batch import GlobalBatch
from heddle.step.class_plan import GroupPlan
from heddle.step.group_plan import plan_groups
from heddle.step.logits import LogitsPlan, plan_logits
from heddle.step.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Everything that all ranks agree on about one step."""

    batch: GlobalBatch
    rows: RowLayout
    groups: tuple[GroupPlan, ...]
    """Per cache group: how its layers attend."""
    logits: LogitsPlan
    reasons: tuple[str, ...]
    """Why rows were placed and exchanges chosen as they were."""
    digest: int
    """BLAKE2b-64 of the batch and of every choice above."""

    @property
    def classes(self) -> tuple[RowClass, ...]:
        """Row class of each request."""
        return self.rows.classes


def plan(batch: GlobalBatch, topology: Topology) -> StepPlan:
    """Derive the plan of a step.

    Args:
        batch: the whole batch; an idle replica's has no requests.
        topology: constants of the engine.
    Raises:
        LayoutMismatch: a request carries the fingerprint of another KV layout.
    """
    _check_fingerprints(batch, topology)
    placed = topology.row_policy(batch.requests, topology)
    rows = create_row_layout(placed.rows, topology.mesh.pcp_size)
    groups = plan_groups(batch, rows, topology)
    logits = plan_logits(list(_logits_rows(batch, rows)), rows)
    return StepPlan(
        batch=batch,
        rows=rows,
        groups=groups,
        logits=logits,
        reasons=(*placed.reasons, *_group_reasons(groups)),
        digest=_digest(batch, rows, groups, logits),
    )


def _group_reasons(groups: tuple[GroupPlan, ...]) -> Iterator[str]:
    """The reasons of all groups; what several groups have in common is said once."""
    alike: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        for reason in group.reasons:
            alike.setdefault(reason, []).append(index)
    for reason, indices in alike.items():
        name = "group" if len(indices) == 1 else "groups"
        yield f"{name} {', '.join(map(str, indices))}, {reason}"


def _check_fingerprints(batch: GlobalBatch, topology: Topology) -> None:
    """A sequence made for another layout must not be read through this one."""
    for request in batch.requests:
        expected = topology.fingerprint(request.start_rank)
        if request.layout_fingerprint != expected:
            raise LayoutMismatch(
                f"request {request.request_id} carries KV layout fingerprint "
                f"{request.layout_fingerprint:#018x}, but this engine's layout is {expected:#018x} "
                f"({topology.mesh}, interleave {topology.interleave_size}, block "
                f"{topology.block_size}, kv dtype {topology.kv_cache_dtype}); "
                "recompute the sequence under this layout"
            )


def _logits_rows(batch: GlobalBatch, rows: RowLayout) -> Iterator[int]:
    """Global rows that feed the head: prompt-logprob rows, then the sampled rows, request by
    request.
    """
    starts = rows.request_starts.tolist()
    for request, first, end in zip(batch.requests, starts, starts[1:], strict=False):
        if request.prompt_logprob_targets:
            yield from range(first, first + len(request.prompt_logprob_targets))
        if request.samples:
            yield from range(end - len(request.samples), end)


def _digest(
    batch: GlobalBatch, rows: RowLayout, groups: tuple[GroupPlan, ...], logits: LogitsPlan
) -> int:
    """BLAKE2b-64 over the batch and what was derived from it.

    Classes are named beside `gather`: on one PCP rank a copied and a split request lie alike.
    """
    hasher = hashlib.blake2b(digest_size=8)
    hasher.update(msgspec.msgpack.encode(batch))
    hasher.update(_rows_digest(rows))
    hasher.update(logits.order.tobytes())
    choices = [
        (
            group.new_rows,
            [
                (
                    part.context,
                    part.returns,
                    [(chunk.padded_local_rows, chunk.pieces) for chunk in part.chunks],
                )
                for part in group.classes.values()
            ],
        )
        for group in groups
    ]
    hasher.update(msgspec.msgpack.encode((rows.classes, choices)))
    return int.from_bytes(hasher.digest(), "little")


@lru_cache(maxsize=16)
def _rows_digest(rows: RowLayout) -> bytes:
    """Of the index arrays; a run of decode steps has one frozen layout (`create_row_layout`)."""
    hasher = hashlib.blake2b(digest_size=16)
    hasher.update(rows.gather.tobytes())
    hasher.update(rows.restore.tobytes())
    return hasher.digest()
