"""The rows of one step as recurrent layers see them: who starts from which state.

A state can only be handed from row to row, in order. Rows that a rank holds from the first to the
last run directly from the request's cached state. Rows that are dealt to PCP ranks are run segment
by segment from zero; each segment is an affine map of the state before it, and the maps, gathered,
are applied in position order by every rank:

    rank 0     rank 1     rank 1     rank 0      SPLIT over 2 ranks
    segment 0  segment 1  segment 2  segment 3
    X0 ------> X1 ------> X2 ------> X3 ------> X4, the new state, known to every rank

Legend: `P` PCP size, `S` segments that a rank sends (padded to the largest rank's count), `M` local
rows, `h` heads of a rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from heddle.layout.mesh import GroupKind
from heddle.layout.recurrent_heads import RecurrentLayout
from heddle.layout.rows import RowClass, RowLayout, Segment
from heddle.step.batch import StateUse


@dataclass(frozen=True, slots=True)
class DirectRun:
    """All new rows of a request, local and in order: local rows [start, end)."""

    start: int
    end: int
    source: int
    """Slot of the state before the first row; 0: zeros."""
    targets: tuple[int, ...]
    """Slots of the states after each of the last rows."""


class SegmentPlace(NamedTuple):
    """Where a segment's map lies among the gathered ones, and how many rows it has."""

    pcp_rank: int
    number: int
    """Among the segments of that rank."""
    num_rows: int


@dataclass(frozen=True, slots=True)
class ScannedRun:
    """New rows of a request that are dealt to PCP ranks."""

    source: int
    target: int
    segments: tuple[SegmentPlace, ...]
    """In position order."""


class OwnSegment(NamedTuple):
    """A segment of this rank: local rows [start, end), the `place`-th segment of a scanned run."""

    run: int
    place: int
    number: int
    """Among the segments that this rank sends."""
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentStep:
    """One rank's rows of a step, for every recurrent layer alike."""

    num_local_rows: int
    """`M`, pads included."""
    num_segments: int
    """`S`; 0: nothing is gathered."""
    direct: tuple[DirectRun, ...]
    scanned: tuple[ScannedRun, ...]
    own: tuple[OwnSegment, ...]


def create_recurrent_step(
    rows: RowLayout, uses: Sequence[StateUse | None], pcp_rank: int
) -> RecurrentStep:
    """One rank's part of a step.

    Args:
        rows: the rows of the step.
        uses: state slots of the requests, in batch order.
        pcp_rank: this rank.
    Raises:
        ValueError: a request has no slots, writes slot 0, has more targets than rows, or wants
            several states of rows that are dealt to ranks (rows with drafts must be COPY).
    """
    checked = [_checked(rows, index, use) for index, use in enumerate(uses)]
    scanned = tuple(
        ScannedRun(checked[request].source, _only_target(request, checked[request]), places)
        for request, places in _scanned_requests(rows)
    )
    return RecurrentStep(
        num_local_rows=rows.num_local_rows,
        num_segments=num_scanned_segments(rows),
        direct=tuple(_direct_runs(rows, checked, pcp_rank)),
        scanned=scanned,
        own=tuple(_own_segments(rows, scanned, pcp_rank)),
    )


def num_scanned_segments(rows: RowLayout) -> int:
    """`S`: the largest number of segments of dealt rows that a rank has; 0 on one PCP rank."""
    return max(len(_dealt(rows, rank)) for rank in range(rows.pcp_size))


