"""A model of this process that answers in `heddle chat`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from heddle.cli.chat_partners import Message, Piece
from heddle.config.sampling import RequestOutputKind, SamplingParams
from heddle.engine.async_llm import AsyncLLM
from heddle.engine.inputs import PromptInput
from heddle.engine.llm import LLM
from heddle.errors import RequestError
from heddle.server.sampling import model_defaults


class LocalPartner:
    """See `Partner`."""

    def __init__(self, llm: LLM, name: str, sampling: Mapping[str, Any]) -> None:
        """Take over an engine, in a running loop.

        Args:
            llm: loaded; `close` closes it.
            name: as the user gave it.
            sampling: fields of `SamplingParams` that win over the model's defaults.
        Raises:
            RequestError: one is not legal, or the model cannot chat.
        """
        self.name = name
        tokenizer = llm.get_tokenizer()
        if tokenizer is None or not tokenizer.has_chat_template:
            raise RequestError(f"{name} has no chat template; heddle generate completes text")
        self._tokenizer = tokenizer
        values = {"max_tokens": None, **model_defaults(llm.plan.model_path), **sampling}
        self._params = SamplingParams(**values, output_kind=RequestOutputKind.DELTA)
        self._engine = AsyncLLM(llm)

    async def answer(self, messages: Sequence[Message]) -> AsyncIterator[Piece]:
        """The next turn."""
        text = await asyncio.to_thread(self._tokenizer.apply_chat_template, messages)
        # The template writes all special tokens itself.
        prompt = PromptInput(text=text, add_special_tokens=False)
        num_tokens = 0
        async for output in self._engine.generate(prompt, self._params):
            (answer,) = output.outputs
            num_tokens += len(answer.token_ids)
            yield Piece(answer.text, num_tokens)

    async def close(self) -> None:
        """End the engine."""
        await self._engine.close()
