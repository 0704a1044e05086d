"""Where the time of a decode step goes, and how much of it is the driver's.

    wall of a step   = driver + waiting for the ranks
    driver           = schedule (with accounting and text) + plan
    waiting          = messages + the slowest rank
    rank             = plan + localize + sample + model (all the rest)

Wall, waiting and ranks are measured on the running engine, median over its steps. What runs inside
of these is measured by running the same pure functions on the same batch again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, TypeVar

import torch

from heddle.bench.contest import bench_config, text_prompts
from heddle.bench.speed import describe_engine
from heddle.config.engine import EngineConfig, ResolvedConfig
from heddle.config.sampling import SamplingParams
from heddle.engine.driver import Driver
from heddle.engine.executors.base import Executor, Submission
from heddle.engine.executors.create import create_executor
from heddle.engine.executors.wrapped import WrappedExecutor
from heddle.engine.inputs import PromptInput
from heddle.engine.machine import resolve_here
from heddle.engine.tokenizer import load_tokenizer
from heddle.errors import ConfigError
from heddle.runner.results import collect_samples
from heddle.step.batch import GlobalBatch, RankReply
from heddle.step.localize import localize
from heddle.step.plan import plan
from heddle.step.topology import Topology

T = TypeVar("T")

_REPEATS = 5
"""Of a pure function on one batch."""


class WatchedExecutor(WrappedExecutor):
    """An executor that notes batches, waiting times and the slowest rank of each step."""

    def __init__(self, inner: Executor) -> None:
        super().__init__(inner)
        self.batches: list[GlobalBatch] = []
        self.rank_seconds: list[float] = []
        self.waited_seconds = 0.0
        """Since it was last set to 0."""

    def submit(self, batches: Mapping[int, Submission]) -> None:
        """Begin steps; see `Executor.submit`."""
        self.batches += [batch for batch, _ in batches.values()]
        self._watch(lambda: self.inner.submit(batches))

    def first_done(self) -> int:
        """Wait; see `Executor.first_done`."""
        return self._watch(self.inner.first_done)

    def collect(self, replica: int) -> tuple[RankReply, ...]:
        """End a step; see `Executor.collect`."""
        replies = self._watch(lambda: self.inner.collect(replica))
        self.rank_seconds.append(max(reply.seconds for reply in replies))
        return replies

    def _watch(self, call: Callable[[], T]) -> T:
        started = time.perf_counter()
        try:
            return call()
        finally:
            self.waited_seconds += time.perf_counter() - started


def measure_step(
    config: EngineConfig, *, num_streams: int, prompt_len: int, num_steps: int
) -> dict[str, Any]:
    """Decode some streams, and take the time apart.

    Args:
        config: of the engine, without stages and replicas: steps of these overlap.
        num_streams: decode rows of a step.
        prompt_len: tokens of each prompt.
        num_steps: decode steps that count.
    Returns:
        `{engine, num_streams, prompt_len, step_seconds, parts: [{part, where, seconds, share}],
        driver_share}`; the driver's share holds schedule, plan, localize and messages.
    Raises:
        ConfigError: stages or replicas were asked for, or the prompts do not fit.
    """
    resolved = resolve_here(bench_config(config, num_streams=num_streams))
    if resolved.parallel.pipeline_parallel_size * resolved.parallel.data_parallel_size > 1:
        raise ConfigError(
            "steps of stages and replicas overlap, and their parts cannot be told apart; "
            "give -pp 1 -dp 1"
        )
    tokenizer = load_tokenizer(resolved.model_path)
    prompts = text_prompts(tokenizer, resolved.model.vocab_size, prompt_len, num_streams)
    params = SamplingParams(
        temperature=0.0, max_tokens=num_steps + 2, ignore_eos=True, detokenize=False
    )
    with WatchedExecutor(create_executor(resolved)) as executor:
        driver = Driver(resolved, executor, tokenizer)
        for prompt in prompts:
            driver.add(PromptInput(token_ids=tuple(prompt)), params)
        steps = _decode(driver, executor, num_streams)
    # The first ones may still hold a prompt of another stream behind them.
    walls, waits, ranks = (seconds[-num_steps:] for seconds in steps)
    batch = executor.batches[-1]
    parts = _parts(resolved, batch, median(walls), median(waits), median(ranks))
    overhead = sum(part["seconds"] for part in parts if part["part"] not in ("sample", "model"))
    return {
        "engine": describe_engine(resolved),
        "num_streams": num_streams,
        "prompt_len": prompt_len,
        "num_steps": len(walls),
        "step_seconds": median(walls),
        "parts": parts,
        "driver_share": overhead / median(walls),
    }


def _decode(
    driver: Driver, executor: WatchedExecutor, num_streams: int
) -> tuple[list[float], list[float], list[float]]:
    """Wall, waiting and rank seconds of each step in which all streams decode."""
    walls, waits, ranks = [], [], []
    while driver.has_work:
        executor.waited_seconds = 0.0
        started = time.perf_counter()
        driver.step()
        wall = time.perf_counter() - started
        batch = executor.batches[-1]
        is_decode = all(len(request.token_ids) == 1 for request in batch.requests)
        if is_decode and len(batch.requests) == num_streams:
            walls.append(wall)
            waits.append(executor.waited_seconds)
            ranks.append(executor.rank_seconds[-1])
    return walls, waits, ranks


def _parts(
    resolved: ResolvedConfig, batch: GlobalBatch, wall: float, wait: float, rank: float
) -> list[dict[str, Any]]:
    topology = Topology.from_resolved(resolved)
    step_plan = plan(batch, topology)
    logits = torch.randn(len(batch.requests), resolved.model.vocab_size)
    planning = _seconds(lambda: plan(batch, topology))
    localizing = _seconds(lambda: localize(step_plan, topology, 0))
    sampling = _seconds(lambda: collect_samples(batch, logits))
    found = (
        ("schedule", "driver", wall - wait - planning),
        ("plan", "driver", planning),
        ("messages", "driver", wait - rank),
        ("plan", "rank", planning),
        ("localize", "rank", localizing),
        ("sample", "rank", sampling),
        ("model", "rank", rank - planning - localizing - sampling),
    )
    return [
        {"part": part, "where": where, "seconds": max(seconds, 0.0), "share": seconds / wall}
        for part, where, seconds in found
    ]


def _seconds(call: Callable[[], object]) -> float:
    call()
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return median(seconds)
