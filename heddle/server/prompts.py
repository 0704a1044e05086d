"""What a request wants completed: prompts of several shapes, and conversations."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from heddle.engine.inputs import PromptInput
from heddle.engine.tokenizer import Tokenizer
from heddle.errors import counted, quoted
from heddle.server.errors import ApiError
from heddle.server.guard import REQUEST_ID
from heddle.server.requests import Message, SamplingRequest, Tool

MAX_PROMPTS = 128
MAX_MESSAGES = 4096
MAX_SALT_CHARACTERS = 128


def parse_prompts(given: Any) -> list[str | tuple[int, ...]]:
    """All prompts of a completion request, told apart by their first element.

    Args:
        given: text, a list of texts, a list of ids, or a list of lists of ids; ids in a tuple were
            checked when they were decoded.
    Raises:
        ApiError: another shape, something empty, or too many; names the first place.
    """
    if isinstance(given, str):
        return [_text(given, "prompt")]
    if isinstance(given, tuple):
        return [_ids(given, "prompt")]
    if not isinstance(given, list):
        raise prompt_misfit("prompt")
    if not given:
        raise ApiError("prompt is an empty list; at least one prompt is needed", param="prompt")
    if _is_id(given[0]):
        return [_ids(given, "prompt")]
    if len(given) > MAX_PROMPTS:
        raise too_many_prompts(len(given))
    is_text = isinstance(given[0], str)
    found: list[str | tuple[int, ...]] = []
    for index, item in enumerate(given):
        place = f"prompt.{index}"
        if isinstance(item, str) != is_text or not isinstance(item, (str, list, tuple)):
            raise prompt_misfit(place)
        found.append(_text(item, place) if isinstance(item, str) else _ids(item, place))
    return found


def prompt_input(
    prompt: str | tuple[int, ...], *, add_special_tokens: bool, cache_salt: str | None
) -> PromptInput:
    """The engine's form of one prompt."""
    if isinstance(prompt, str):
        return PromptInput(
            text=prompt, add_special_tokens=add_special_tokens, cache_salt=cache_salt
        )
    return PromptInput(token_ids=prompt, cache_salt=cache_salt)


def answer_name(asked: SamplingRequest) -> str:
    """The rest of an answer's id: what the request names, or a random word.

    Raises:
        ApiError: the name is not one.
    """
    name = asked.request_id
    if name is not None and not REQUEST_ID.fullmatch(name):
        raise ApiError(
            "request_id has 1 to 64 letters, digits, dots, underscores and dashes",
            param="request_id",
        )
    return name or uuid.uuid4().hex


def truncated(
    prompt: PromptInput, asked: SamplingRequest, tokenizer: Tokenizer | None, max_model_len: int
) -> PromptInput:
    """The last tokens of a prompt, or the first, where a request wants no more than some.

    Args:
        prompt: whole.
        asked: `truncate_prompt_tokens` of it: at least 1, or -1 for the window.
        tokenizer: of the model.
        max_model_len: the window.
    Raises:
        ApiError: another number.
        RequestError: the text is no text.
    """
    count = asked.truncate_prompt_tokens
    if count is None:
        return prompt
    if count == -1:
        count = max_model_len - 1
    if count < 1:
        raise ApiError(
            f"truncate_prompt_tokens={quoted(count)} is not legal; must be at least 1, or -1",
            param="truncate_prompt_tokens",
        )
    ids = prompt.token_ids
    if ids is None and tokenizer is not None:
        ids = tuple(tokenizer.encode(prompt.text or "", prompt.add_special_tokens))
    if ids is None or len(ids) <= count:
        return prompt
    ids = ids[:count] if asked.truncation_side == "right" else ids[-count:]
    return PromptInput(token_ids=ids, cache_salt=prompt.cache_salt)


def check_salt(salt: str | None) -> None:
    """Refuse a salt that is too long.

    Raises:
        ApiError: it is.
    """
    if salt is not None and not 1 <= len(salt) <= MAX_SALT_CHARACTERS:
        raise ApiError(
            f"cache_salt has {counted(len(salt), 'character')}; it has 1 to {MAX_SALT_CHARACTERS}",
            param="cache_salt",
        )


def check_messages(messages: Sequence[Message]) -> None:
    """Refuse a conversation by its length, before anything is done with it.

    Raises:
        ApiError: none or too many.
    """
    if not messages:
        raise ApiError("messages is empty; a conversation has at least one", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise ApiError(
            f"{len(messages)} messages; at most {MAX_MESSAGES} in one request", param="messages"
        )


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Turns as a chat template reads them: text, and tool arguments as objects.

    Raises:
        ApiError: none or too many, one without content, or content other than text.
    """
    check_messages(messages)
    return [_plain(message, f"messages.{index}") for index, message in enumerate(messages)]


def plain_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Tools as a chat template reads them; None where there are none."""
    if not tools:
        return None
    return [
        {
            "type": "function",
            "function": {
                name: value
                for name, value in msgspec.to_builtins(tool.function).items()
                if value is not None
            },
        }
        for tool in tools
    ]


def _plain(message: Message, place: str) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role, "content": _content(message, place)}
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    return turn


def _content(message: Message, place: str) -> str:
    if message.content is None:
        if message.role == "assistant":
            return ""
        raise ApiError(f"{place}.content is missing", param=f"{place}.content")
    if isinstance(message.content, str):
        return message.content
    texts = []
    for index, part in enumerate(message.content):
        if part.type != "text":
            raise ApiError(
                "only text parts are served",
                "unsupported_content",
                param=f"{place}.content.{index}",
            )
        if part.text is None:
            raise ApiError("a text part needs text", param=f"{place}.content.{index}.text")
        texts.append(part.text)
    return "".join(texts)


def _arguments(given: str | dict[str, Any] | None) -> Any:
    """An object, as templates expect; text that is no object stays text."""
    if not isinstance(given, str):
        return given or {}
    try:
        found = json.loads(given)
    except (ValueError, RecursionError):
        return given
    return found if isinstance(found, dict) else given


def _text(text: str, place: str) -> str:
    if not text:
        raise ApiError(f"{place} is empty; at least one token is needed", param=place)
    return text


def _ids(given: list[Any] | tuple[int, ...], place: str) -> tuple[int, ...]:
    if not given:
        raise ApiError(f"{place} is empty; at least one token is needed", param=place)
    if isinstance(given, tuple):
        return given
    for index, item in enumerate(given):
        if not _is_id(item):
            raise prompt_misfit(f"{place}.{index}")
    return tuple(given)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def prompt_misfit(place: str) -> ApiError:
    """A prompt of no legal shape."""
    return ApiError(
        f"{place}: a prompt is text, a list of texts, a list of token ids, or a list of lists of "
        "token ids; they are not mixed",
        param=place,
    )


def too_many_prompts(count: int) -> ApiError:
    """More than one request may have."""
    return ApiError(
        f"prompt has {counted(count, 'prompt')}; at most {MAX_PROMPTS} in one request",
        param="prompt",
    )
