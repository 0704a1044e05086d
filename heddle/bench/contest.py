"""Engines that answer the same prompts in turn; a time counts only beside equal tokens.

Every answer is greedy, has the length that was asked for, and is timed in two parts: until all
prompts have their first token, and after that.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple, Protocol

from heddle.bench.timing import interleaved
from heddle.config.engine import EngineConfig
from heddle.config.sampling import RequestOutputKind, SamplingParams
from heddle.engine.driver import Driver
from heddle.engine.inputs import PromptInput
from heddle.engine.outputs import RequestOutput
from heddle.engine.tokenizer import Tokenizer
from heddle.verify.prompts import shipped_text

_WARM_TOKENS = 2
_WARM_LENGTH = 64
"""Prompt that is run once before anything is timed: what compiles or allocates does it then."""


class Answered(NamedTuple):
    """One run over some prompts."""

    tokens: tuple[tuple[int, ...], ...]
    first_seconds: float
    """Until every prompt has its first token."""
    rest_seconds: float
    """From then on."""


class Contestant(Protocol):
    """An engine that is timed."""

    @property
    def name(self) -> str:
        """For the table."""
        ...

    @property
    def is_exact(self) -> bool:
        """It computes in float32 on float32 weights, so that its tokens are to be the same."""
        ...

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Answered:
        """Complete every prompt by exactly `num_tokens` tokens."""
        ...


class HeddleEngine:
    """An engine that is driven from this process."""

    def __init__(self, driver: Driver, name: str = "heddle") -> None:
        self._driver = driver
        self.name = name
        plan = driver.resolved
        is_wide = plan.dtype == plan.kv_cache_dtype == "float32"
        self.is_exact = is_wide and plan.quantization == "none"

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Answered:
        """Complete prompts; see `Contestant.run`."""
        driver = self._driver
        params = SamplingParams(
            temperature=0.0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE,
        )
        latest: dict[str, RequestOutput] = {}
        first_seconds = 0.0
        started = time.perf_counter()
        order = [driver.add(PromptInput(token_ids=tuple(prompt)), params) for prompt in prompts]
        while driver.has_work:
            latest |= {output.request_id: output for output in driver.step()}
            if not first_seconds and len(latest) == len(order):
                first_seconds = time.perf_counter() - started
        total_seconds = time.perf_counter() - started
        tokens = tuple(latest[request_id].outputs[0].token_ids for request_id in order)
        return Answered(tokens, first_seconds, total_seconds - first_seconds)


def race(
    contestants: Sequence[Contestant],
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    rounds: int,
) -> list[dict[str, Any]]:
    """Let all answer the same prompts, in turn.

    Args:
        contestants: the first is the one to compare with.
        prompts: token ids, all of one length.
        num_tokens: of each answer, at least 2.
        rounds: times that each answers.
    Returns:
        One row per contestant: `name, agrees, equal_tokens, ttft_s, prefill_tok_s, decode_tok_s`
        (medians), `best_...` (of the quickest round) and `ratio_...`: how often the first one is
        quicker than it. Where both are exact and tokens differ, there are no times.
    """
    warm = [tuple(prompt[:_WARM_LENGTH]) for prompt in prompts]
    for contestant in contestants:
        contestant.run(warm, _WARM_TOKENS)
    calls = {each.name: partial(each.run, prompts, num_tokens) for each in contestants}
    answers = interleaved(calls, rounds)
    golden = answers[contestants[0].name][0].tokens
    num_prompt_tokens = sum(map(len, prompts))
    must_agree = contestants[0].is_exact
    rows = [
        _row(
            each,
            answers[each.name],
            golden,
            num_prompt_tokens,
            must_agree=must_agree and each.is_exact and each is not contestants[0],
        )
        for each in contestants
    ]
    return [{**row, **_ratios(rows[0], row)} for row in rows]


def _row(
    contestant: Contestant,
    answers: Sequence[Answered],
    golden: tuple[tuple[int, ...], ...],
    num_prompt_tokens: int,
    *,
    must_agree: bool,
) -> dict[str, Any]:
    equal = min(_equal_tokens(answer.tokens, golden) for answer in answers)
    num_tokens = sum(map(len, golden))
    counts = not must_agree or equal == num_tokens
    row = {
        "name": contestant.name,
        "agrees": equal == num_tokens,
        "equal_tokens": equal / num_tokens,
    }
    return {**row, **(_rates(answers, golden, num_prompt_tokens) if counts else _NO_RATES)}


_NO_RATES: Mapping[str, None] = dict.fromkeys(
    ("ttft_s", "prefill_tok_s", "decode_tok_s", "best_prefill_tok_s", "best_decode_tok_s")
)


def _rates(
    answers: Sequence[Answered], golden: tuple[tuple[int, ...], ...], num_prompt_tokens: int
) -> dict[str, float]:
    first = [answer.first_seconds for answer in answers]
    rest = [answer.rest_seconds for answer in answers]
    num_decoded = sum(len(ids) - 1 for ids in golden)
    return {
        "ttft_s": median(first),
        "prefill_tok_s": num_prompt_tokens / median(first),
        "decode_tok_s": num_decoded / median(rest),
        "best_prefill_tok_s": num_prompt_tokens / min(first),
        "best_decode_tok_s": num_decoded / min(rest),
    }


def _ratios(first: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, float | None]:
    return {
        f"ratio_{phase}": None
        if row[f"{phase}_tok_s"] is None
        else first[f"{phase}_tok_s"] / row[f"{phase}_tok_s"]
        for phase in ("prefill", "decode")
    }


def _equal_tokens(found: Sequence[Sequence[int]], golden: Sequence[Sequence[int]]) -> int:
    """Tokens up to the first difference, over all prompts."""
    return sum(_common_prefix(a, b) for a, b in zip(found, golden, strict=True))


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    differing = (place for place, (a, b) in enumerate(pairs) if a != b)
    return next(differing, min(len(left), len(right)))


def text_prompts(
    tokenizer: Tokenizer | None, vocab_size: int, length: int, count: int
) -> list[list[int]]:
    """Prompts of English text, all of one length, each beginning at another place.

    Args:
        tokenizer: of the model; None: the bytes of the text serve as ids.
        vocab_size: ids are below it.
        length: tokens of each.
        count: how many.
    """
    text = shipped_text()
    ids = list(tokenizer.encode(text)) if tokenizer else [b % vocab_size for b in text.encode()]
    starts = [index * 37 % len(ids) for index in range(count)]
    repeated = ids * (length // len(ids) + 2)
    return [repeated[start : start + length] for start in starts]


def bench_config(config: EngineConfig, *, num_streams: int) -> EngineConfig:
    """The configuration with all streams running at once and nothing reused between rounds."""
    seats = max(num_streams, 1)
    return dataclasses.replace(
        config,
        cache=dataclasses.replace(config.cache, enable_prefix_caching=False),
        scheduler=dataclasses.replace(config.scheduler, max_num_seqs=seats),
    )
