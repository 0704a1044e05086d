"""From the fields of a request to `SamplingParams`, with the defaults of model and server."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heddle.config.sampling import RequestOutputKind, SamplingParams
from heddle.errors import RequestError, quoted
from heddle.server.errors import ApiError, from_request_error
from heddle.server.requests import ResponseFormat, SamplingRequest, StructuredOutputs

_PLAIN_FIELDS = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "bad_words",
    "allowed_token_ids",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
_FIRST_WORD = re.compile(r"(?:len\()?([a-z_]+(?:\.[a-z_]+)*)")
"""Of a message of the engine: the field that it is about."""
_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def model_defaults(model_path: str) -> dict[str, Any]:
    """Sampling defaults that lie with a model, in `generation_config.json`; none for a file.

    A value that would not be legal in a request is left out.
    """
    path = Path(model_path) / "generation_config.json"
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    found: dict[str, Any] = {}
    for name in _MODEL_DEFAULTS if isinstance(entries, dict) else ():
        value = entries.get(name)
        try:
            SamplingParams(**{name: value})
        except RequestError:
            continue
        if value is not None:
            found[name] = value
    return found


def sampling_params(
    asked: SamplingRequest,
    *,
    defaults: Mapping[str, Any],
    max_tokens: int | None,
    logprobs: int | None,
    structured: StructuredOutputs | None = None,
) -> SamplingParams:
    """What to sample with.

    Args:
        asked: the request.
        defaults: for fields that it leaves out.
        max_tokens: limit of the answer; None: all the room.
        logprobs: alternatives per token.
        structured: a grammar that something else than the request's own fields asks for.
    Raises:
        ApiError: a value outside its range.
    """
    given = {name: getattr(asked, name) for name in _PLAIN_FIELDS}
    values = {**defaults, **{name: value for name, value in given.items() if value is not None}}
    if asked.logit_bias is not None:
        values["logit_bias"] = _biases(asked.logit_bias)
    if asked.best_of is not None and asked.best_of > 1:
        raise ApiError("best_of above 1 is not served; use n", "unsupported_parameter")
    grammar = _grammar(asked) or structured
    if grammar is not None:
        values["structured_outputs"] = {
            name: value
            for name in grammar.__struct_fields__
            if (value := getattr(grammar, name)) is not None
        }
    is_stream = bool(asked.stream)
    try:
        return SamplingParams(
            **values,
            max_tokens=max_tokens,
            logprobs=logprobs,
            output_kind=RequestOutputKind.DELTA if is_stream else RequestOutputKind.FINAL_ONLY,
        )
    except RequestError as refusal:
        raise named_as_sent(refusal, asked) from None


def named_as_sent(refusal: RequestError, asked: SamplingRequest) -> ApiError:
    """The engine's refusal, with the field that the client sent in place of what became of it.

    Args:
        refusal: of sampling parameters, or of the grammar.
        asked: the request.
    """
    message = str(refusal)
    word = _FIRST_WORD.match(message)
    param = word[1] if word else ""
    if param.partition(".")[0] == "structured_outputs" and asked.structured_outputs is None:
        sent = _sent_form(asked)
        message, param = message.replace(param, sent), sent
    known = param.partition(".")[0] in asked.__struct_fields__
    error = from_request_error(refusal)
    return ApiError(message, error.code, param=param if known else None, headers=error.headers)


def _sent_form(asked: SamplingRequest) -> str:
    """The field that a grammar came from, if it was not `structured_outputs`."""
    form = asked.response_format
    if form is None or form.type == "text":
        return "tools"  # a required call follows the schemas of their parameters
    return "response_format.json_schema.schema" if form.json_schema else "response_format"


def check_logprobs(count: int | None, most: int, param: str) -> None:
    """Refuse more alternatives than this server gives.

    Raises:
        ApiError: there are.
    """
    if count is not None and not 0 <= count <= most:
        raise ApiError(f"{param}={quoted(count)} is not legal; must be in 0..{most}", param=param)


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    found = {}
    for name, bias in given.items():
        if not (name.isascii() and name.isdecimal() and len(name) < 12):
            raise ApiError("logit_bias: keys are token ids", param="logit_bias")
        found[int(name)] = bias
    return found


def _grammar(asked: SamplingRequest) -> StructuredOutputs | None:
    """The one grammar that a request asks for."""
    own, form = asked.structured_outputs, asked.response_format
    if own is not None and form is not None and form.type != "text":
        raise ApiError(
            "structured_outputs and response_format are both given; give one",
            param="structured_outputs",
        )
    return own if form is None or form.type == "text" else _from_format(form)


def _from_format(form: ResponseFormat) -> StructuredOutputs:
    if form.type == "json_object":
        return StructuredOutputs(json_object=True)
    if form.json_schema is None or form.json_schema.schema is None:
        raise ApiError(
            "response_format.json_schema.schema is missing",
            param="response_format.json_schema.schema",
        )
    return StructuredOutputs(json=form.json_schema.schema)
