"""The asynchronous engine over a toy model, with a gate before each of its steps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from heddle.config import SamplingParams
from heddle.config.sampling import RequestOutputKind
from heddle.engine.async_llm import AsyncLLM, Stream
from heddle.engine.driver import Driver
from heddle.engine.executors.base import Executor
from heddle.engine.inputs import PromptInput
from heddle.engine.tokenizer import Tokenizer
from heddle.step.batch import RankReply
from tests.support.fake_executor import VOCAB_SIZE, FakeExecutor, resolved_config, toy_logits

GATE_SECONDS = 120.0
"""After which a step that nobody lets through fails its test instead of blocking it."""


class GatedExecutor(FakeExecutor):
    """Ends a step only when it is let through; the gate stands open until it is shut."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._is_open = True
        self._allowed = 0
        self._changed = threading.Condition()
        self.num_steps = 0

    def shut(self) -> None:
        """Let no step through from now on."""
        with self._changed:
            self._is_open, self._allowed = False, 0

    def let(self, count: int) -> None:
        """Let so many steps through."""
        with self._changed:
            self._allowed += count
            self._changed.notify_all()

    def open(self) -> None:
        """Let all of them through."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def collect(self, replica: int) -> tuple[RankReply, ...]:
        with self._changed:
            passed = self._changed.wait_for(lambda: self._is_open or self._allowed, GATE_SECONDS)
            assert passed, "no step was let through"
            self._allowed -= not self._is_open
        replies = super().collect(replica)
        self.num_steps += 1
        return replies


class ToyLLM:
    """What `AsyncLLM` and the server ask of a loaded model."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer | None = None,
        is_poisoned: Callable[[Sequence[int]], bool] = lambda tokens: False,
        watch: Callable[[Executor], Executor] = lambda executor: executor,
        **config: Any,
    ) -> None:
        self.plan = resolved_config(**config)
        self.executor = GatedExecutor(self.plan, is_poisoned=is_poisoned)
        self.driver = Driver(self.plan, watch(self.executor), tokenizer)
        self.num_closed = 0
        self.shadow = None

    def get_tokenizer(self) -> Tokenizer | None:
        return self.driver.tokenizer

    def close(self) -> None:
        self.num_closed += 1
        self.executor.close()


@asynccontextmanager
async def toy_engine(
    on_step: Callable[[Any], None] | None = None, **config: Any
) -> AsyncIterator[tuple[AsyncLLM, ToyLLM]]:
    """An engine that is closed at the end, whatever its gate is like then."""
    llm = ToyLLM(**config)
    engine = AsyncLLM(llm, on_step=on_step)  # type: ignore[arg-type]
    try:
        yield engine, llm
    finally:
        llm.executor.open()
        await engine.close()


def greedy(max_tokens: int | None = 8, **fields: Any) -> SamplingParams:
    """Deltas of the likeliest continuation."""
    given: dict[str, Any] = {
        "temperature": 0.0,
        "ignore_eos": True,
        "output_kind": RequestOutputKind.DELTA,
    }
    return SamplingParams(**{**given, "max_tokens": max_tokens, **fields})


def submit(engine: AsyncLLM, tokens: list[int], params: SamplingParams | None = None) -> Stream:
    """Queue a prompt of token ids."""
    prompt = PromptInput(token_ids=tuple(tokens))
    return engine.submit(engine.prepare(prompt, params or greedy()))


def run_engine(test: Callable[[AsyncLLM, ToyLLM], Any], **config: Any) -> None:
    """Run a test of an engine in an event loop of its own."""

    async def body() -> None:
        async with asyncio.timeout(GATE_SECONDS), toy_engine(**config) as (engine, llm):
            await test(engine, llm)

    asyncio.run(body())


async def until(condition: Callable[[], Any]) -> None:
    """Wait for something that another thread does."""
    while not condition():
        await asyncio.sleep(0.001)


async def ids_of(stream: Stream) -> list[int]:
    """All tokens of its only answer."""
    return [token async for output in stream for token in output.outputs[0].token_ids]


def continued(prompt: list[int], count: int) -> list[int]:
    """What the toy model says, without any engine."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(toy_logits(tokens, VOCAB_SIZE).argmax()))
    return tokens[len(prompt) :]


def assert_empty(llm: ToyLLM) -> None:
    """Nothing is open, and every block is free or cached."""
    cache = llm.driver.replicas[0].cache
    assert not llm.driver.has_work
    assert cache.num_available_blocks == cache.num_usable_blocks
    llm.driver.audit()
