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
from heddle.engine.grammar.compiler import Grammar, GrammarCompiler
from heddle.engine.grammar.matcher import Matcher
from heddle.engine.inputs import PromptInput, bad_word_ids, check_params
from heddle.engine.tokenizer import Tokenizer
from heddle.errors import PromptTooLong, RequestError
from heddle.scheduler.admission import resolve_room
from heddle.step.build import BadWordIds

MAX_PIN_SECONDS = 86400.0
"""A day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """What `Driver.admit` takes."""

    prompt: CheckedPrompt
    params: SamplingParams
    bad_words: BadWordIds
    room: int
    """Completion tokens that each of its answers may have."""
    priority: int
    """Lower is served earlier, where the scheduler heeds priorities."""
    pin_seconds: float | None
    """For which its prompt stays in the prefix cache once it is computed; None: as others do."""
    adapter: str | None
    """Name of the adapter that it goes through; None: none."""
    grammar: Grammar | None
    """That its answers follow; None: none."""

    def start_matcher(self, eos_token_ids: Sequence[int]) -> Matcher | None:
        """What one of its answers may be; None without a grammar.

        Args:
            eos_token_ids: ids that end a text.
        """
        if self.grammar is None:
            return None
        ends = () if self.params.ignore_eos else eos_token_ids
        return self.grammar.start(ends, self.params.stop_token_ids)


def prepare_request(
    prompt: PromptInput,
    params: SamplingParams,
    *,
    resolved: ResolvedConfig,
    tokenizer: Tokenizer | None,
    eos_token_ids: Sequence[int],
    usable_tokens: int,
    grammars: GrammarCompiler,
    adapter: str | None = None,
    priority: int = 0,
    pin_seconds: float | None = None,
    wants_tokens: bool = True,
) -> PreparedRequest:
    """Read a prompt, and refuse what this engine could never do.

    Args:
        prompt: text, ids or embeddings.
        params: how to sample; `max_tokens` above the room is cut down to it.
        resolved: what runs.
        tokenizer: of the model; None: token ids only.
        eos_token_ids: ids that end a text.
        usable_tokens: tokens that the whole pool stores.
        grammars: compiles what `structured_outputs` describes.
        adapter: name of an adapter; whether there is one is seen when it is admitted.
        priority: lower is served earlier, with `--scheduling-policy priority`.
        pin_seconds: keep its prompt in the prefix cache for so long.
        wants_tokens: False: only the prompt is computed, whatever `max_tokens` says.
    Raises:
        RequestError: the prompt or a parameter is not legal for this model.
        PromptTooLong: it could never finish here.
    """
    window = resolved.scheduler.max_model_len
    if tokenizer is not None and prompt.token_ids is None:
        _check_length(prompt.text or "", tokenizer, window, usable_tokens)
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
    if not -(2**63) <= priority < 2**63:
        raise RequestError("priority is not legal; must fit into 64 bits")
    if pin_seconds is not None:
        _check_pin(pin_seconds, resolved.cache.max_pinned_tokens)
    room = resolve_room(
        len(checked.ids),
        params.max_tokens if wants_tokens else 0,
        window=window,
        usable_tokens=usable_tokens,
    )
    form = params.structured_outputs
    return PreparedRequest(
        prompt=checked,
        params=params,
        bad_words=bad_words,
        room=room,
        priority=priority,
        pin_seconds=pin_seconds,
        adapter=adapter,
        grammar=None if form is None else grammars.compile(form),
    )


def _check_length(text: str, tokenizer: Tokenizer, window: int, usable_tokens: int) -> None:
    """Refuse a text whose length alone says that it is too long, before it costs seconds to read.

    Raises:
        PromptTooLong: it is.
    """
    most = min(window - 1, usable_tokens)
    if len(text) <= most or (least := tokenizer.fewest_tokens(text)) <= most:
        return
    has = f"the prompt has {len(text)} characters, which are at least {least} tokens"
    if least >= window:
        raise PromptTooLong(
            f"{has}; the maximum context length is {window} tokens, prompt and completion together",
            "context_length_exceeded",
        )
    raise PromptTooLong(
        f"{has}; the KV pool takes prompts of {usable_tokens} tokens", "kv_capacity_exceeded"
    )


def _check_pin(seconds: float, max_pinned_tokens: int) -> None:
    if not 0 < seconds <= MAX_PIN_SECONDS:
        raise RequestError(
            f"cache_pin_seconds={seconds} is not legal; must be above 0 and at most "
            f"{MAX_PIN_SECONDS:g}"
        )
    if not max_pinned_tokens:
        raise RequestError(
            "cache_pin_seconds needs --max-pinned-tokens, which is 0 here", "unsupported_parameter"
        )
