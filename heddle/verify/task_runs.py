"""Ask a task of every layout, and of one rank before them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from heddle.config import EngineConfig, ModelConfig, SamplingParams
from heddle.engine.llm import LLM
from heddle.engine.outputs import RequestOutput
from heddle.engine.tokenizer import Tokenizer, load_tokenizer
from heddle.errors import ConfigError, NumericsError
from heddle.verify.certify import golden_config, resolved_dtypes, trial_config, trial_words
from heddle.verify.report import layout_document
from heddle.verify.tasks import (
    ANSWER_TOKENS,
    Passkey,
    Task,
    accuracy,
    largest_difference,
    passkeys_that_fit,
    perplexity,
    perplexity_prompt,
    relative_difference,
)
from heddle.verify.trials import Trial

_CHUNKS = 3
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model says to one question."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class PerplexityScore:
    """How well one layout predicts the text."""

    value: float
    difference: float
    """Relative to one rank."""
    ok: bool


@dataclass(frozen=True, slots=True)
class PasskeyScore:
    """How many keys one layout finds, and whether it says what one rank says."""

    accuracy: float
    """0 to 1; reported, not judged."""
    same_answers: bool
    ok: bool


Score = PerplexityScore | PasskeyScore


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReport:
    """What was asked, and how each layout did."""

    task: Task
    dtype: str
    kv_cache_dtype: str
    tolerance: float | None
    """Largest relative difference of a perplexity; None where answers must be equal."""
    num_prompts: int
    num_tokens: int
    """Of the longest prompt."""
    scores: tuple[tuple[Trial, Score], ...]
    """One rank, then every layout."""

    @property
    def ok(self) -> bool:
        """Every layout does as one rank does."""
        return all(score.ok for _, score in self.scores)


def run_task(
    task: Task,
    config: EngineConfig,
    model: ModelConfig,
    trials: Sequence[Trial],
    *,
    text: str,
    report: Callable[[str], None],
) -> TaskReport:
    """Ask one rank, then every layout.

    Args:
        task: which one.
        config: of the engine; `model` is a path on this machine, and degrees are those of `trials`.
        model: the checkpoint's shapes.
        trials: legal layouts.
        text: what is predicted, or what hides the keys.
        report: told in a line what happens next.
    Raises:
        ConfigError: the model has no tokenizer, or its window is too small.
        RankFailed, NumericsError: a run ended without an answer.
    """
    tokenizer = load_tokenizer(config.model)
    if tokenizer is None:
        raise ConfigError(f"--task {task} asks in words, and {config.model} has no tokenizer")
    window = config.max_model_len or model.max_position_embeddings
    ask = _run_perplexity if task == "perplexity" else _run_passkey
    return ask(_Runs(config, trials, report), tokenizer, window, text)


def text_perplexity(llm: LLM, prompt: Sequence[int]) -> float:
    """Perplexity of a text under an open engine.

    Args:
        llm: the engine.
        prompt: token ids, at least two.
    Raises:
        NumericsError: it is not finite, or the request failed.
    """
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    (output,) = llm.generate([list(prompt)], params, use_tqdm=False)
    _check(output)
    pairs = zip(prompt[1:], (output.prompt_logprobs or ())[1:], strict=True)
    return perplexity([found[token].logprob for token, found in pairs if found is not None])


def passkey_answers(llm: LLM, passkeys: Sequence[Passkey]) -> tuple[Answer, ...]:
    """What an open engine says, greedily, prompt by prompt.

    Args:
        llm: the engine.
        passkeys: the questions.
    Raises:
        NumericsError: a request failed.
    """
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    outputs = llm.generate([each.prompt for each in passkeys], params, use_tqdm=False)
    return tuple(_answer(output) for output in outputs)


def task_document(report: TaskReport) -> dict[str, Any]:
    """The document that `heddle verify --task --json` prints."""
    return {
        "ok": report.ok,
        "task": report.task,
        "dtype": report.dtype,
        "kv_cache_dtype": report.kv_cache_dtype,
        "tolerance": report.tolerance,
        "num_prompts": report.num_prompts,
        "num_tokens": report.num_tokens,
        "layouts": [layout_document(trial) | asdict(score) for trial, score in report.scores],
    }


def _run_perplexity(runs: _Runs, tokenizer: Tokenizer, max_model_len: int, text: str) -> TaskReport:
    prompt = perplexity_prompt(tokenizer.encode(text), max_model_len=max_model_len)
    values = runs.ask(
        len(prompt),
        lambda llm: text_perplexity(llm, prompt),
        max_chunk=math.ceil(len(prompt) / _CHUNKS),
    )
    one_rank = values[0][1]
    tolerance = largest_difference(*resolved_dtypes(runs.config))
    scores = []
    for trial, value in values:
        difference = relative_difference(value, one_rank)
        scores.append((trial, PerplexityScore(value, difference, difference <= tolerance)))
    return runs.result("perplexity", scores, tolerance, num_prompts=1, num_tokens=len(prompt))


def _run_passkey(runs: _Runs, tokenizer: Tokenizer, max_model_len: int, text: str) -> TaskReport:
    passkeys = passkeys_that_fit(text, tokenizer.encode, max_model_len=max_model_len)
    num_tokens = max(len(tokenizer.encode(passkey.prompt)) for passkey in passkeys)
    answers = runs.ask(num_tokens, lambda llm: passkey_answers(llm, passkeys))
    one_rank = answers[0][1]
    keys = [passkey.key for passkey in passkeys]
    scores = []
    for trial, said in answers:
        share, same = accuracy([answer.text for answer in said], keys), said == one_rank
        scores.append((trial, PasskeyScore(share, same, same)))
    return runs.result("passkey", scores, None, num_prompts=len(passkeys), num_tokens=num_tokens)


@dataclass(frozen=True, slots=True)
class _Runs:
    """The engines of one report."""

    config: EngineConfig
    trials: Sequence[Trial]
    report: Callable[[str], None]

    def ask(
        self, num_tokens: int, question: Callable[[LLM], _Found], max_chunk: int | None = None
    ) -> list[tuple[Trial, _Found]]:
        """Open one engine after the other: one rank, to which prompts come whole and one at a
        time, then every layout.

        Args:
            num_tokens: of the longest prompt.
            question: asked of each.
            max_chunk: rows of a prompt that a layout takes at once; None: as configured.
        """
        alone = golden_config(self.config, [num_tokens])
        one_rank = Trial(parallel=alone.parallel, block_size=alone.cache.block_size)
        self.report("one rank")
        found = [(one_rank, _ask(alone, question))]
        for number, trial in enumerate(self.trials, start=1):
            self.report(f"layout {number} of {len(self.trials)}: {trial_words(trial)}")
            config = _in_chunks(trial_config(self.config, trial), max_chunk)
            found.append((trial, _ask(config, question)))
        return found

    def result(
        self,
        task: Task,
        scores: Sequence[tuple[Trial, Score]],
        tolerance: float | None,
        *,
        num_prompts: int,
        num_tokens: int,
    ) -> TaskReport:
        """The report of these scores."""
        dtype, kv_cache_dtype = resolved_dtypes(self.config)
        return TaskReport(
            task=task,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            tolerance=tolerance,
            num_prompts=num_prompts,
            num_tokens=num_tokens,
            scores=tuple(scores),
        )


def _ask(config: EngineConfig, question: Callable[[LLM], _Found]) -> _Found:
    with LLM.from_config(config) as llm:
        return question(llm)


def _in_chunks(config: EngineConfig, max_chunk: int | None) -> EngineConfig:
    """Prompts cut so that later chunks meet earlier ones as cached context."""
    if max_chunk is None:
        return config
    asked = config.scheduler.long_prefill_token_threshold
    chunk = min(max_chunk, asked or max_chunk)
    return replace(config, scheduler=replace(config.scheduler, long_prefill_token_threshold=chunk))


def _answer(output: RequestOutput) -> Answer:
    _check(output)
    said = output.outputs[0]
    return Answer(said.token_ids, said.text)


def _check(output: RequestOutput) -> None:
    if output.error is not None:
        raise NumericsError(f"prompt {output.request_id}: {output.error}") from output.error
