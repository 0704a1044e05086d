"""What a caller may pass as prompts, turned into one checked form at the door."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heddle.config.sampling import SamplingParams, check_token_ids, check_vocabulary
from heddle.engine.tokenizer import Tokenizer
from heddle.errors import RequestError, quoted

_KEYS = ("prompt", "prompt_token_ids", "prompt_embeds", "cache_salt")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptInput:
    """One prompt: text, token ids, or both; embeddings may stand in front."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    add_special_tokens: bool = True
    """False for text that already carries its special tokens, such as a rendered conversation."""
    cache_salt: str | None = None
    """Prompts of different salts share no cached KV."""
    embeddings: Any = None
    """`[n, E]` tensor in front of the tokens, or instead of any; None: only tokens."""


def split_prompts(prompts: Any) -> tuple[list[Any], bool]:
    """Tell one prompt from a list of prompts.

    Returns:
        The prompts, unparsed, and whether a list was passed.
    """
    if isinstance(prompts, (list, tuple)) and not (prompts and _is_id(prompts[0])):
        return list(prompts), True
    return [prompts], False


def parse_prompt(prompt: Any) -> PromptInput:
    """Parse one prompt.

    Args:
        prompt: text, a list of token ids, `{"prompt": ...}`, `{"prompt_token_ids": ...}` or
            `{"prompt_embeds": ...}`, the last alone or with one of the others behind it.
    Raises:
        RequestError: anything else.
    """
    if isinstance(prompt, PromptInput):
        return prompt
    if isinstance(prompt, str):
        return PromptInput(text=prompt)
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt)
    if isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
        return PromptInput(token_ids=tuple(prompt))
    raise RequestError(
        f"a prompt is text, a list of token ids, or a mapping with `prompt` or `prompt_token_ids`; "
        f"not {type(prompt).__name__}"
    )


def prompt_ids(
    prompt: PromptInput, tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[int, ...]:
    """Token ids of a prompt, all of them inside the vocabulary; none beside embeddings alone.

    Raises:
        RequestError: empty, an id outside the vocabulary, or text for a model without tokenizer.
    """
    if prompt.token_ids is not None:
        ids = prompt.token_ids
    elif prompt.text is None and prompt.embeddings is not None:
        ids = ()
    elif tokenizer is None:
        raise RequestError("this model has no tokenizer; pass token ids instead of text")
    else:
        ids = tuple(tokenizer.encode(prompt.text or "", prompt.add_special_tokens))
    if not ids and prompt.embeddings is None:
        raise RequestError("the prompt is empty; at least one token is needed")
    check_token_ids("prompt", ids, vocab_size)
    return ids


def bad_word_ids(
    params: SamplingParams, tokenizer: Tokenizer | None
) -> tuple[tuple[int, ...], ...]:
    """Token ids of the bad words, each as it is written at the start and inside of a text.

    Raises:
        RequestError: the model has no tokenizer.
    """
    if not params.bad_words:
        return ()
    if tokenizer is None:
        raise RequestError("bad_words needs a tokenizer, and this model has none")
    words = [word.lstrip() for word in params.bad_words]
    spellings = [*words, *(f" {word}" for word in words)]
    encoded = tokenizer.encode_batch(spellings, add_special_tokens=False)
    return tuple(dict.fromkeys(tuple(ids) for ids in encoded if ids))


def check_params(
    params: SamplingParams,
    *,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    bad_words: Sequence[tuple[int, ...]],
) -> None:
    """Refuse parameters that this model cannot honour.

    Raises:
        RequestError: ids outside the vocabulary, or no token left that could ever be drawn.
    """
    check_vocabulary(params, vocab_size)
    if params.allowed_token_ids is None:
        return
    excluded = {word[0] for word in bad_words if len(word) == 1}
    if params.min_tokens:
        excluded.update(params.stop_token_ids)
        excluded.update(() if params.ignore_eos else eos_token_ids)
    if excluded.issuperset(params.allowed_token_ids):
        raise RequestError(
            "allowed_token_ids leaves no token: all of them are bad words, or end the answer "
            f"before min_tokens={params.min_tokens}"
        )


def _parse_mapping(prompt: Mapping[str, Any]) -> PromptInput:
    unknown = sorted(set(prompt) - set(_KEYS), key=str)
    if unknown:
        raise RequestError(f"unknown prompt key {quoted(unknown[0])}; known: {', '.join(_KEYS)}")
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    embeddings = prompt.get("prompt_embeds")
    if text is None and ids is None and embeddings is None:
        raise RequestError("a prompt mapping needs `prompt`, `prompt_token_ids` or `prompt_embeds`")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"`prompt` is text, not {type(text).__name__}")
    if ids is not None and not isinstance(ids, (list, tuple)):
        raise RequestError(f"`prompt_token_ids` is a list, not {type(ids).__name__}")
    salt = prompt.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and len(salt) <= 128):
        raise RequestError("`cache_salt` is text of at most 128 characters")
    return PromptInput(
        text=text,
        token_ids=None if ids is None else tuple(ids),
        cache_salt=salt,
        embeddings=embeddings,
    )


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
