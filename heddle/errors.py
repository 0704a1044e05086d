"""Every error that Heddle raises on purpose, in one tree.

    HeddleError
      ConfigError(ValueError)                 a setting, or a combination, is not legal
        TopologyError                         ... of tp, pcp, dcp, interleave or ranks
      UnsupportedError(NotImplementedError)   legal, but this model, cache or backend cannot
      ModelFileError(ValueError)              a model file is missing, truncated or unexpected
      RequestError(ValueError)                one request is refused or failed; others go on
        PromptTooLong                         the prompt exceeds the window or the whole KV pool
        EngineOverloaded                      the queue is full; a later try may do better
      KVCacheFull                             no block now; the scheduler preempts
      LayoutMismatch                          an object made for one KV layout met another
      PlanMismatch                            ranks or plan disagree about a step
      NumericsError                           NaN or inf where keys promised a finite value
      RankFailed                              a rank raised, died or missed its deadline
        CollectiveTimeout                     a collective did not end before its deadline

A message gives the value, the rule and the nearest legal choices, in that order. Values come from
outside, so `quoted` bounds them; `counted` writes a count with its noun.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence

MISMATCH_KINDS = (
    "epoch",
    "step",
    "layout_id",
    "plan",
    "collective",
    "coverage",
    "kv",
    "tokens",
)
"""What ranks and driver can disagree about."""
MAX_QUOTED = 64
"""Characters of a value in a message."""
_REPR = reprlib.Repr()
_REPR.maxlevel = 3
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = MAX_QUOTED


class HeddleError(Exception):
    """Base of all errors raised on purpose by this package."""


class ConfigError(HeddleError, ValueError):
    """A setting, or a combination of settings, is not legal."""


class TopologyError(ConfigError):
    """A layout is refused.

    Attributes:
        reasons: every rule that the layout breaks, one sentence each.
        nearest: legal layouts near the refused one, as flag strings.
    """

    def __init__(self, reasons: Sequence[str], nearest: Sequence[str] = ()) -> None:
        self.reasons = tuple(reasons)
        self.nearest = tuple(nearest)
        text = "; ".join(self.reasons)
        if self.nearest:
            text += f"; nearest legal layouts: {' | '.join(self.nearest)}"
        super().__init__(text)


class UnsupportedError(HeddleError, NotImplementedError):
    """Legal in principle, but this model, cache kind or backend cannot do it."""


class ModelFileError(HeddleError, ValueError):
    """A model file is missing, truncated, or does not hold what was expected."""


class RequestError(HeddleError, ValueError):
    """One request is refused, or has failed; the engine goes on serving others.

    Attributes:
        code: a stable word for programs, for example `invalid_value`.
    """

    def __init__(self, message: str, code: str = "invalid_value") -> None:
        self.code = code
        super().__init__(message)


class PromptTooLong(RequestError):
    """The prompt exceeds the window (`context_length_exceeded`) or the pool
    (`kv_capacity_exceeded`).
    """


class EngineOverloaded(RequestError):
    """The queue is full (`engine_overloaded`); the request itself may be legal.

    Attributes:
        retry_after_seconds: after which it would be taken, if requests go on leaving the queue as
            they do.
    """

    def __init__(self, message: str, retry_after_seconds: int) -> None:
        self.retry_after_seconds = retry_after_seconds
        super().__init__(message, "engine_overloaded")


class KVCacheFull(HeddleError):
    """No block is free now; the scheduler answers by preempting."""


class LayoutMismatch(HeddleError):
    """An object made for one KV layout met another one."""


class PlanMismatch(HeddleError):
    """Two views of one step differ; the step stops before a token is emitted.

    Attributes:
        kind: what differs, as one word of `MISMATCH_KINDS`.
        sketch: what the rank that refused understood of the step, by name; empty where it did not
            come to that.
    """

    def __init__(
        self, message: str, kind: str = "plan", sketch: Mapping[str, str] | None = None
    ) -> None:
        self.kind = kind
        self.sketch = dict(sketch or {})
        super().__init__(message)


class NumericsError(HeddleError):
    """NaN or inf where visible keys promised a finite value."""


class RankFailed(HeddleError):
    """A rank raised, died or missed its deadline; names the first failing rank and its cause."""


class CollectiveTimeout(RankFailed):
    """A collective did not end before its deadline."""


def quoted(value: object) -> str:
    """A value as a message repeats it: its literal on one line, cut where it is long.

    Of long texts, lists and numbers little more is looked at than is shown.

    Example:
        >>> quoted("ab"), len(quoted("ab" * 1_000_000)), quoted(["a"] * 20)
        ("'ab'", 64, "['a', 'a', 'a', 'a', 'a', 'a', ...]")
    """
    try:
        text = _REPR.repr(value)
    except ValueError:  # an integer of more digits than Python writes
        text = f"({type(value).__name__}, very long)"
    return text if len(text) <= MAX_QUOTED else f"{text[: MAX_QUOTED - 3]}..."


def counted(count: int, noun: str, plural: str = "") -> str:
    """A count with its noun.

    Args:
        count: how many.
        noun: of one.
        plural: of several; empty: with an s.
    Example:
        >>> counted(1, "rank"), counted(0, "rank"), counted(2, "entry", "entries")
        ('1 rank', '0 ranks', '2 entries')
    """
    return f"{count} {noun if count == 1 else plural or noun + 's'}"
