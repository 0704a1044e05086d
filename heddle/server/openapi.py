"""The OpenAPI document, from the very types that decode requests."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from heddle import __version__
from heddle.server.guard import HEALTH_PATH
from heddle.server.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

_BODIES: dict[str, tuple[type, str]] = {
    "/v1/completions": (CompletionRequest, "Complete prompts"),
    "/v1/chat/completions": (ChatRequest, "Answer a conversation"),
    "/tokenize": (TokenizeRequest, "Ids of a text"),
    "/detokenize": (DetokenizeRequest, "Text of ids"),
}
_READS = {
    "/v1/models": "Models on offer",
    HEALTH_PATH: "Whether the engine serves, or will soon",
    "/ready": "Whether new requests are taken",
    "/ping": "As /health",
    "/version": "Version of the server",
    "/load": "Open requests, sequences that run and wait, and how full the pool is",
}
_DEEP = {
    "name": "deep",
    "in": "query",
    "description": "1: every rank answers a step first, if none has lately; needs a key",
    "schema": {"type": "integer", "enum": [0, 1], "default": 0},
}
_HEALTH = {
    "type": "object",
    "description": "Empty without `deep`",
    "properties": {
        "age_s": {"type": ["number", "null"]},
        "took_s": {"type": "number"},
    },
}
_PROMPT = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "array",
                "minItems": 1,
                "items": {"type": "integer", "minimum": 0},
            },
        },
    ]
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def openapi_document() -> dict[str, Any]:
    """The whole document; plain data."""
    kinds = [kind for kind, _ in _BODIES.values()]
    schemas, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    components["CompletionRequest"]["properties"]["prompt"] = _PROMPT
    components["Error"] = _ERROR
    paths: dict[str, Any] = {
        path: {"get": {"summary": summary, "responses": _responses()}}
        for path, summary in _READS.items()
    }
    components["Health"] = _HEALTH
    paths[HEALTH_PATH]["get"] |= {"parameters": [_DEEP], "responses": _responses("Health")}
    for (path, (_, summary)), schema in zip(_BODIES.items(), schemas, strict=True):
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": schema}},
                },
                "responses": _responses(),
            }
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Heddle", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


async def openapi(request: Request) -> Response:
    """`GET /openapi.json`."""
    del request
    return JSONResponse(openapi_document())


def _responses(name: str = "") -> dict[str, Any]:
    """Of every route; `name` is the schema of its answer, where one is given."""
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    answer: dict[str, Any] = {
        "description": "The answer, or a stream of its pieces",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
    if name:
        schema = {"$ref": f"#/components/schemas/{name}"}
        answer = {"description": "The answer", "content": {"application/json": {"schema": schema}}}
    return {
        "200": answer,
        "4XX": {"description": "Refused", "content": error},
        "5XX": {"description": "Failed, or not now", "content": error},
    }
