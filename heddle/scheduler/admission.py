"""The room of a request: the one rule that server, scheduler and planner share.

The last token of a completion is never fed back, so `p` prompt and `c` completion tokens store
`p + c - 1` rows. Hence

    room = min(window - p, pool - p + 1)

completion tokens at most. A prompt with a room below 1 can never be served and is refused at once;
a completion limit above the room is cut down to it.
"""

from __future__ import annotations

from heddle.errors import PromptTooLong, RequestError


def kv_tokens_needed(num_prompt_tokens: int, max_output_tokens: int) -> int:
    """Rows stored by a request that runs to its limit.

    Example:
        >>> kv_tokens_needed(8, 3), kv_tokens_needed(8, 0)
        (10, 8)
    """
    return num_prompt_tokens + max(max_output_tokens - 1, 0)


def resolve_room(
    num_prompt_tokens: int, max_tokens: int | None, *, window: int, usable_tokens: int
) -> int:
    """Completion tokens that a request may have.

    Args:
        num_prompt_tokens: at least 1.
        max_tokens: limit asked for; None: as many as there is room for.
        window: largest prompt plus completion.
        usable_tokens: tokens that the whole pool stores.
    Raises:
        RequestError: the prompt is empty, or the limit negative.
        PromptTooLong: not even one token fits; the code says which bound was met.
    Example:
        >>> resolve_room(8, None, window=96, usable_tokens=64)
        57
    """
    if num_prompt_tokens < 1:
        raise RequestError("the prompt has 0 tokens; at least 1 is needed")
    if max_tokens is not None and max_tokens < 0:
        raise RequestError(f"max_tokens={max_tokens}; must be at least 0")
    if num_prompt_tokens >= window:
        raise PromptTooLong(
            _window_text(num_prompt_tokens, max_tokens, window), code="context_length_exceeded"
        )
    if num_prompt_tokens > usable_tokens:
        raise PromptTooLong(
            _pool_text(num_prompt_tokens, usable_tokens, window), code="kv_capacity_exceeded"
        )
    room = min(window - num_prompt_tokens, usable_tokens - num_prompt_tokens + 1)
    return room if max_tokens is None else min(max_tokens, room)


def _window_text(num_prompt_tokens: int, max_tokens: int | None, window: int) -> str:
    asked = "no limit" if max_tokens is None else str(max_tokens)
    return (
        f"the prompt has {num_prompt_tokens} tokens and {asked} completion tokens were asked for; "
        f"the maximum context length is {window} tokens, prompt and completion together; "
        f"the largest completion possible with this prompt is "
        f"{max(window - num_prompt_tokens, 0)} tokens, and the longest prompt {window - 1} tokens"
    )


def _pool_text(num_prompt_tokens: int, usable_tokens: int, window: int) -> str:
    return (
        f"the prompt does not fit into the KV pool: needs {num_prompt_tokens}, "
        f"usable {usable_tokens}, window {window} tokens; raised by --kv-cache-memory-bytes, by a "
        f"larger decode context parallel size, or by a narrower --kv-cache-dtype"
    )
