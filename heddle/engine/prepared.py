"""A request that was checked whole, and waits for nothing but its place in the queue.

All checks read constants of the engine alone, so that any thread may make them while a step runs;
only `Driver.admit` belongs to the thread that steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heddle.config.engine import ResolvedConfig
from heddle.config.sampling import SamplingParams
from heddle.engine.checked_prompt import CheckedPrompt, check_prompt
from heddle.engine.inputs import PromptInput, bad_word_ids, check_params
from heddle.engine.tokenizer import Tokenizer
from heddle.errors import RequestError
from heddle.scheduler.admission import resolve_room
from heddle.step.build import BadWordIds


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """What `Driver.admit` takes."""

    prompt: CheckedPrompt
    params: SamplingParams
    bad_words: BadWordIds
    room: int
    """Completion tokens that each of its answers may have."""
    adapter: str | None
    """Name of the adapter that it goes through; None: none."""


def prepare_request(
    prompt: PromptInput,
    params: SamplingParams,
    *,
    resolved: ResolvedConfig,
    tokenizer: Tokenizer | None,
    eos_token_ids: Sequence[int],
    usable_tokens: int,
    adapter: str | None = None,
) -> PreparedRequest:
    """Read a prompt, and refuse what this engine could never do.

    Args:
        prompt: text, ids or embeddings.
        params: how to sample; `max_tokens` above the room is cut down to it.
        resolved: what runs.
        tokenizer: of the model; None: token ids only.
        eos_token_ids: ids that end a text.
        usable_tokens: tokens that the whole pool stores.
        adapter: name of an adapter; whether there is one is seen when it is admitted.
    Raises:
        RequestError: the prompt or a parameter is not legal for this model.
        PromptTooLong: it could never finish here.
    """
    checked = check_prompt(prompt, params, tokenizer, resolved)
    bad_words = bad_word_ids(params, tokenizer)
    check_params(
        params,
        vocab_size=resolved.model.vocab_size,
        eos_token_ids=eos_token_ids,
        bad_words=bad_words,
    )
    if params.stop and tokenizer is None:
        raise RequestError("stop strings need a tokenizer, and this model has none")
    room = resolve_room(
        len(checked.ids),
        params.max_tokens,
        window=resolved.scheduler.max_model_len,
        usable_tokens=usable_tokens,
    )
    return PreparedRequest(
        prompt=checked, params=params, bad_words=bad_words, room=room, adapter=adapter
    )
