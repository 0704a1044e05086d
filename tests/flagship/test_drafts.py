"""Drafts on any layout: the answers of one rank without drafts, token for token."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from heddle.config import SamplingParams, SpeculativeConfig
from heddle.engine.driver import Driver
from heddle.engine.inputs import PromptInput
from heddle.engine.outputs import CompletionOutput
from heddle.step.batch import GlobalBatch, RankReply
from tests.flagship.conftest import GoldenModels
from tests.support.flagship import Case, layouts, open_driver, resolve_case, with_sizes
from tests.support.tiny import build_tiny

MODEL = "llama-8-2"
DRAFTS = SpeculativeConfig(num_speculative_tokens=5, prompt_lookup_min=1, prompt_lookup_max=3)
NUM_TOKENS = 18
FEW = (5, 11, 17, 23)
"""Tokens that most answers are drawn from, so that runs of them come back."""


def kinds() -> tuple[SamplingParams, ...]:
    """Greedy and seeded, with everything that looks at earlier outputs."""

    def params(**fields: Any) -> SamplingParams:
        return SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **fields)

    return (
        params(temperature=0.0),
        params(temperature=0.0, allowed_token_ids=FEW),
        params(temperature=0.7, seed=3, allowed_token_ids=FEW),
        params(temperature=1.0, seed=4, allowed_token_ids=FEW[:2], frequency_penalty=0.3),
        params(temperature=0.0, allowed_token_ids=FEW, repetition_penalty=1.1),
        params(temperature=0.5, seed=9, n=2, top_p=0.9, allowed_token_ids=FEW[:3]),
    )


PROMPTS = (
    (5, 11, 17, 23, 40) * 5,
    (9,),
    (5, 11) * 4,
    (60, 61, 62) * 3 + (60,),
    (7, 5, 7),
    (5,) * 6,
)


@dataclass
class Watch:
    """Counts wrong drafts by the borders that lie between them and the last right token."""

    num_accepted: int = 0
    num_rejected: int = 0
    over_run: int = 0
    over_block: int = 0

    def look(self, batch: GlobalBatch, replies: Sequence[RankReply], case: Case) -> None:
        run = case.block_size if case.interleave == "block" else int(case.interleave)
        virtual = case.block_size * case.sizes[2]
        for request in batch.requests:
            num_drafts = len(request.samples) - 1
            if num_drafts < 1:
                continue
            tokens = [s for r in replies for s in r.sampled if s.request_id == request.request_id]
            accepted = len(tokens) - 1
            length = request.num_computed_tokens + 1 + accepted
            rejected = range(length, length + num_drafts - accepted)
            self.num_accepted += accepted
            self.num_rejected += len(rejected)
            self.over_run += any(position % run == 0 for position in rejected)
            self.over_block += any(position % virtual == 0 for position in rejected)
            # Lengths count accepted tokens only.
            assert request.token_ids[1 : 1 + accepted] == tuple(t.token_id for t in tokens[:-1])


Answers = list[tuple[CompletionOutput, ...]]


def answer_all(driver: Driver, prompts: Sequence[Sequence[int]]) -> Answers:
    ids = [
        driver.add(PromptInput(token_ids=tuple(prompt)), params)
        for prompt, params in zip(prompts, kinds(), strict=False)
    ]
    finished: dict[str, tuple[CompletionOutput, ...]] = {}
    while driver.has_work:
        for output in driver.step():
            assert output.error is None
            finished[output.request_id] = output.outputs
        driver.audit()
    return [finished[request_id] for request_id in ids]


def tokens_of(answers: Answers) -> list[list[tuple[int, ...]]]:
    return [[answer.token_ids for answer in each] for each in answers]


def watched(driver: Driver, case: Case) -> Watch:
    """Look at each step as the executor sees it."""
    watch, executor = Watch(), driver._executor
    batches: list[GlobalBatch] = []
    submit, collect = executor.submit, executor.collect

    def note(orders: Any) -> None:
        batches.extend(batch for batch, _ in orders.values())
        submit(orders)

    def look(replica: int) -> tuple[RankReply, ...]:
        replies = collect(replica)
        watch.look(batches.pop(0), replies, case)
        return replies

    executor.submit, executor.collect = note, look  # type: ignore[method-assign]
    return watch


def run(path: Path, case: Case, drafts: SpeculativeConfig | None) -> tuple[Answers, Watch]:
    """Two waves; prompts of the second go on from answers of the first, whose keys are cached."""
    resolved = dataclasses.replace(resolve_case(path, case), speculative=drafts)
    with open_driver(resolved) as driver:
        watch = watched(driver, case)
        first = answer_all(driver, PROMPTS)
        longer = [
            (*prompt, *answers[0].token_ids, 5, 11)
            for prompt, answers in zip(PROMPTS[:3], first, strict=False)
        ]
        second = answer_all(driver, longer)
        cached = driver.counters.totals()["prefix_cache_hits"]
        if case.has_prefix:
            # To the token: all but the last one of each first answer was stored.
            assert cached >= sum(len(tokens) - 3 for tokens in longer)
        return first + second, watch


@pytest.fixture(scope="module")
def golden(models: GoldenModels) -> Answers:
    """One rank, no drafts, no reuse."""
    answers, watch = run(models.path(MODEL), Case(), None)
    assert (watch.num_accepted, watch.num_rejected) == (0, 0)
    return answers


OPTIONS: tuple[dict[str, Any], ...] = (
    {"interleave": 1, "chunk": 512},
    {"interleave": 2, "chunk": 16},
    {"interleave": "block", "chunk": 512, "context": "gather_q"},
)


def create(sizes: tuple[int, int, int], number: int) -> Case:
    return with_sizes(Case(has_prefix=True, **OPTIONS[number]), sizes)


def default_cases() -> list[Case]:
    """Every layout of up to four ranks, each with the next interleave."""
    return [create(sizes, number % 3) for number, sizes in enumerate(layouts(4))]


def other_cases() -> list[Case]:
    """Every other interleave where it has an effect."""
    product = [create(sizes, number) for sizes in layouts(4) if sizes[2] > 1 for number in range(3)]
    return [case for case in product if case not in default_cases()]


def check(models: GoldenModels, golden: Answers, case: Case) -> None:
    found, watch = run(models.path(MODEL), case, DRAFTS)
    assert tokens_of(found) == tokens_of(golden)
    assert watch.num_accepted > 30
    assert watch.num_rejected > 50
    assert watch.over_run > 10
    assert watch.over_block > 3


def test_every_interleave_meets_a_sharded_context() -> None:
    sharded = [case for case in default_cases() if case.sizes[2] > 1]
    assert {case.interleave for case in sharded} == {1, 2, "block"}
    assert len(other_cases()) == 2 * len(sharded) == 20


@pytest.mark.parametrize("case", default_cases(), ids=lambda case: case.name)
def test_drafts_change_no_token(models: GoldenModels, golden: Answers, case: Case) -> None:
    check(models, golden, case)


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("gpt-oss", (1, 2, 2)),  # windows and sinks
        ("llama4", (2, 1, 2)),  # chunks of attention
        ("deepseek-v32", (1, 2, 2)),  # top-k of a latent cache
        ("qwen3-next", (2, 1, 2)),  # states: gated delta
        ("bamba", (1, 2, 2)),  # states: Mamba-2
    ],
)
def test_every_kind_of_layer_takes_drafts_back(
    tmp_path: Path, model: str, sizes: tuple[int, int, int]
) -> None:
    path = build_tiny(tmp_path, model, seed=0)
    golden, _ = run(path, Case(), None)
    found, watch = run(path, create(sizes, 1), DRAFTS)
    assert tokens_of(found) == tokens_of(golden)
    assert watch.num_accepted > 20
    assert watch.num_rejected > 50


@pytest.mark.slow
@pytest.mark.parametrize("case", other_cases(), ids=lambda case: case.name)
def test_drafts_change_no_token_at_other_interleaves(
    models: GoldenModels, golden: Answers, case: Case
) -> None:
    check(models, golden, case)
