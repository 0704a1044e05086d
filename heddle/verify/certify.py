"""Certify layouts of a model: the tokens and logits that one rank gives, or a finding that says
where not.

The golden run has one rank, no cache reuse, and the whole prompt in one step. Each layout then runs
the same prompts in its own chunks, from its own pool, and is fed golden's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from heddle.config import EngineConfig, ModelConfig, ParallelConfig
from heddle.engine.tokenizer import load_tokenizer
from heddle.errors import ConfigError
from heddle.verify.oracles import (
    RELATIVE_TOLERANCE,
    Bound,
    Comparison,
    Trace,
    compare,
    narrow_bound,
    wide_bound,
)
from heddle.verify.prompts import certification_prompts
from heddle.verify.runs import run_prompts
from heddle.verify.trials import Trial


@dataclass(frozen=True, slots=True)
class Finding:
    """What came out of one layout."""

    trial: Trial
    comparison: Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What was compared, by which bound, and how each layout did."""

    dtype: str
    kv_cache_dtype: str
    bound: Bound
    prompt_lens: tuple[int, ...]
    num_tokens: int
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Every layout passed."""
        return all(finding.comparison.ok for finding in self.findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Golden:
    prompts: tuple[tuple[int, ...], ...]
    traces: tuple[Trace, ...]
    bound: Bound


def certify(
    config: EngineConfig,
    model: ModelConfig,
    trials: Sequence[Trial],
    *,
    num_tokens: int,
    text: str,
    report: Callable[[str], None],
) -> Certificate:
    """Run golden, then every layout.

    Args:
        config: of the engine; `model` is a path on this machine, and degrees are those of `trials`.
        model: the checkpoint's shapes.
        trials: legal layouts, at least one.
        num_tokens: tokens of each answer.
        text: the long prompt.
        report: told in a line what happens next.
    Raises:
        ConfigError: there is nothing to certify, or the window is too small for the prompts.
        RankFailed, NumericsError: a run ended without an answer.
    """
    if not trials or num_tokens < 1:
        raise ConfigError(f"{len(trials)} layouts and {num_tokens} tokens; at least 1 of each")
    golden = _run_golden(config, model, trials, num_tokens, text, report)
    teachers = [trace.token_ids for trace in golden.traces]
    findings = []
    for number, trial in enumerate(trials, start=1):
        report(f"layout {number} of {len(trials)}: {trial_words(trial)}")
        traces = run_prompts(
            trial_config(config, trial), golden.prompts, num_tokens=num_tokens, teachers=teachers
        )
        findings.append(Finding(trial, compare(golden.traces, traces, golden.bound)))
    dtype, kv_dtype = resolved_dtypes(config)
    return Certificate(
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        bound=golden.bound,
        prompt_lens=tuple(map(len, golden.prompts)),
        num_tokens=num_tokens,
        findings=tuple(findings),
    )


def trial_config(config: EngineConfig, trial: Trial) -> EngineConfig:
    """The engine of one layout."""
    cache = replace(config.cache, block_size=trial.block_size)
    return replace(config, parallel=trial.parallel, cache=cache, trace_file=None)


def golden_config(config: EngineConfig, prompt_lens: Sequence[int]) -> EngineConfig:
    """One rank in the caller, a default pool, no reuse, no drafts, and a step that takes every
    prompt whole."""
    return replace(
        config,
        speculative=None,
        executor="inline",
        faults=(),  # those of its ranks are no measure of a layout
        cpu_comm_backend="auto",  # there is nobody to connect
        verify_every=0,  # it is itself what others are held against
        debug_kv=False,
        trace_file=None,
        parallel=ParallelConfig(),
        cache=replace(
            config.cache,
            enable_prefix_caching=False,
            num_blocks_override=None,
            kv_cache_memory_bytes=None,
        ),
        scheduler=replace(
            config.scheduler,
            max_num_seqs=len(prompt_lens),
            max_num_batched_tokens=sum(prompt_lens),
            max_num_partial_prefills=len(prompt_lens),
            long_prefill_token_threshold=0,
        ),
    )


def _run_golden(
    config: EngineConfig,
    model: ModelConfig,
    trials: Sequence[Trial],
    num_tokens: int,
    text: str,
    report: Callable[[str], None],
) -> _Golden:
    prompts = certification_prompts(
        load_tokenizer(config.model),
        vocab_size=model.vocab_size,
        max_model_len=config.max_model_len or model.max_position_embeddings,
        pcp_sizes=[trial.parallel.prefill_context_parallel_size for trial in trials],
        num_tokens=num_tokens,
        text=text,
    )
    one_rank = golden_config(config, [len(prompt) for prompt in prompts])
    dtype, kv_dtype = resolved_dtypes(config)
    if dtype == kv_dtype and dtype in RELATIVE_TOLERANCE:
        report(f"golden run: one rank, {dtype}")
        traces = run_prompts(one_rank, prompts, num_tokens=num_tokens)
        return _Golden(prompts=prompts, traces=traces, bound=wide_bound(traces, dtype))
    report("golden run: one rank, float32")
    exact = replace(
        one_rank, dtype="float32", cache=replace(one_rank.cache, kv_cache_dtype="float32")
    )
    traces = run_prompts(exact, prompts, num_tokens=num_tokens)
    report(f"its error: one rank, {dtype} with a {kv_dtype} cache")
    teachers = [trace.token_ids for trace in traces]
    rounded = run_prompts(one_rank, prompts, num_tokens=num_tokens, teachers=teachers)
    return _Golden(prompts=prompts, traces=traces, bound=narrow_bound(traces, rounded))


def resolved_dtypes(config: EngineConfig) -> tuple[str, str]:
    """Compute and cache type; `auto` as the engine resolves it on a CPU."""
    dtype = "float32" if config.dtype == "auto" else config.dtype
    kv_dtype = config.cache.kv_cache_dtype
    return dtype, dtype if kv_dtype == "auto" else kv_dtype


def trial_words(trial: Trial) -> str:
    """A layout with its strategy, in a line."""
    parallel = trial.parallel
    outer = (("pp", parallel.pipeline_parallel_size), ("dp", parallel.data_parallel_size))
    added = "".join(f"{axis} {size} " for axis, size in outer if size > 1)
    return (
        f"tp {parallel.tensor_parallel_size} pcp {parallel.prefill_context_parallel_size} "
        f"dcp {parallel.decode_context_parallel_size} {added}"
        f"interleave {parallel.kv_interleave_size} exchange {parallel.dcp_comm_backend}, "
        f"context {parallel.cp_context_exchange}"
    )
