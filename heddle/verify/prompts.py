"""What a certification asks: one long English text and prompts of the awkward lengths.

The text is longer than a chunk, so that later chunks meet earlier ones as cached context; prompts
of 1 and 2 tokens leave ranks without rows; `2 * pcp + 1` is the shortest that is cut unevenly.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources

from heddle.engine.tokenizer import Tokenizer
from heddle.errors import ConfigError

MIN_TEXT_TOKENS = 1000


def shipped_text() -> str:
    """The text that comes with the package."""
    return (resources.files("heddle.verify") / "text.txt").read_text(encoding="utf-8")


def certification_prompts(
    tokenizer: Tokenizer | None,
    *,
    vocab_size: int,
    max_model_len: int,
    pcp_sizes: Iterable[int],
    num_tokens: int,
    text: str,
) -> tuple[tuple[int, ...], ...]:
    """Token ids of every prompt, the long one first.

    Args:
        tokenizer: of the model; None: the bytes of the text serve as ids.
        vocab_size: ids are below it.
        max_model_len: window; the text is cut so that its answer still fits.
        pcp_sizes: of the layouts to certify.
        num_tokens: tokens of each answer.
        text: the long prompt.
    Raises:
        ConfigError: the window leaves no room for the prompts of awkward lengths.
    """
    if tokenizer is None:
        ids = [byte % vocab_size for byte in text.encode()]
    else:
        ids = tokenizer.encode(text)
    short = sorted({1, 2, *(2 * pcp_size + 1 for pcp_size in pcp_sizes)})
    room = max_model_len - num_tokens
    if room < short[-1]:
        raise ConfigError(
            f"max_model_len={max_model_len} leaves room for prompts of {room} tokens; "
            f"a certification needs {short[-1]} (nearest: {short[-1] + num_tokens})"
        )
    return (tuple(ids[:room]), *(tuple(ids[:length]) for length in short))
