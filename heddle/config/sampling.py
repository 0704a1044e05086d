"""How the next token is chosen. Names and meanings as vLLM users know them.

A `SamplingParams` is checked once, when it is made: whoever holds one holds legal values. What
needs the model (token ids inside the vocabulary) is checked by `check_vocabulary` before a request
is admitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from heddle.config.structured import StructuredOutputsParams, structured_outputs
from heddle.errors import RequestError, quoted

MAX_CHOICES = 16
"""Largest `n`."""
MAX_LOGPROBS = 20
"""Largest number of alternatives per position."""
MIN_REPETITION = 1e-30
"""Smallest repetition penalty, and the largest is one over it: float32 logits stay finite."""
GREEDY_TEMPERATURE = 1e-5
"""A temperature below this picks the most likely token."""


class RequestOutputKind(StrEnum):
    """What each `RequestOutput` carries."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Validated once, at construction; see `docs/sampling.md` for the order of operations.

    `stop` and `bad_words` accept one string or a list, token id fields a list; all are kept as
    tuples. `structured_outputs` accepts a mapping of its fields.

    Raises:
        RequestError: a value outside its range; names the field, the value, the rule and the
            nearest legal value.
    """

    n: int = 1
    """Answers per prompt, 1 to 16; more than one needs a temperature."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token already in the output; -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the output; -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output; above 0."""
    temperature: float = 1.0
    """0 to 2; below 1e-5 the most likely token is taken."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose mass reaches this; (0, 1]."""
    top_k: int = 0
    """Keep exactly this many tokens; 0 or -1: all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one; 0 to 1."""
    seed: int | None = None
    """Fixes the draws of this request, whatever runs beside it; None: derived from the engine's
    seed."""
    stop: tuple[str, ...] = ()
    """Up to 4 strings that end the answer."""
    stop_token_ids: tuple[int, ...] = ()
    """Up to 128 token ids that end the answer."""
    ignore_eos: bool = False
    """Go on after the end-of-text token."""
    max_tokens: int | None = 16
    """Longest answer; None: all the room there is."""
    min_tokens: int = 0
    """Nothing but length ends the answer before this many tokens."""
    logprobs: int | None = None
    """Alternatives reported with each output token, 0 to 20; None: no log-probabilities."""
    prompt_logprobs: int | None = None
    """The same for each prompt token; switches prefix-cache hits off for the request."""
    detokenize: bool = True
    """False: token ids only, no text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Accepted for compatibility; byte-exact decoding adds no spaces of its own."""
    include_stop_str_in_output: bool = False
    """Keep the stop string, or the text of the stop token, in the answer."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What each `RequestOutput` of a stream carries."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form that the answer must have; a mapping of the fields will do."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of up to 1024 token ids; -100 to 100."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these ids can be drawn."""
    bad_words: tuple[str, ...] = ()
    """Up to 128 words that are never completed."""

    def __post_init__(self) -> None:
        _normalise(self)
        _check_numbers(self)
        _check_lengths(self)
        _check_lists(self)
        _check_together(self)

    @property
    def is_greedy(self) -> bool:
        """True when the most likely token is taken, without a draw."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """True when earlier tokens change the logits of later ones."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


def check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Refuse ids outside the vocabulary.

    Args:
        name: field or prompt that the ids came from, for the message.
        token_ids: ids to check; anything but an int is refused.
        vocab_size: of the model, in tokens.
    Raises:
        RequestError: names the first offending id and the legal range.
    """
    for token_id in token_ids:
        if not _is_int(token_id):
            raise RequestError(f"{name}: {quoted(token_id)} is not a token id; ids are integers")
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"{name}: token id {quoted(token_id)} outside 0..{vocab_size - 1}")


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Refuse parameters that name tokens the model does not have.

    Raises:
        RequestError: an id outside `0..vocab_size-1`, or a `top_k` or allow list larger than the
            vocabulary.
    """
    check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    check_token_ids("logit_bias", params.logit_bias or (), vocab_size)
    check_token_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    for name, count in (
        ("top_k", params.top_k),
        ("len(allowed_token_ids)", len(params.allowed_token_ids or ())),
    ):
        if count > vocab_size:
            raise _refusal(name, count, f"at most {vocab_size} (the vocabulary)", vocab_size)


