"""One answer as it grows: ids, text, log-probabilities, and how much of them was told already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from heddle.config.sampling import SamplingParams
from heddle.engine.grammar.matcher import Matcher
from heddle.engine.outputs import CompletionOutput, Logprob, PositionLogprobs
from heddle.engine.text import Detokenizer, StopMatcher, TextAssembler
from heddle.engine.tokenizer import Tokenizer
from heddle.scheduler.request import FinishReason
from heddle.step.batch import SampledToken, TokenLogprobs


def create_assembler(
    tokenizer: Tokenizer | None, params: SamplingParams, prompt_token_ids: Sequence[int]
) -> TextAssembler | None:
    """The text machine of an answer; None when no text is wanted, or no tokenizer exists."""
    if tokenizer is None or not params.detokenize:
        return None
    detokenizer = Detokenizer(
        tokenizer,
        prompt_token_ids=prompt_token_ids,
        skip_special_tokens=params.skip_special_tokens,
    )
    matcher = StopMatcher(params.stop, include_stop=params.include_stop_str_in_output)
    return TextAssembler(detokenizer, matcher)


def position_logprobs(found: TokenLogprobs, tokenizer: Tokenizer | None) -> PositionLogprobs:
    """The chosen token, then the alternatives; the chosen one keeps its own rank and value."""
    entries = {found.token_id: (found.logprob, found.rank)}
    pairs = zip(found.top_token_ids, found.top_logprobs, strict=True)
    for rank, (token_id, logprob) in enumerate(pairs, start=1):
        entries.setdefault(token_id, (logprob, rank))
    return {
        token_id: Logprob(logprob, rank, _token_text(tokenizer, token_id))
        for token_id, (logprob, rank) in entries.items()
    }


def _token_text(tokenizer: Tokenizer | None, token_id: int) -> str | None:
    if tokenizer is None:
        return None
    return tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")


@dataclass(slots=True, kw_only=True)
class Answer:
    """State of one of the `n` answers of a request."""

    index: int
    params: SamplingParams
    tokenizer: Tokenizer | None
    assembler: TextAssembler | None
    returns_logits: bool = False
    matcher: Matcher | None = None
    """Of the grammar that it follows."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    logits: list[bytes] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    _told_text: int = 0
    _told_tokens: int = 0

    def add(
        self, sampled: SampledToken, finish_reason: FinishReason | None, stop_id: int | str | None
    ) -> str | None:
        """Add the token of a step.

        Args:
            sampled: the token, with what was asked for beside it.
            finish_reason: set when this token ends the answer by its id or by length.
            stop_id: the stop id that it is, if any.
        Returns:
            The stop string that its text completes; it ends the answer, and outranks the ids. A
            grammar that permits nothing more ends it, too.
        """
        if sampled.token_id is None:
            raise ValueError("a step without a token adds nothing to an answer")
        self.token_ids.append(sampled.token_id)
        if sampled.logprobs is not None:
            self.logprobs.append(position_logprobs(sampled.logprobs, self.tokenizer))
            self.cumulative_logprob += sampled.logprobs.logprob
        if sampled.logits is not None and self.returns_logits:
            self.logits.append(sampled.logits)
        text, stop = self._assemble(sampled.token_id, finish_reason)
        self.text += text
        if stop is not None:
            finish_reason, stop_id = "stop", stop
        elif finish_reason != "stop" and self._completes_form(sampled.token_id):
            finish_reason = "stop"
            self.text += self.assembler.finish() if self.assembler is not None else ""
        self.finish_reason, self.stop_reason = finish_reason, stop_id
        return stop

    def cut_short(self, reason: FinishReason) -> None:
        """End an answer between tokens: its client has gone, or its request failed."""
        if self.assembler is not None:
            self.text += self.assembler.finish()
        self.finish_reason = reason

    def snapshot(self) -> CompletionOutput:
        """Everything so far."""
        return self._output(0, 0)

    def news(self) -> CompletionOutput:
        """What was not told yet; the next call does not repeat it."""
        output = self._output(self._told_text, self._told_tokens)
        self._told_text, self._told_tokens = len(self.text), len(self.token_ids)
        return output

    def _output(self, first_character: int, first_token: int) -> CompletionOutput:
        has_logprobs = self.params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text=self.text[first_character:],
            token_ids=tuple(self.token_ids[first_token:]),
            cumulative_logprob=self.cumulative_logprob if has_logprobs else None,
            logprobs=tuple(self.logprobs[first_token:]) if has_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logits=tuple(self.logits[first_token:]) if self.returns_logits else None,
        )

    def _completes_form(self, token_id: int) -> bool:
        """The grammar permits nothing after this token."""
        if self.matcher is None:
            return False
        self.matcher.accept(token_id)
        return self.matcher.is_done

    def _assemble(
        self, token_id: int, finish_reason: FinishReason | None
    ) -> tuple[str, str | None]:
        if self.assembler is None:
            return "", None
        if finish_reason == "stop":
            keep_text = self.params.include_stop_str_in_output
            return self.assembler.push_last(token_id, keep_text=keep_text)
        may_stop = len(self.token_ids) >= self.params.min_tokens
        text, stop = self.assembler.push(token_id, may_stop=may_stop)
        if stop is None and finish_reason is not None:
            text += self.assembler.finish()
        return text, stop
