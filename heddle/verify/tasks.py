"""Tasks that a layout is trusted by: how well a text is predicted, and keys that a text hides.

Pure: prompts are drawn and answers are scored here; `task_runs` asks the engine. A key is found by
a model that has learnt to look things up; one that has not still gives the same answers everywhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from heddle.errors import ConfigError, NumericsError
from heddle.verify.oracles import RELATIVE_TOLERANCE

Task = Literal["perplexity", "passkey"]

PERPLEXITY_TOKENS = 512
PASSKEY_LENGTH = 2048
NUM_PASSKEYS = 16
NUM_DIGITS = 5
ANSWER_TOKENS = NUM_DIGITS + 1
"""A vocabulary may spend one on the space before the digits."""
FACT = "The pass key is "
QUESTION = "What is the pass key? The pass key is "
SEED = "depths and keys"

WIDE_DIFFERENCE = 1e-5
NARROW_DIFFERENCE = 1e-2
_MIN_LENGTH = len(FACT) + NUM_DIGITS + len(". ") + len(QUESTION) + 1


@dataclass(frozen=True, slots=True)
class Passkey:
    """One question with its answer."""

    prompt: str
    key: str
    """Five different digits, which stand nowhere else in the prompt."""


def draw_passkeys(
    text: str, *, length: int = PASSKEY_LENGTH, count: int = NUM_PASSKEYS, seed: str = SEED
) -> tuple[Passkey, ...]:
    """Prompts of equal length whose keys lie from the very start to right before the question.

    Digits of a key differ: two layers match what stands after a character, and cannot tell two
    equal ones apart.

    Args:
        text: the filler, without digits; repeated where it is too short.
        length: characters of each prompt.
        count: prompts, at least 1.
        seed: of keys and of the places where the filler starts.
    Raises:
        ConfigError: fact and question alone are longer than `length`.
    """
    if length < _MIN_LENGTH:
        raise ConfigError(
            f"a pass key does not fit {length} characters (nearest: {_MIN_LENGTH}); "
            "a larger max_model_len is needed"
        )
    rng = random.Random(seed)
    prose = " ".join(text.split()) + " "
    prose_twice = prose * (2 + length // len(prose))
    drawn = []
    for number in range(count):
        key = "".join(rng.sample("0123456789", NUM_DIGITS))
        fact = f"{FACT}{key}. "
        room = length - len(fact) - len(QUESTION)
        start = rng.randrange(len(prose))
        filler = prose_twice[start : start + room - 1] + " "
        depth = filler.rfind(" ", 0, room * number // max(1, count - 1)) + 1
        drawn.append(Passkey(filler[:depth] + fact + filler[depth:] + QUESTION, key))
    return tuple(drawn)


def passkeys_that_fit(
    text: str,
    encode: Callable[[str], Sequence[int]],
    *,
    max_model_len: int,
    count: int = NUM_PASSKEYS,
) -> tuple[Passkey, ...]:
    """The same, of 2,048 characters, or of as many as leave room for the answer.

    Args:
        text: the filler.
        encode: text -> token ids.
        max_model_len: window in tokens.
        count: prompts.
    Raises:
        ConfigError: not even fact and question fit the window.
    """
    room = max_model_len - ANSWER_TOKENS
    length = PASSKEY_LENGTH
    while True:
        drawn = draw_passkeys(text, length=length, count=count)
        longest = max(len(encode(passkey.prompt)) for passkey in drawn)
        if longest <= room:
            return drawn
        length = min(length - 1, length * max(0, room) // longest)


def is_found(answer: str, key: str) -> bool:
    """The answer starts with the five digits."""
    return answer.lstrip().startswith(key)


def accuracy(answers: Sequence[str], keys: Sequence[str]) -> float:
    """Share of the keys that were found, 0 to 1."""
    right = [is_found(answer, key) for answer, key in zip(answers, keys, strict=True)]
    return sum(right) / len(right)


def perplexity_prompt(ids: Sequence[int], *, max_model_len: int) -> tuple[int, ...]:
    """The first 512 tokens, or as many as leave room for one more.

    Args:
        ids: token ids of the text.
        max_model_len: window in tokens.
    Raises:
        ConfigError: fewer than two tokens are left, so that none is predicted.
    """
    prompt = tuple(ids[: min(PERPLEXITY_TOKENS, max(0, max_model_len - 1))])
    if len(prompt) < 2:
        raise ConfigError(
            f"max_model_len={max_model_len} leaves {len(prompt)} tokens of a text of {len(ids)}; "
            "a perplexity needs 2 (nearest: 3)"
        )
    return prompt


def perplexity(logprobs: Sequence[float]) -> float:
    """exp of the mean negative log-probability.

    Args:
        logprobs: of each token after the first, in nats.
    Raises:
        NumericsError: it is not finite.
    Example:
        >>> round(perplexity([-1.0, -3.0]), 3)
        7.389
    """
    mean = -sum(logprobs) / len(logprobs)
    try:
        found = math.exp(mean)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise NumericsError(f"the text has a mean log-probability of {-mean}")
    return found


def relative_difference(found: float, one_rank: float) -> float:
    """Distance of two perplexities as a share of the one rank's.

    Example:
        >>> relative_difference(11.0, 10.0)
        0.1
    """
    return abs(found - one_rank) / one_rank


def largest_difference(dtype: str, kv_cache_dtype: str) -> float:
    """What a perplexity over ranks may differ from that of one rank of the same types: rounding,
    1e-5 where the computation and the cache are float32 or float64; else 1e-2.

    Example:
        >>> largest_difference("float32", "float32"), largest_difference("float32", "int8")
        (1e-05, 0.01)
    """
    is_wide = dtype in RELATIVE_TOLERANCE and kv_cache_dtype in RELATIVE_TOLERANCE
    return WIDE_DIFFERENCE if is_wide else NARROW_DIFFERENCE