def _refusal(name: str, value: object, rule: str, nearest: object = None) -> RequestError:
    hint = "" if nearest is None else f"; nearest legal: {nearest}"
    return RequestError(f"{name}={quoted(value)} is not legal; must be {rule}{hint}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _set(params: SamplingParams, name: str, value: Any) -> None:
    object.__setattr__(params, name, value)  # the one moment at which a frozen instance changes


def _normalise(params: SamplingParams) -> None:
    for name in ("stop", "bad_words"):
        value = getattr(params, name)
        _set(params, name, (value,) if isinstance(value, str) else _as_tuple(name, value) or ())
    _set(params, "stop_token_ids", _as_tuple("stop_token_ids", params.stop_token_ids) or ())
    _set(params, "allowed_token_ids", _as_tuple("allowed_token_ids", params.allowed_token_ids))
    _set(params, "output_kind", _as_output_kind(params.output_kind))
    _set(params, "structured_outputs", structured_outputs(params.structured_outputs))


def _as_tuple(name: str, value: Any) -> tuple[Any, ...] | None:
    if value is None:
        return None
    if isinstance(value, (str, bytes, dict)) or not isinstance(value, Iterable):
        raise _refusal(name, value, "a list")
    return tuple(value)


def _as_output_kind(value: Any) -> RequestOutputKind:
    try:
        return RequestOutputKind(value)
    except ValueError:
        legal = ", ".join(kind.value for kind in RequestOutputKind)
        raise _refusal("output_kind", value, f"one of {legal}") from None


def _check_numbers(params: SamplingParams) -> None:
    for name, low, high in (
        ("presence_penalty", -2.0, 2.0),
        ("frequency_penalty", -2.0, 2.0),
        ("temperature", 0.0, 2.0),
        ("min_p", 0.0, 1.0),
    ):
        value = _finite(name, getattr(params, name))
        if not low <= value <= high:
            raise _refusal(name, value, f"in {low:g}..{high:g}", min(max(value, low), high))
        _set(params, name, value)
    top_p = _finite("top_p", params.top_p)
    if not 0.0 < top_p <= 1.0:
        raise _refusal("top_p", top_p, "above 0 and at most 1", 1.0)
    _set(params, "top_p", top_p)
    repetition = _finite("repetition_penalty", params.repetition_penalty)
    if not MIN_REPETITION <= repetition <= 1 / MIN_REPETITION:
        rule = f"in {MIN_REPETITION:g}..{1 / MIN_REPETITION:g} (1 is off)"
        raise _refusal("repetition_penalty", repetition, rule, 1.0)
    _set(params, "repetition_penalty", repetition)


def _finite(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _refusal(name, value, "a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _refusal(name, value if isinstance(value, float) else number, "finite")
    return number


def _check_lengths(params: SamplingParams) -> None:
    _check_int("n", params.n, 1, MAX_CHOICES)
    _check_int("top_k", params.top_k, -1, 2**63 - 1)
    _check_int("min_tokens", params.min_tokens, 0, 2**63 - 1)
    if params.max_tokens is not None:
        _check_int("max_tokens", params.max_tokens, 1, 2**63 - 1)
    if params.seed is not None:
        _check_int("seed", params.seed, -(2**63), 2**63 - 1)
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            _check_int(name, getattr(params, name), 0, MAX_LOGPROBS)
    for name in (
        "ignore_eos",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
    ):
        if not isinstance(getattr(params, name), bool):
            raise _refusal(name, getattr(params, name), "true or false")


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if not _is_int(value):
        raise _refusal(name, value, "an integer")
    if not low <= value <= high:
        raise _refusal(name, value, f"in {low}..{high}", min(max(value, low), high))


def _check_lists(params: SamplingParams) -> None:
    _check_strings("stop", params.stop, 4)
    _check_strings("bad_words", params.bad_words, 128)
    if len(params.stop_token_ids) > 128:
        raise _refusal("len(stop_token_ids)", len(params.stop_token_ids), "at most 128", 128)
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise _refusal("allowed_token_ids", [], "at least one id, or absent")
    for name in ("stop_token_ids", "allowed_token_ids"):
        check_token_ids(name, getattr(params, name) or (), 2**63)
    _check_bias(params)


def _check_strings(name: str, strings: tuple[Any, ...], most: int) -> None:
    if len(strings) > most:
        raise _refusal(f"len({name})", len(strings), f"at most {most}", most)
    for string in strings:
        if not isinstance(string, str):
            raise _refusal(name, string, "a string, or a list of strings")
        try:
            size = len(string.encode())
        except UnicodeEncodeError:
            raise _refusal(name, string, "valid Unicode text") from None
        if not 1 <= size <= 256:
            raise _refusal(f"{name} of {size} bytes", string[:32], "1 to 256 bytes long")


def _check_bias(params: SamplingParams) -> None:
    bias = params.logit_bias
    if bias is None:
        return
    if not isinstance(bias, dict):
        raise _refusal("logit_bias", bias, "a mapping of token id to number")
    if len(bias) > 1024:
        raise _refusal("len(logit_bias)", len(bias), "at most 1024", 1024)
    check_token_ids("logit_bias", bias, 2**63)
    checked = {}
    for token_id, value in bias.items():
        number = _finite(f"logit_bias[{token_id}]", value)
        if not -100.0 <= number <= 100.0:
            nearest = min(max(number, -100.0), 100.0)
            raise _refusal(f"logit_bias[{token_id}]", number, "in -100..100", nearest)
        checked[token_id] = number
    _set(params, "logit_bias", checked)


def _check_together(params: SamplingParams) -> None:
    if params.n > 1 and params.is_greedy:
        raise _refusal("n", params.n, f"1 with temperature={params.temperature:g} (greedy)", 1)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        rule = f"at most max_tokens={params.max_tokens}"
        raise _refusal("min_tokens", params.min_tokens, rule, params.max_tokens)
    if params.stop and not params.detokenize:
        raise _refusal("detokenize", False, "true when stop strings are given", True)
