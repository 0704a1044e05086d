"""Prompts of a load: random, so that only the prefix that is asked for can be found in a cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_TEXT = (
    "warp weft loom cloth thread reed shuttle beam heddle pattern colour blue green amber white "
    "river stone house garden winter summer morning evening letter number answer question window "
    "market harbour bridge forest mountain island village teacher doctor sailor captain music "
    "paper silver copper water bread apple orange lemon sugar the a of in on under over between "
    "before after because when where while quickly slowly never always often seldom small large "
    "early late"
)
WORDS = tuple(_TEXT.split())
"""Common words, each about one token of most vocabularies."""

Prompt = list[int] | str


def token_prompts(
    pool: Sequence[int], *, num: int, length: int, prefix: int, seed: int
) -> list[Prompt]:
    """Prompts as token ids.

    Args:
        pool: ids to draw from.
        num: of prompts.
        length: ids of each behind the prefix.
        prefix: ids that all begin with.
        seed: of the draws.
    """
    draw = np.random.default_rng(seed)
    ids = np.asarray(pool)
    common = draw.choice(ids, prefix).tolist()
    return [common + draw.choice(ids, length).tolist() for _ in range(num)]


def text_prompts(*, num: int, length: int, prefix: int, seed: int) -> list[Prompt]:
    """Prompts as words; lengths count words, as `token_prompts` counts ids."""
    indices = token_prompts(range(len(WORDS)), num=num, length=length, prefix=prefix, seed=seed)
    return [" ".join(WORDS[int(index)] for index in prompt) for prompt in indices]


def send_times(num: int, *, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start at which requests are sent, the first at 0.

    Gaps are drawn from a gamma distribution of shape `burstiness` and mean 1 / `rate`: 1 is a
    Poisson process, less comes in bursts, more comes evenly.

    Args:
        num: of requests.
        rate: mean requests per second; infinite: all at once.
        burstiness: above 0.
        seed: of the draws.
    """
    if rate == float("inf"):
        return [0.0] * num
    draw = np.random.default_rng(seed)
    gaps = draw.gamma(shape=burstiness, scale=1.0 / (rate * burstiness), size=max(num - 1, 0))
    return [0.0, *np.cumsum(gaps).tolist()][:num]
