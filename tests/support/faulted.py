"""Engines over the tiny model whose ranks fail on purpose, and what they say undisturbed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from heddle import LLM
from heddle.config import SamplingParams
from heddle.engine.args import engine_config
from heddle.engine.inputs import PromptInput

LAYOUTS: dict[str, dict[str, int]] = {
    "TP2 DCP2": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    "PCP2 DCP2": {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2},
}
PROMPT = tuple(range(3, 23))
CHUNK = 8
"""Rows of a step: the prompt takes steps 0 to 2, the last of which draws the first token."""
NUM_TOKENS = 6
FIRST_DECODE = 3


@contextmanager
def engine(path: Path, faults: str = "", **options: Any) -> Iterator[LLM]:
    """An engine in float64, where replayed rows differ by too little for any tie."""
    given = {
        "dtype": "float64",
        "max_num_batched_tokens": CHUNK,
        "kv_cache_memory_bytes": 1 << 20,
        "block_size": 4,
        "num_threads": 1,
    }
    if faults:
        given |= {"faults": faults, "enable_fault_injection": True}
    llm = LLM.from_config(engine_config(str(path), **(given | options)))
    try:
        yield llm
    finally:
        llm.close()


class Heard:
    """What a caller has been told, token by token."""

    def __init__(self, llm: LLM) -> None:
        self._driver = llm._driver
        self.tokens: dict[str, tuple[int, ...]] = {}
        self.reasons: dict[str, str | None] = {}
        self.logits: dict[str, Sequence[bytes]] = {}

    def ask(
        self, prompt: tuple[int, ...] = PROMPT, *, return_logits: bool = False, **params: Any
    ) -> str:
        """Add a request; its id."""
        chosen = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True} | params
        request_id = self._driver.add(
            PromptInput(token_ids=prompt), SamplingParams(**chosen), return_logits=return_logits
        )
        self.tokens[request_id] = ()
        return request_id

    def step(self) -> None:
        """One round; nothing that was told before changes, and nothing is told twice."""
        for output in self._driver.step():
            told, found = self.tokens[output.request_id], output.outputs[0]
            assert tuple(found.token_ids[: len(told)]) == told
            self.tokens[output.request_id] = tuple(found.token_ids)
            self.reasons[output.request_id] = found.finish_reason
            self.logits[output.request_id] = found.logits or ()

    def run(self) -> None:
        """Until nothing is open; then every block is free or cached."""
        while self._driver.has_work:
            self.step()
        self.check_blocks()

    def check_blocks(self) -> None:
        """Nothing open, no block lost."""
        self._driver.audit()
        for replica in self._driver.replicas:
            assert replica.cache.num_available_blocks == replica.cache.num_usable_blocks


def undisturbed(path: Path, prompts: list[tuple[int, ...]], **params: Any) -> list[tuple[int, ...]]:
    """The answers of one rank, each prompt alone."""
    answers = []
    with engine(path, executor="inline") as llm:
        for prompt in prompts:
            heard = Heard(llm)
            request_id = heard.ask(prompt, **params)
            heard.run()
            answers.append(heard.tokens[request_id])
    return answers
