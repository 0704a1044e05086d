"""Small endpoints: models, load, version, tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from heddle import __version__
from heddle.engine.tokenizer import Tokenizer
from heddle.errors import RequestError
from heddle.server.bodies import decode_body, read_body
from heddle.server.conversation import conversation_prompt
from heddle.server.errors import ApiError, from_request_error
from heddle.server.prompts import plain_tools
from heddle.server.requests import DetokenizeRequest, TokenizeRequest
from heddle.server.serving import Serving
from heddle.server.ui import load_facts


async def list_models(request: Request) -> Response:
    """`GET /v1/models`."""
    return JSONResponse({"object": "list", "data": _models(request.app.state.serving)})


async def show_model(request: Request) -> Response:
    """`GET /v1/models/{id}`; names may hold slashes."""
    serving: Serving = request.app.state.serving
    name = request.path_params["name"]
    for model in _models(serving):
        if model["id"] == name:
            return JSONResponse(model)
    serving.adapter_of(name)
    raise ApiError("the model does not exist", "model_not_found")


async def version(request: Request) -> Response:
    """`GET /version`."""
    del request
    return JSONResponse({"version": __version__})


async def load(request: Request) -> Response:
    """`GET /load`: open requests, who runs and waits, how full the pool is; with `layout=1` the
    layout too.
    """
    with_layout = request.query_params.get("layout", "0") == "1"
    return JSONResponse(load_facts(request.app.state.serving, with_layout=with_layout))


async def tokenize(request: Request) -> Response:
    """`POST /tokenize`: ids of a prompt or of a rendered conversation."""
    serving: Serving = request.app.state.serving
    with serving.body_share() as take:
        data = await read_body(request, serving.max_body_bytes, take)
        caller = serving.caller(request)
        async with serving.preparing.turn(caller.client, len(data), caller.deadline):
            return await _tokenized(serving, data, caller.deadline)


async def _tokenized(serving: Serving, data: bytes, deadline: float | None) -> Response:
    asked, ignored = await decode_body(data, TokenizeRequest)
    serving.note_ignored(ignored)
    serving.adapter_of(asked.model)
    tokenizer = serving.need_tokenizer()
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError("give either prompt or messages", param="prompt")
    if asked.prompt is None:
        prompt = await conversation_prompt(serving, asked, plain_tools(asked.tools), deadline)
        text, specials = prompt.text or "", prompt.add_special_tokens
    else:
        text = asked.prompt
        specials = True if asked.add_special_tokens is None else asked.add_special_tokens
    try:
        ids = await asyncio.to_thread(tokenizer.encode, text, specials)
    except RequestError as refusal:
        raise from_request_error(refusal) from None
    document: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": serving.max_model_len,
        "tokens": ids,
        "token_strs": None,
    }
    if asked.return_token_strs:
        document["token_strs"] = [_token_text(tokenizer.token_bytes(each)) for each in ids]
    return JSONResponse(document)


async def detokenize(request: Request) -> Response:
    """`POST /detokenize`: text of ids."""
    serving: Serving = request.app.state.serving
    with serving.body_share() as take:
        data = await read_body(request, serving.max_body_bytes, take)
        asked, ignored = await decode_body(data, DetokenizeRequest)
    serving.note_ignored(ignored)
    serving.adapter_of(asked.model)
    tokenizer = serving.need_tokenizer()
    text = await asyncio.to_thread(_text_of, asked.tokens, tokenizer, serving.plan.model.vocab_size)
    return JSONResponse({"prompt": text})


async def tokenizer_info(request: Request) -> Response:
    """`GET /tokenizer_info`: what a client needs to make prompts as the server does."""
    serving: Serving = request.app.state.serving
    if not serving.config.enable_tokenizer_info:
        raise ApiError("tokenizer_info needs --enable-tokenizer-info", "not_found")
    tokenizer = serving.need_tokenizer()
    return JSONResponse(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": serving.template or tokenizer.chat_template,
            **tokenizer.special_tokens,
        }
    )


def _models(serving: Serving) -> list[dict[str, Any]]:
    common = {
        "object": "model",
        "created": serving.created,
        "owned_by": "heddle",
        "max_model_len": serving.max_model_len,
    }
    base = serving.names[0]
    own = [{"id": name, **common, "root": base, "parent": None} for name in serving.names]
    adapters = serving.engine.driver.adapters.names
    return own + [{"id": name, **common, "root": name, "parent": base} for name in adapters]


def _text_of(token_ids: Sequence[int], tokenizer: Tokenizer, vocab_size: int) -> str:
    """Beside the event loop: there may be a million of them."""
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise ApiError(
                f"tokens.{index}: a token id is in 0..{vocab_size - 1}", param=f"tokens.{index}"
            )
    return tokenizer.decode(token_ids, False)


def _token_text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")
