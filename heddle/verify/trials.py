"""Which layouts to certify: one that was asked for, every legal one of a world, or all
strategies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from heddle.config import ModelConfig, ParallelConfig
from heddle.config.parallel import CommBackend, ContextExchange
from heddle.layout.rules import check, legal_layouts, validate

DEFAULT_WORLD_SIZE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One layout to certify."""

    parallel: ParallelConfig
    block_size: int


def is_explicit(parallel: ParallelConfig) -> bool:
    """A layout was asked for: a degree differs from 1."""
    return (
        max(
            parallel.tensor_parallel_size,
            parallel.prefill_context_parallel_size,
            parallel.decode_context_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.data_parallel_size,
        )
        > 1
    )


def create_trials(
    asked: ParallelConfig,
    *,
    block_size: int,
    model: ModelConfig,
    world_size: int | None,
    every_strategy: bool,
) -> tuple[Trial, ...]:
    """The layouts of one certification.

    Args:
        asked: degrees and exchanges of the command line.
        block_size: tokens of a page on one rank.
        model: to judge legality by.
        world_size: every legal (tp, pcp, dcp) of so many ranks; None: `asked` where it has a degree
            above 1, else a world of two.
        every_strategy: each of them with every exchange and with interleave 1, 2 and the block.
    Raises:
        TopologyError: `asked` is not legal.
    """
    layouts: Sequence[ParallelConfig]
    if world_size is None and is_explicit(asked):
        check(asked, block_size=block_size, model=model)
        layouts = (asked,)
    else:
        world_size = world_size or DEFAULT_WORLD_SIZE
        layouts = _of_world(world_size, asked, block_size, model)
    if every_strategy:
        layouts = [each for layout in layouts for each in _strategies(layout, block_size, model)]
    return tuple(Trial(parallel=layout, block_size=block_size) for layout in layouts)


def _of_world(
    world_size: int, asked: ParallelConfig, block_size: int, model: ModelConfig
) -> Sequence[ParallelConfig]:
    """Every legal layout of a world; a forced exchange leaves those in which context is sharded."""
    layouts = legal_layouts(world_size, base=asked, block_size=block_size, model=model)
    if layouts:
        return layouts
    # No layout is left, so this one is refused too, and in words.
    one_of_them = replace(asked, prefill_context_parallel_size=world_size)
    check(one_of_them, block_size=block_size, model=model)
    return (one_of_them,)


def _strategies(
    layout: ParallelConfig, block_size: int, model: ModelConfig
) -> Iterator[ParallelConfig]:
    if layout.decode_context_parallel_size == 1:
        yield layout  # nothing is exchanged, and an interleave has no effect
        return
    for interleave in _interleaves(block_size):
        for backend, exchange in _exchanges():
            strategy = replace(
                layout,
                kv_interleave_size=interleave,
                dcp_comm_backend=backend,
                cp_context_exchange=exchange,
            )
            if validate(strategy, block_size=block_size, model=model).legal:
                yield strategy


def _exchanges() -> Iterator[tuple[CommBackend, ContextExchange]]:
    """What `auto` takes, every way back while queries travel, every other way to meet context."""
    yield "auto", "auto"
    yield from ((backend, "gather_q") for backend in get_args(CommBackend) if backend != "auto")
    for exchange in get_args(ContextExchange):
        if exchange not in ("auto", "gather_q"):
            yield "auto", exchange


def _interleaves(block_size: int) -> Iterable[int]:
    return sorted(size for size in {1, 2, block_size} if block_size % size == 0)
