"""Cached context is tiled once, in order, within the workspace, the same for every rank."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from heddle.layout.kv import KVLayout
from heddle.step.context import (
    ContextChunk,
    ContextPiece,
    ContextSpans,
    measure_context_chunks,
    plan_context_chunks,
)


class Span(NamedTuple):
    request: int
    start: int
    end: int
    layout: KVLayout


def columns_of(spans: list[Span]) -> ContextSpans:
    layout = spans[0].layout if spans else KVLayout(1, 1, 1)
    columns = [(span.request, span.start, span.end, span.layout.start_rank) for span in spans]
    return ContextSpans.of(dataclasses.replace(layout, start_rank=0), columns)


def chunks_of(spans: list[Span], workspace: int) -> tuple[ContextChunk, ...]:
    return plan_context_chunks(columns_of(spans), workspace)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Span], int]:
    ranks, interleave = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    contexts = [
        Span(
            index,
            draw(st.integers(0, length)),
            length,
            KVLayout(ranks, interleave, interleave * 2, draw(st.integers(0, ranks - 1))),
        )
        for index, length in enumerate(draw(st.lists(st.integers(0, 60), max_size=5)))
    ]
    return contexts, draw(st.integers(1, 80))


@given(cases())
def test_pieces_tile_every_span_once_in_order(
    case: tuple[list[Span], int],
) -> None:
    contexts, workspace = case
    chunks = chunks_of(contexts, workspace)
    pieces = [piece for chunk in chunks for piece in chunk.pieces]
    seen = [(piece.request, t) for piece in pieces for t in range(piece.start, piece.end)]
    assert seen == [
        (span.request, t)
        for span in contexts
        if span.start < span.end
        for t in range(span.start // span.layout.round_size * span.layout.round_size, span.end)
    ]
    assert all(piece.start < piece.end for piece in pieces)


@given(cases())
def test_a_price_is_of_the_chunks_that_would_be_planned(case: tuple[list[Span], int]) -> None:
    contexts, workspace = case
    alike = [
        span._replace(layout=dataclasses.replace(span.layout, start_rank=0)) for span in contexts
    ]
    for spans in (contexts, alike):
        measured = measure_context_chunks(columns_of(spans), workspace)
        planned = chunks_of(spans, workspace)
        assert [chunk.padded_local_rows for chunk in measured] == [
            chunk.padded_local_rows for chunk in planned
        ]


@given(cases())
def test_gathered_rows_stay_within_the_workspace(
    case: tuple[list[Span], int],
) -> None:
    contexts, workspace = case
    layouts = {span.request: span.layout for span in contexts}
    for chunk in chunks_of(contexts, workspace):
        layout = layouts[chunk.pieces[0].request]
        ranks, period = layout.world_size, layout.world_size * layout.interleave_size
        shares = [
            sum(
                layouts[piece.request].owner(t) == rank
                for piece in chunk.pieces
                for t in range(piece.start, piece.end)
            )
            for rank in range(ranks)
        ]
        assert chunk.padded_local_rows == max(shares)
        assert ranks * chunk.padded_local_rows <= max(workspace, period)
        assert all(piece.start % period == 0 for piece in chunk.pieces)


def test_a_chunk_is_filled_greedily_and_cut_at_whole_rounds() -> None:
    layout = KVLayout(4, 1, 4)
    chunks = chunks_of([Span(0, 0, 65, layout), Span(1, 0, 96, layout)], 128)
    assert [chunk.pieces for chunk in chunks] == [
        (ContextPiece(0, 0, 65), ContextPiece(1, 0, 60)),
        (ContextPiece(1, 60, 96),),
    ]


def test_requests_without_context_have_no_piece() -> None:
    assert chunks_of([Span(0, 0, 0, KVLayout(2, 1, 4))], 16) == ()
