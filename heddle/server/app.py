"""The routes, and the one shape of everything that is not an answer."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from heddle.errors import HeddleError
from heddle.server import facts
from heddle.server.chat import create_chat_completion
from heddle.server.completions import create_completion
from heddle.server.errors import ApiError
from heddle.server.guard import HEALTH_PATH, OPEN_PATHS, PAGE_PATH, TOLD_FAULT
from heddle.server.health import health, ready
from heddle.server.job import ClientGone
from heddle.server.openapi import openapi
from heddle.server.serving import Serving
from heddle.server.ui import page

log = logging.getLogger("heddle.server")
NOT_BUILT = (
    "responses",
    "embeddings",
    "moderations",
    "images/generations",
    "audio/speech",
    "files",
)
"""OpenAI paths that are answered with what is offered instead."""
OFFERED = ("/v1/completions", "/v1/chat/completions")
"""Paths that a client is pointed to whose path is none."""
CLIENT_CLOSED = 499
"""Status of an answer that nobody was there to read, in log and metrics."""

Endpoint = Callable[[Request], Awaitable[Any]]


def create_app(serving: Serving, *more: Route) -> Starlette:
    """The application of the public port.

    Args:
        serving: what is served.
        more: further routes.
    """
    routes = [
        Route("/v1/models", facts.list_models, methods=["GET"]),
        Route("/v1/models/{name:path}", facts.show_model, methods=["GET"]),
        Route("/v1/completions", create_completion, methods=["POST"]),
        Route("/v1/chat/completions", create_chat_completion, methods=["POST"]),
        Route("/tokenize", facts.tokenize, methods=["POST"]),
        Route("/detokenize", facts.detokenize, methods=["POST"]),
        Route("/tokenizer_info", facts.tokenizer_info, methods=["GET"]),
        Route(HEALTH_PATH, health, methods=["GET"]),
        Route("/ready", ready, methods=["GET"]),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/version", facts.version, methods=["GET"]),
        Route("/load", facts.load, methods=["GET"]),
        Route("/openapi.json", openapi, methods=["GET"]),
        Route(PAGE_PATH, page, methods=["GET"]),
        *(Route(f"/v1/{name}", _not_built, methods=["GET", "POST"]) for name in NOT_BUILT),
        *more,
    ]
    app = Starlette(
        routes=routes,
        exception_handlers=error_handlers(),
    )
    app.router.redirect_slashes = False
    app.state.serving = serving
    app.state.deep_health = None
    app.state.offered = OFFERED
    return app


def error_handlers() -> dict[Any, Callable[[Request, Exception], Awaitable[Response]]]:
    """What becomes of every exception that leaves a handler."""
    return {
        ApiError: _tell,
        HeddleError: _tell_known,
        HTTPException: _tell_http,
        ClientGone: _tell_nobody,
        ClientDisconnect: _tell_nobody,
        Exception: _tell_fault,
    }


async def _not_built(request: Request) -> Response:
    raise ApiError(f"this path is not served; {_offered(request)}", "not_found")


async def _tell(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    if request.url.path not in OPEN_PATHS:  # a probe that is told to wait is no refusal
        serving: Serving = request.app.state.serving
        serving.on_refusal(request.state.request_id, error)
    return JSONResponse(error.body(), error.status, dict(error.headers))


async def _tell_known(request: Request, error: Exception) -> Response:
    serving: Serving = request.app.state.serving
    return await _tell(request, serving.explain(error))


async def _tell_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = dict(error.headers or {})
        return await _tell(
            request,
            ApiError("this path does not take this method", "method_not_allowed", headers=allowed),
        )
    if error.status_code == 404:
        return await _tell(request, ApiError(f"no such path; {_offered(request)}", "not_found"))
    return await _tell(request, ApiError(str(error.detail)))


def _offered(request: Request) -> str:
    """What this listener has."""
    *most, last = request.app.state.offered
    return f"{', '.join(most)} and {last} are served here"


async def _tell_nobody(request: Request, error: Exception) -> Response:
    del request, error
    return Response(status_code=CLIENT_CLOSED)


async def _tell_fault(request: Request, error: Exception) -> Response:
    request_id = request.state.request_id
    log.error("request %s: a fault of heddle", request_id, exc_info=error)
    setattr(request.state, TOLD_FAULT, error)  # it is raised once more behind this answer
    told = ApiError(f"internal error; the log has it under {request_id}", "internal_error")
    return await _tell(request, told)
