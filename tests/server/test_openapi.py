"""The document describes what is served, and nothing that it allows or forbids gives a 5xx."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from heddle.server.app import create_app
from heddle.server.config import ServerConfig
from heddle.server.openapi import openapi_document
from heddle.server.serving import Serving
from tests.support.served import Served


def test_every_route_is_described_or_known_to_be_left_out() -> None:
    app = create_app(Serving(ServerConfig(), "toy"))
    routes = {route.path for route in app.routes}
    described = set(openapi_document()["paths"])
    assert described <= routes
    left_out = {path for path in routes - described if not path.startswith("/v1/")}
    assert left_out == {"/", "/tokenizer_info", "/openapi.json"}


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
)
def test_no_body_gives_a_server_error(served: Served, path: str, mode: GenerationMode) -> None:
    operation = schemathesis.openapi.from_dict(openapi_document())[path]["POST"]
    codes: set[int] = set()

    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        if isinstance(case.body, dict):  # short answers: it is the request that is tried
            case.body.setdefault("max_tokens", 2)
        response = case.call(base_url=served.url, timeout=60)
        codes.add(response.status_code)
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert len(response.content) <= 4096

    check()
    assert codes & {200, 400}
    assert served.client.get("/health").status_code == 200
