"""From what several ranks report to the one error that names the first cause.

When a rank fails, its peers fail too: their collectives lose a member. Such reports are *derived*.
The first report that is not derived is the cause; the others follow it as one line each.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from heddle.config.parallel import ParallelConfig
from heddle.errors import (
    CollectiveTimeout,
    ConfigError,
    HeddleError,
    ModelFileError,
    PlanMismatch,
    RankFailed,
    UnsupportedError,
)
from heddle.layout.mesh import Mesh

_MENDABLE = (ConfigError, UnsupportedError, ModelFileError)
"""Raised while starting, these stay what they are: their reader can mend the cause."""
_STEP_KINDS = (PlanMismatch, CollectiveTimeout)
"""Raised by a rank in a step, these keep their class; everything else becomes `RankFailed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What one rank reported, or what was seen of it."""

    rank: int
    text: str
    """One line: what happened."""
    kind: str = "RankFailed"
    """Class name among the errors of this package that the text should be raised as."""
    detail: str = ""
    """Traceback, stacks or last output; may be empty."""
    is_derived: bool = False
    """True when this follows from another rank's failure."""
    is_timeout: bool = False
    """True when a collective missed its deadline: some rank never joined it."""
    cause: BaseException | None = None
    """The exception itself, where it lives in this process."""
    mismatch: str = ""
    """Of a `PlanMismatch`: what differs, its `kind`."""
    sketch: Mapping[str, str] = field(default_factory=dict)
    """Of a `PlanMismatch`: what the rank understood of the step."""


def failure_of(rank: int, error: BaseException) -> Failure:
    """Describe an exception that a rank raised."""
    kinds = [kind for kind in (*_MENDABLE, *_STEP_KINDS) if isinstance(error, kind)]
    return Failure(
        rank=rank,
        text=f"{type(error).__name__}: {error}",
        kind=kinds[0].__name__ if kinds else "RankFailed",
        detail="".join(traceback.format_exception(error)).rstrip(),
        is_derived=isinstance(error, RankFailed),
        is_timeout=isinstance(error, CollectiveTimeout),
        cause=error,
        mismatch=error.kind if isinstance(error, PlanMismatch) else "",
        sketch=error.sketch if isinstance(error, PlanMismatch) else {},
    )


def first_cause(failures: Sequence[Failure]) -> Failure:
    """The earliest failure that does not follow from another one; else the earliest of all."""
    return next((failure for failure in failures if not failure.is_derived), failures[0])


def describe_rank(parallel: ParallelConfig, rank: int) -> str:
    """A rank with its coordinates, as log lines spell it: `rank1 tp1 pcp0 dcp1`; stage and replica
    come first where there are several.
    """
    mesh = Mesh.of(parallel)
    coord = mesh.coord_of(rank)
    words = [f"rank{rank}"]
    if mesh.dp_size > 1:
        words.append(f"dp{coord.dp}")
    if mesh.pp_size > 1:
        words.append(f"pp{coord.pp}")
    return " ".join([*words, f"tp{coord.tp} pcp{coord.pcp} dcp{mesh.position('dcp', rank)}"])


def start_error(parallel: ParallelConfig, failures: Sequence[Failure]) -> HeddleError:
    """The error that ends a start."""
    kinds = {kind.__name__: kind for kind in _MENDABLE}
    cause = first_cause(failures)
    if cause.kind in kinds:
        # The reader mends a setting or a file; a traceback would only hide the message.
        error: HeddleError = kinds[cause.kind](
            f"{_own_words(cause)} [{describe_rank(parallel, cause.rank)}]"
        )
    else:
        error = RankFailed(_message(parallel, failures, "while starting"))
    error.__cause__ = cause.cause
    return error


def idle_error(parallel: ParallelConfig, failures: Sequence[Failure]) -> RankFailed:
    """The error of a rank that ended while it had nothing to do."""
    return RankFailed(_message(parallel, failures, "while idle"))


def step_error(
    parallel: ParallelConfig,
    failures: Sequence[Failure],
    epoch: int,
    step: int,
    compare: Callable[[int, Mapping[str, str]], str] | None = None,
) -> HeddleError:
    """The error that ends a step, and the executor with it.

    Args:
        parallel: how ranks are arranged.
        failures: in order of arrival.
        epoch, step: what failed.
        compare: lays a rank's understanding of the step beside the driver's own, as a table.
    """
    kinds = {kind.__name__: kind for kind in _STEP_KINDS}
    cause = first_cause(failures)
    message = _message(parallel, failures, f"in step {step} of epoch {epoch}")
    error: HeddleError
    if cause.kind == PlanMismatch.__name__:
        table = compare(cause.rank, cause.sketch) if compare and cause.sketch else ""
        text = f"{message}\n{table}" if table else message
        error = PlanMismatch(text, cause.mismatch or "plan", cause.sketch)
    else:
        error = kinds.get(cause.kind, RankFailed)(message)
    error.__cause__ = cause.cause
    return error


def _own_words(failure: Failure) -> str:
    """The text without the class name in front of it."""
    return failure.text.partition(": ")[2] or failure.text


def _message(parallel: ParallelConfig, failures: Sequence[Failure], where: str) -> str:
    cause = first_cause(failures)
    lines = [f"{describe_rank(parallel, cause.rank)} failed {where}: {cause.text}"]
    if cause.detail:
        lines.append(cause.detail)
    for other in failures:
        if other is not cause:
            first_line = other.text.partition("\n")[0]
            lines.append(f"then {describe_rank(parallel, other.rank)}: {first_line}")
            if not other.is_derived and other.detail:
                lines.append(other.detail)
    return "\n".join(lines)
