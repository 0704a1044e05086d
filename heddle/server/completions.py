"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from starlette.requests import Request

from heddle.engine.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from heddle.engine.text import Detokenizer
from heddle.errors import counted
from heddle.server.answering import answer_request
from heddle.server.caller import Caller
from heddle.server.errors import ApiError
from heddle.server.job import Job
from heddle.server.logprobs import (
    TextOffsets,
    TokenNames,
    completion_logprobs,
    prompt_logprobs_of,
    spelled_range,
)
from heddle.server.prompts import answer_name, check_salt, parse_prompts, prompt_input
from heddle.server.requests import CompletionRequest
from heddle.server.sampling import check_logprobs, sampling_params
from heddle.server.serving import Serving
from heddle.server.streaming import HeldAnswers, stream_options
from heddle.server.usage import Envelope, Usage

KIND = "text_completion"
DEFAULT_MAX_TOKENS = 16
MAX_ANSWERS = 256
"""Prompts times `n`, in one request."""


async def create_completion(request: Request) -> Any:
    """Complete prompts, as a stream or as one answer."""
    return await answer_request(request, CompletionRequest, Completion)


class Completion:
    """A completion request that was read, and how its outputs are written; see `Answering`."""

    chunk_kind = KIND

    def __init__(self, serving: Serving, asked: CompletionRequest) -> None:
        """Check the fields that need no tokens.

        Raises:
            ApiError: one is not legal.
        """
        stream_options(asked)
        if asked.suffix:
            raise ApiError(
                "suffix is not served; write the model's own marks for filling in the middle into "
                "prompt",
                "unsupported_parameter",
                param="suffix",
            )
        check_salt(asked.cache_salt)
        check_logprobs(asked.logprobs, serving.config.max_logprobs, "logprobs")
        check_logprobs(asked.prompt_logprobs, serving.config.max_logprobs, "prompt_logprobs")
        self._serving = serving
        self._asked = asked
        self._adapter = serving.adapter_of(asked.model)
        self._prompts = parse_prompts(asked.prompt)
        self._wants_tokens = asked.max_tokens != 0
        if not self._wants_tokens and not asked.echo:
            raise ApiError(
                "max_tokens=0 is legal with echo only; must be at least 1", param="max_tokens"
            )
        self._shows_prompt_logprobs = asked.prompt_logprobs is not None
        if asked.echo and asked.logprobs is not None and asked.prompt_logprobs is None:
            asked.prompt_logprobs = asked.logprobs
        limit = DEFAULT_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens
        if not self._wants_tokens:
            asked.min_tokens, limit = None, 1
        self._params = sampling_params(
            asked, defaults=serving.sampling_defaults, max_tokens=limit, logprobs=asked.logprobs
        )
        if len(self._prompts) * self._params.n > MAX_ANSWERS:
            raise ApiError(
                f"{counted(len(self._prompts), 'prompt')} x n={self._params.n} are too many "
                f"answers; at most {MAX_ANSWERS} in one request",
                param="n",
            )
        self._names = TokenNames(serving.tokenizer, as_ids=bool(asked.return_tokens_as_token_ids))
        self._offsets: dict[int, TextOffsets] = {}
        """By place; of answers that have begun."""
        self._held = HeldAnswers()
        self.envelope = Envelope(
            "cmpl", asked.model or serving.names[0], serving.fingerprint, answer_name(asked)
        )

    async def submit(self, caller: Caller) -> Job:
        """Queue all prompts."""
        asked = self._asked
        specials = True if asked.add_special_tokens is None else asked.add_special_tokens
        inputs = [
            prompt_input(prompt, add_special_tokens=specials, cache_salt=asked.cache_salt)
            for prompt in self._prompts
        ]
        return await self._serving.submit(
            inputs,
            self._params,
            adapter=self._adapter,
            wishes=asked,
            needs_tokens=self._wants_tokens,
            caller=caller,
        )

    def document(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The whole answer."""
        usage = Usage(hides_cached=self._serving.config.hide_cached_tokens)
        choices: list[dict[str, Any]] = []
        for index, output in enumerate(outputs):
            usage.note(index, output)
            choices += self.chunks(index, output)
        return self.envelope.document(KIND, choices, usage=usage.document())

    def chunks(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """What an output brings, choice by choice; nothing for one without news."""
        for answer in output.outputs:
            place = index * self._params.n + answer.index
            is_first = place not in self._offsets
            has_begun = bool(answer.token_ids or answer.finish_reason)
            is_news = bool(answer.text or answer.finish_reason) or (
                has_begun and bool(self._asked.return_token_ids or (is_first and self._asked.echo))
            )
            whole = self._held.take(place, answer, is_news=is_news)
            if whole is not None:
                yield self._choice(place, output, whole, is_first=is_first)

    def _choice(
        self, place: int, output: RequestOutput, answer: CompletionOutput, *, is_first: bool
    ) -> dict[str, Any]:
        asked = self._asked
        echo = self._prompt_text(output) if is_first and asked.echo else ""
        if is_first:
            self._offsets[place] = self._text_offsets(output, len(echo))
        choice: dict[str, Any] = {
            "index": place,
            "text": echo + answer.text,
            "logprobs": None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if answer.logprobs is not None:
            ids: list[int] = [*answer.token_ids]
            positions: list[PositionLogprobs | None] = [*answer.logprobs]
            offsets = self._offsets[place].take(ids)
            if is_first and asked.echo and output.prompt_logprobs is not None:
                ids = [*output.prompt_token_ids, *ids]
                positions = [*output.prompt_logprobs, *positions]
                offsets = [*self._prompt_offsets(output), *offsets]
            choice["logprobs"] = completion_logprobs(positions, ids, self._names, offsets)
        if self._shows_prompt_logprobs and is_first:
            choice["prompt_logprobs"] = prompt_logprobs_of(output.prompt_logprobs or ())
        if asked.return_token_ids:
            choice["token_ids"] = list(answer.token_ids)
            choice["prompt_token_ids"] = list(output.prompt_token_ids) if is_first else None
        return choice

    def _text_offsets(self, output: RequestOutput, first: int) -> TextOffsets:
        """Of the answer, which goes on with a character that its prompt has begun."""
        tokenizer = self._serving.tokenizer
        if tokenizer is None:
            return TextOffsets(None, first)
        detokenizer = Detokenizer(
            tokenizer,
            prompt_token_ids=output.prompt_token_ids,
            skip_special_tokens=self._params.skip_special_tokens,
        )
        return TextOffsets(detokenizer, first)

    def _prompt_offsets(self, output: RequestOutput) -> list[int]:
        """Of the prompt; special tokens that were added to a text are not part of it."""
        tokenizer, token_ids = self._serving.tokenizer, output.prompt_token_ids
        if tokenizer is None:
            return TextOffsets(None).take(token_ids)
        first, end = 0, len(token_ids)
        if output.prompt is not None:
            first, end = spelled_range(tokenizer, output.prompt, token_ids)
        offsets = TextOffsets(Detokenizer(tokenizer, skip_special_tokens=False))
        spelled = offsets.take(token_ids[first:end])
        behind = len(output.prompt or "")
        return [0] * first + spelled + [behind] * (len(token_ids) - end)

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        tokenizer = self._serving.tokenizer
        if tokenizer is None:
            return ""
        return tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
