"""Bodies that clients send. One typed form each: it decodes, and it is the OpenAPI schema.

Every field may be null, which means its default. Fields that nobody declared are ignored and
counted; those in `SUCCESSORS` are refused, since to ignore them would give a wrong answer.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

SUCCESSORS: dict[str, str] = {
    "guided_json": "use response_format or structured_outputs.json",
    "guided_regex": "use structured_outputs.regex",
    "guided_choice": "use structured_outputs.choice",
    "guided_grammar": "use structured_outputs.grammar",
    "functions": "use tools",
    "function_call": "use tool_choice",
}
"""Names of the past, and what took their place."""

SILENT_FIELDS = frozenset(
    ("user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier")
)
"""Accepted with any value, without effect, and never logged."""


class StreamOptions(msgspec.Struct, kw_only=True):
    """How a stream reports."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_progress: bool | None = None


class JsonSchema(msgspec.Struct, kw_only=True):
    """A named schema of `response_format`."""

    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """A grammar for the answer; one field at a time."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class SamplingRequest(msgspec.Struct, kw_only=True):
    """Fields that completions and chat share."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    cache_pin_seconds: float | None = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None
    best_of: int | None = None


class CompletionRequest(SamplingRequest, kw_only=True):
    """`POST /v1/completions`."""

    prompt: Any
    """Text, a list of texts, a list of token ids, or a list of lists of token ids."""
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    """A piece of a message."""

    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """A call that the assistant made."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call in a message of the assistant."""

    function: FunctionCall
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct, kw_only=True):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None


class Function(msgspec.Struct, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool on offer."""

    function: Function
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct, kw_only=True):
    """The function of a tool choice."""

    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    """A tool that must be called."""

    function: NamedFunction
    type: Literal["function"] = "function"


class ChatRequest(SamplingRequest, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None
