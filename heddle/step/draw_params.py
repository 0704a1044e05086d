"""What of a request's sampling parameters ranks need to draw a token.

They travel with every row of every step, so they are few, leave their defaults out of the message,
and were validated once, when the request came.
"""

from __future__ import annotations

import msgspec

from heddle.config.sampling import SamplingParams


class DrawParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fields as in `SamplingParams`, of legal values."""

    is_greedy: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    has_penalties: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None

    @classmethod
    def of(cls, params: SamplingParams) -> DrawParams:
        """Those of a request.

        Example:
            >>> DrawParams.of(SamplingParams(temperature=0.0, stop="the end"))
            DrawParams(is_greedy=True, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, \
has_penalties=False, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, \
min_tokens=0, stop_token_ids=(), logprobs=None, logit_bias=None, allowed_token_ids=None)
        """
        return cls(
            is_greedy=params.is_greedy,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            has_penalties=params.has_penalties,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            min_tokens=params.min_tokens,
            stop_token_ids=params.stop_token_ids,
            logprobs=params.logprobs,
            logit_bias=params.logit_bias,
            allowed_token_ids=params.allowed_token_ids,
        )
