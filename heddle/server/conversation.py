"""From messages to a prompt, by the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from heddle.engine.inputs import PromptInput
from heddle.errors import RequestError
from heddle.server.errors import ApiError, from_request_error
from heddle.server.prompts import check_messages, plain_messages
from heddle.server.requests import ChatRequest, TokenizeRequest
from heddle.server.serving import Serving

MAX_RENDERED_CHARACTERS = 1 << 24


async def conversation_prompt(
    serving: Serving,
    asked: ChatRequest | TokenizeRequest,
    tools: Sequence[Mapping[str, Any]] | None,
    deadline: float | None = None,
) -> PromptInput:
    """The prompt of a conversation.

    Args:
        serving: the server.
        asked: a chat or tokenize request.
        tools: that the template shows.
        deadline: time of the loop at which it is given up; None: never.
    Raises:
        ApiError: there is no template, it refuses, or fields contradict each other.
    """
    if asked.chat_template is not None and not serving.config.trust_request_chat_template:
        raise ApiError(
            "chat_template is taken from requests only with --trust-request-chat-template",
            "unsupported_parameter",
            param="chat_template",
        )
    tokenizer = serving.need_tokenizer()
    check_messages(asked.messages or ())
    continues = bool(asked.continue_final_message)
    opens = asked.add_generation_prompt
    if opens is None:
        opens = not continues
    own = {name: getattr(asked, name, None) for name in ("documents", "reasoning_effort")}
    extra = {
        **serving.template_variables,
        **{name: value for name, value in own.items() if value is not None},
        **(asked.chat_template_kwargs or {}),
    }

    is_given = asked.chat_template is not None
    templates = serving.templates

    def render() -> str:
        return tokenizer.apply_chat_template(
            plain_messages(asked.messages or ()),
            chat_template=asked.chat_template if is_given else serving.template,
            add_generation_prompt=opens,
            continue_final_message=continues,
            tools=tools,
            chat_template_kwargs=extra,
            renderer=templates.render_given if is_given else templates.render,
        )

    try:
        text = await serving.preparing.render(render, is_given=is_given, deadline=deadline)
    except RequestError as refusal:
        raise from_request_error(refusal) from None
    except RecursionError:
        raise ApiError("the conversation is nested too deeply", "invalid_template_input") from None
    if len(text) > MAX_RENDERED_CHARACTERS:
        raise ApiError(
            f"the rendered conversation has {len(text)} characters; at most "
            f"{MAX_RENDERED_CHARACTERS}",
            "invalid_template_input",
        )
    # The template writes all special tokens itself.
    specials = bool(getattr(asked, "add_special_tokens", None))
    return PromptInput(
        text=text, add_special_tokens=specials, cache_salt=getattr(asked, "cache_salt", None)
    )
