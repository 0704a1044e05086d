"""What the operator may do and see: on a socket or port of its own, never on the public one.

GET  /server_info           what runs: settings without secrets, layout, reasons, ranks
POST /drain                 take nothing new, finish what is open, end
POST /abort/{id}            end a request, by the X-Request-Id of its answer
POST /reset_prefix_cache    forget cached prefixes and pins
POST /adapters              {"name", "path"}: load a LoRA adapter
DELETE /adapters/{name}     forget one
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from heddle import __version__
from heddle.errors import HeddleError
from heddle.server.app import error_handlers
from heddle.server.bodies import decode_body, read_body
from heddle.server.config import SECRETS, ServerConfig
from heddle.server.errors import ApiError
from heddle.server.serving import Phase, Serving

MAX_BODY_BYTES = 1 << 16


class AdapterRequest(msgspec.Struct, kw_only=True):
    """`POST /adapters`."""

    name: str
    path: str


def create_admin_app(serving: Serving, stop: Callable[[], None]) -> Starlette:
    """The application of the admin socket.

    Args:
        serving: what is served.
        stop: begins the end of the server.
    """
    routes = [
        Route("/server_info", server_info, methods=["GET"]),
        Route("/drain", drain, methods=["POST"]),
        Route("/abort/{name}", abort, methods=["POST"]),
        Route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
        Route("/adapters", load_adapter, methods=["POST"]),
        Route("/adapters/{name}", unload_adapter, methods=["DELETE"]),
    ]
    app = Starlette(routes=routes, exception_handlers=error_handlers())
    app.router.redirect_slashes = False
    app.state.serving = serving
    app.state.stop = stop
    app.state.offered = [route.path for route in routes]
    return app


async def server_info(request: Request) -> Response:
    """Everything about what runs; before it is loaded, what is known already."""
    serving: Serving = request.app.state.serving
    engine = serving.running_engine
    document: dict[str, Any] = {
        "version": __version__,
        "phase": serving.look(),
        "reason": serving.reason,
        "models": list(serving.names),
        "server": settings_of(serving.config),
    }
    if engine is not None:
        plan = engine.llm.plan
        document |= {
            "engine": {
                "parallel": dataclasses.asdict(plan.parallel),
                "cache": dataclasses.asdict(plan.cache),
                "scheduler": dataclasses.asdict(plan.scheduler),
                "dtype": plan.dtype,
                "kv_cache_dtype": plan.kv_cache_dtype,
                "executor": plan.executor,
                "num_blocks": plan.num_blocks,
                "num_threads": plan.num_threads,
                "reasons": list(plan.reasons),
            },
            "kv_tokens_total": serving.capacity.kv_tokens_total,
            "longest_prompt": serving.capacity.longest_prompt,
            "counters": engine.llm.get_metrics(),
            "open_requests": serving.num_open,
            "epoch": serving.epoch,
            "restarts": serving.epoch,
        }
    return JSONResponse(document)


async def drain(request: Request) -> Response:
    """Begin the end; 409 when it has begun."""
    serving: Serving = request.app.state.serving
    if serving.look() is Phase.DRAINING:
        raise ApiError("the server is draining already", "conflict")
    request.app.state.stop()
    return JSONResponse({"draining": serving.num_open}, 202)


async def abort(request: Request) -> Response:
    """End a request; 200 whether it was open or not."""
    serving: Serving = request.app.state.serving
    return JSONResponse({"aborted": serving.abort(request.path_params["name"])})


async def reset_prefix_cache(request: Request) -> Response:
    """Forget all cached prefixes."""
    serving: Serving = request.app.state.serving
    await serving.engine.call(serving.engine.driver.reset_prefix_cache)
    return JSONResponse({})


async def load_adapter(request: Request) -> Response:
    """Load an adapter that requests may name as their model."""
    serving: Serving = request.app.state.serving
    asked, _ = await decode_body(await read_body(request, MAX_BODY_BYTES), AdapterRequest)
    driver = serving.engine.driver
    return await _change(serving, lambda: driver.load_adapter(asked.name, asked.path))


async def unload_adapter(request: Request) -> Response:
    """Forget an adapter that no open request uses."""
    serving: Serving = request.app.state.serving
    driver, name = serving.engine.driver, request.path_params["name"]
    return await _change(serving, lambda: driver.unload_adapter(name))


async def _change(serving: Serving, change: Callable[[], None]) -> Response:
    try:
        await serving.engine.call(change)
    except HeddleError as error:
        if serving.look() is Phase.FAILED:
            raise
        raise ApiError(str(error)) from error
    return JSONResponse({"adapters": list(serving.engine.driver.adapters.names)})


def settings_of(config: ServerConfig) -> dict[str, Any]:
    """Settings of the server, without secrets."""
    found = dataclasses.asdict(config)
    return {name: "***" if name in SECRETS and value else value for name, value in found.items()}
