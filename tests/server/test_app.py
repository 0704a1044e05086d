"""Whatever a handler does, and whatever path is asked for, the answer has the one shape."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx2
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route

from heddle.errors import HeddleError, RankFailed, RequestError
from heddle.server.app import CLIENT_CLOSED, NOT_BUILT, create_app
from heddle.server.config import ServerConfig
from heddle.server.errors import ApiError
from heddle.server.guard import Guard, KeyRing
from heddle.server.job import ClientGone
from heddle.server.serving import Serving


def ask(path: str, method: str = "GET", error: BaseException | None = None) -> httpx2.Response:
    """An answer of the application; `/raises` raises."""

    async def raises(request: Request) -> Any:
        assert error is not None
        raise error

    app = create_app(Serving(ServerConfig(), "toy"), Route("/raises", raises))
    guard = Guard(app, keys=KeyRing(()), local_only=True, origins=())

    async def body() -> httpx2.Response:
        transport = httpx2.ASGITransport(app=guard, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path)

    return asyncio.run(body())


def error_of(response: httpx2.Response) -> dict[str, Any]:
    document = response.json()
    assert list(document) == ["error"]
    assert list(document["error"]) == ["message", "type", "param", "code"]
    found: dict[str, Any] = document["error"]
    return found


@pytest.mark.parametrize("name", NOT_BUILT)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_paths_of_others_are_answered_with_what_is_offered(name: str, method: str) -> None:
    response = ask(f"/v1/{name}", method)
    assert response.status_code == 404
    assert "/v1/chat/completions" in error_of(response)["message"]


@pytest.mark.parametrize("path", ["/v1", "/v1/completions/", "/nope", "/docs", "/v1/x/y"])
def test_unknown_paths_are_not_found_and_not_redirected(path: str) -> None:
    response = ask(path)
    assert response.status_code == 404
    assert error_of(response)["code"] == "not_found"


@pytest.mark.parametrize(
    ("path", "method", "allowed"),
    [
        ("/v1/completions", "GET", {"POST"}),
        ("/v1/models", "DELETE", {"GET", "HEAD"}),
        ("/ping", "PUT", {"GET", "HEAD", "POST"}),
    ],
)
def test_wrong_methods_are_told_the_right_ones(path: str, method: str, allowed: set[str]) -> None:
    response = ask(path, method)
    assert response.status_code == 405
    assert error_of(response)["code"] == "method_not_allowed"
    assert {word.strip() for word in response.headers["allow"].split(",")} == allowed


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ApiError("why", "conflict", param="a.b"), 409, "conflict"),
        (RequestError("why", "invalid_grammar"), 400, "invalid_grammar"),
        (RankFailed("rank 1"), 503, "engine_unavailable"),
        (HeddleError("closed"), 503, "engine_unavailable"),
        (HTTPException(400, "why"), 400, None),
    ],
)
def test_what_a_handler_raises_is_told(error: Exception, status: int, code: str | None) -> None:
    response = ask("/raises", error=error)
    assert response.status_code == status
    assert error_of(response)["code"] == code
    if isinstance(error, ApiError):
        assert error_of(response)["param"] == "a.b"
    if status == 503:
        assert int(response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("error", [ClientGone(), ClientDisconnect()])
def test_nobody_is_told_when_the_client_has_left(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    response = ask("/raises", error=error)
    assert (response.status_code, response.content) == (CLIENT_CLOSED, b"")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_fault_is_logged_under_the_id_that_the_client_sees(
    caplog: pytest.LogCaptureFixture,
) -> None:
    response = ask("/raises", error=ZeroDivisionError("/secret/path"))
    assert response.status_code == 500
    request_id = response.headers["x-request-id"]
    error = error_of(response)
    assert error["code"] == "internal_error"
    assert request_id in error["message"]
    assert "secret" not in response.text
    (record,) = [r for r in caplog.records if r.name == "heddle.server"]
    assert request_id in record.getMessage()
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ZeroDivisionError)
