"""A request as its caller sees it: one prompt, its `n` answers, its times."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from heddle.config.sampling import RequestOutputKind, SamplingParams
from heddle.engine.answer import Answer, position_logprobs
from heddle.engine.outputs import PositionLogprobs, RequestMetrics, RequestOutput
from heddle.engine.recovery.refused import digest_of
from heddle.engine.tokenizer import Tokenizer
from heddle.errors import RequestError, quoted
from heddle.scheduler.request import Request
from heddle.step.batch import TokenLogprobs


@dataclass(slots=True, kw_only=True)
class RequestState:
    """Everything the driver keeps of a request."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    metrics: RequestMetrics
    sequences: list[Request]
    """As the scheduler knows them, by choice."""
    num_embedded: int = 0
    """First tokens of the prompt that embeddings stand for; their ids are fillers."""
    adapter: str | None = None
    """Name of the adapter that it goes through."""
    pin_seconds: float | None = None
    """To keep its prompt in the prefix cache for, once it is computed."""
    num_pinned_tokens: int = 0
    pinned_until: float | None = None
    """Monotonic time at which the pin ends; None: there is none."""
    answers: list[Answer]
    error: RequestError | None = None
    is_barred: bool = False
    """What it asks for left no permitted token."""
    _prompt_logprobs: list[PositionLogprobs | None] = field(init=False)

    def __post_init__(self) -> None:
        self._prompt_logprobs = [None] * len(self.prompt_token_ids)

    @property
    def is_finished(self) -> bool:
        """No answer goes on."""
        return all(answer.finish_reason is not None for answer in self.answers)

    def add_prompt_logprobs(
        self, first: int, found: Sequence[TokenLogprobs], tokenizer: Tokenizer | None
    ) -> None:
        """Keep values by position: a prompt computed twice, after a preemption, counts once, and
        keeps the values that may have been told.

        Args:
            first: position of the prompt token that `found[0]` is about.
            found: one entry per token.
            tokenizer: for the texts.
        """
        for position, entry in enumerate(found, start=first):
            if self._prompt_logprobs[position] is None:
                self._prompt_logprobs[position] = position_logprobs(entry, tokenizer)

    def renew_pin(self, now: float) -> None:
        """The cache is empty: pin the prompt once more for what is left of its time, when it has
        been computed again.
        """
        until, self.pinned_until = self.pinned_until, None
        if until is not None:
            self.num_pinned_tokens = 0
            self.pin_seconds = until - now if until > now else None

    def note_token(self, now: float) -> None:
        """The first token of any answer has come."""
        if self.metrics.first_token_time is None:
            self.metrics = dataclasses.replace(self.metrics, first_token_time=now)

    def note_drafts(self, num_drafts: int, num_rows: int) -> None:
        """A step has checked drafts of one of the answers.

        Args:
            num_drafts: guesses among its rows, >= 0.
            num_rows: rows that were drawn from, one more than it accepted; 0 if none was.
        """
        self.metrics = dataclasses.replace(
            self.metrics,
            num_drafts=self.metrics.num_drafts + num_drafts,
            num_accepted_drafts=self.metrics.num_accepted_drafts + max(0, num_rows - 1),
        )

    def note_failure(self) -> None:
        """No token could be drawn for one of the answers."""
        request = f"request {self.request_id}"
        if any(answer.matcher is not None and answer.matcher.is_stuck for answer in self.answers):
            self.error = RequestError(  # its description came with the request
                f"{request}: no token could go on with the text in the form that was asked for, or "
                "finding one took more work than the limits allow; the blocks of the request are "
                "wiped",
                "invalid_grammar",
            )
        elif self.is_barred:
            self.error = RequestError(
                f"{request}: what it asks for leaves no permitted token (allowed_token_ids, "
                "bad_words, min_tokens and structured_outputs together); the blocks of the request "
                "are wiped"
            )
        else:
            self.error = RequestError(
                f"{request}: the model gave no usable numbers (NaN or inf in the logits); the "
                "blocks of the request are wiped",
                "generation_failed",
            )

    def digest(self) -> bytes:
        """What it has in common with requests that would be computed alike."""
        embeddings = self.sequences[0].embeddings
        return digest_of(
            self.prompt_token_ids, self.params, adapter=self.adapter, embeddings=embeddings
        )

    def note_condemned(self) -> None:
        """Ranks failed each time that it was computed, at last alone."""
        self.error = RequestError(
            f"request {self.request_id}: ranks of the engine failed each time that it was "
            "computed, the last time without other requests beside it; do not send it again",
            "generation_failed",
        )

    def note_lost_adapter(self, why: str) -> None:
        """New ranks cannot go on with its adapter.

        Args:
            why: what is wrong with the adapter, behind its name.
        """
        self.error = RequestError(
            f"request {self.request_id}: ranks were started anew in the middle of it, and its "
            f"adapter {quoted(self.adapter)} {why}",
            "generation_failed",
        )

    def note_finished(self, now: float) -> None:
        """The last answer has ended."""
        self.metrics = dataclasses.replace(
            self.metrics,
            finished_time=now,
            num_preemptions=sum(sequence.num_preemptions for sequence in self.sequences),
        )

    def output(self) -> RequestOutput | None:
        """What its kind of output tells now; None when that is nothing yet."""
        kind = self.params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY and not self.is_finished:
            return None
        is_delta = kind is RequestOutputKind.DELTA
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids[self.num_embedded :],
            prompt_logprobs=(
                None if self.params.prompt_logprobs is None else tuple(self._prompt_logprobs)
            ),
            outputs=tuple(
                answer.news() if is_delta else answer.snapshot() for answer in self.answers
            ),
            finished=self.is_finished,
            metrics=self.metrics,
            num_cached_tokens=self.sequences[0].num_cached_tokens,
            no_hit_reason=self.sequences[0].no_hit_reason,
            num_pinned_tokens=self.num_pinned_tokens,
            error=self.error,
        )
