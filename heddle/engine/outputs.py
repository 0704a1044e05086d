"""What a caller gets back. Plain data; every count is always there."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from heddle.errors import RequestError
from heddle.scheduler.request import FinishReason


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token at one position, in the model's raw distribution."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    decoded_token: str | None
    """Its text alone; None without a tokenizer."""


PositionLogprobs = dict[int, Logprob]
"""By token id: the chosen token first, then the best alternatives, most likely first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Times on the monotonic clock, in seconds, and counts over all choices together."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_drafts: int = 0
    """Guessed tokens that were checked."""
    num_accepted_drafts: int = 0
    """Of these the right ones; each saved a step."""

    @property
    def draft_acceptance(self) -> float | None:
        """Share of the drafts that were right; None where none was made."""
        return self.num_accepted_drafts / self.num_drafts if self.num_drafts else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One answer."""

    index: int
    """Among the `n` of its request."""
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    """Sum over the chosen tokens; None unless `logprobs` was asked for."""
    logprobs: tuple[PositionLogprobs, ...] | None
    """One entry per token."""
    finish_reason: FinishReason | None
    """None while it goes on."""
    stop_reason: int | str | None
    """The stop string or id that ended it."""
    logits: tuple[bytes, ...] | None = field(default=None, repr=False)
    """Raw rows, one per token, when the driver was asked to return them (verification)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """One request: all its answers so far, or what is new in them (`RequestOutputKind`)."""

    request_id: str
    prompt: str | None
    """None when token ids were passed."""
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None
    """One entry per prompt token, the first None; None unless asked for."""
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int
    """Prompt tokens taken from the prefix cache."""
    no_hit_reason: str = ""
    """Why there are none."""
    num_pinned_tokens: int = 0
    """Prompt tokens that stay in the prefix cache because the request asked for it."""
    error: RequestError | None = None
    """Why the request failed; then it is finished and `outputs` is what it had so far."""


def merged(first: RequestOutput, later: RequestOutput) -> RequestOutput:
    """Two outputs of kind DELTA as one: what both say is new, in order.

    Args:
        first: told earlier.
        later: of the same request, told next.
    """
    outputs = tuple(joined(a, b) for a, b in zip(first.outputs, later.outputs, strict=True))
    return dataclasses.replace(later, outputs=outputs)


def joined(first: CompletionOutput, later: CompletionOutput) -> CompletionOutput:
    """The same for one answer."""
    return dataclasses.replace(
        later,
        text=first.text + later.text,
        token_ids=first.token_ids + later.token_ids,
        logprobs=None if later.logprobs is None else (first.logprobs or ()) + later.logprobs,
        logits=None if later.logits is None else (first.logits or ()) + later.logits,
    )
