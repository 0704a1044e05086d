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

A message gives the value, the rule and the nearest legal choices, in that order.
"""

from __future__ import annotations

from collections.abc import Sequence


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
    """Two views of one step differ; the step stops before a token is emitted."""


class NumericsError(HeddleError):
    """NaN or inf where visible keys promised a finite value."""


class RankFailed(HeddleError):
    """A rank raised, died or missed its deadline; names the first failing rank and its cause."""


class CollectiveTimeout(RankFailed):
    """A collective did not end before its deadline."""