def recurrent_collectives(
    rows: RowLayout, layout: RecurrentLayout, tp_rank: int, dtype: str
) -> tuple[tuple[str, GroupKind, tuple[int, ...], str], ...]:
    """The calls of one recurrent layer, in order: (operation, group, shape, dtype).

    Ends of the segments, for the convolution, then their maps; nothing unless rows are dealt. The
    output norm follows, where its groups cross ranks.

    Args:
        rows: the rows of the step.
        layout: the cut of the layer.
        tp_rank: whose calls.
        dtype: of the model.
    """
    state_dtype = "float64" if dtype == "float64" else "float32"
    calls: list[tuple[str, GroupKind, tuple[int, ...], str]] = []
    num_segments = num_scanned_segments(rows)
    if num_segments > 0:
        history = layout.history_shape(tp_rank)
        if history[0] > 0:
            calls.append(("all_gather", "pcp", (num_segments, *history), dtype))
        heads = layout.state_shape(tp_rank)[0]
        calls.append(("all_gather", "pcp", (num_segments, heads, layout.map_width), state_dtype))
    if layout.num_norm_sums > 0:
        shape = (rows.num_local_rows, layout.num_norm_sums)
        calls.append(("all_reduce", "tp", shape, state_dtype))
    return tuple(calls)


def _checked(rows: RowLayout, index: int, use: StateUse | None) -> StateUse:
    if use is None:
        raise ValueError(f"request {index} has no state slots; recurrent layers need them")
    if not use.targets or 0 in use.targets:
        raise ValueError(
            f"request {index}: targets={use.targets}; one slot or more, none of them 0"
        )
    num_rows = int(rows.request_starts[index + 1] - rows.request_starts[index])
    if len(use.targets) > max(num_rows, 1):
        raise ValueError(f"request {index}: {len(use.targets)} targets for {num_rows} rows")
    return use


def _only_target(request: int, use: StateUse) -> int:
    if len(use.targets) != 1:
        raise ValueError(
            f"request {request}: {len(use.targets)} targets of rows that are dealt to ranks; "
            "rows whose states are kept one by one must be COPY"
        )
    return use.targets[0]


def _is_direct(rows: RowLayout, request: int) -> bool:
    """All rows of the request are on every rank that has any, from the first to the last."""
    return rows.pcp_size == 1 or rows.classes[request] is RowClass.COPY


def _direct_runs(rows: RowLayout, uses: Sequence[StateUse], pcp_rank: int) -> Iterator[DirectRun]:
    """Segments of one request lie side by side, so the first start and last end bound its rows."""
    bounds: dict[int, tuple[int, int]] = {}
    for segment in rows.segments(pcp_rank):
        if _is_direct(rows, segment.request):
            start, _ = bounds.get(segment.request, (segment.row, 0))
            bounds[segment.request] = (start, segment.row + segment.num_rows)
    for request, (start, end) in bounds.items():
        yield DirectRun(start, end, uses[request].source, uses[request].targets)


def _dealt(rows: RowLayout, pcp_rank: int) -> list[Segment]:
    """Segments of dealt rows of a rank."""
    return [segment for segment in rows.segments(pcp_rank) if not _is_direct(rows, segment.request)]


def _scanned_requests(rows: RowLayout) -> Iterator[tuple[int, tuple[SegmentPlace, ...]]]:
    """Requests with dealt rows and their segments in position order; the same on every rank."""
    found: dict[int, list[tuple[int, SegmentPlace]]] = {}
    for rank in range(rows.pcp_size):
        for number, segment in enumerate(_dealt(rows, rank)):
            place = SegmentPlace(rank, number, segment.num_rows)
            found.setdefault(segment.request, []).append((segment.start, place))
    for request in sorted(found):
        # An empty segment starts where the next one does; an identity may stand on either side.
        yield request, tuple(place for _, place in sorted(found[request]))


def _own_segments(
    rows: RowLayout, runs: Sequence[ScannedRun], pcp_rank: int
) -> Iterator[OwnSegment]:
    starts = [segment.row for segment in _dealt(rows, pcp_rank)]
    for run, scanned in enumerate(runs):
        for place, (rank, number, num_rows) in enumerate(scanned.segments):
            if rank == pcp_rank:
                yield OwnSegment(run, place, number, starts[number], starts[number] + num_rows)
