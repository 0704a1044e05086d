"""The admin socket: what it tells and does, and that the public port does neither."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from heddle.errors import ConfigError
from heddle.server.config import ServerConfig
from heddle.server.serving import Phase
from tests.server.test_streams import LONG, eventually
from tests.support.served import Served, toy_server

ROUTES = [
    ("GET", "/server_info"),
    ("POST", "/drain"),
    ("POST", "/abort/x"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/adapters"),
    ("DELETE", "/adapters/x"),
]


@pytest.fixture
def both(tmp_path: Path) -> Iterator[tuple[Served, httpx2.Client]]:
    path = str(tmp_path / "admin.sock")
    with toy_server(
        tmp_path / "toy", admin_uds=path, api_key=("secret-key",), step_seconds=0.02
    ) as served:
        served.client.headers["authorization"] = "Bearer secret-key"
        transport = httpx2.HTTPTransport(uds=path)
        with httpx2.Client(transport=transport, base_url="http://admin", timeout=60.0) as admin:
            yield served, admin


def test_it_tells_what_runs_and_no_secret(both: tuple[Served, httpx2.Client]) -> None:
    _, admin = both
    response = admin.get("/server_info")
    assert "secret-key" not in response.text
    found = response.json()
    assert found["phase"] == "ready"
    assert found["models"] == ["toy"]
    assert found["engine"]["parallel"]["tensor_parallel_size"] == 1
    assert found["kv_tokens_total"] > 0
    assert found["server"]["api_key"] == "***"


def test_the_public_port_has_none_of_it(both: tuple[Served, httpx2.Client]) -> None:
    served, admin = both
    for method, path in ROUTES:
        assert served.client.request(method, path).status_code == 404, path
    for path in ("/v1/models", "/v1/completions", "/metrics"):
        assert admin.get(path).status_code == 404


def test_a_request_is_ended_by_its_id(both: tuple[Served, httpx2.Client]) -> None:
    served, admin = both
    found: list[Any] = []

    def ask(stream: bool) -> None:
        response = served.client.post(
            "/v1/completions",
            json={"prompt": "a", "stream": stream, **LONG},
            headers={"x-request-id": "mine"},
        )
        found.append(response)

    threads = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False)]
    for thread in threads:
        thread.start()
    eventually(lambda: served.serving.engine.driver.num_running == 2)
    steps = served.serving.engine.driver.counters.totals()["steps"]
    eventually(lambda: served.serving.engine.driver.counters.totals()["steps"] > steps + 2)
    assert admin.post("/abort/other").json() == {"aborted": 0}
    assert admin.post("/abort/mine").json() == {"aborted": 2}
    for thread in threads:
        thread.join(60)
    assert admin.post("/abort/mine").json() == {"aborted": 0}
    by_status = {response.status_code: response for response in found}
    assert set(by_status) == {200, 503}
    assert "[DONE]" not in by_status[200].text
    assert "operator has ended" in by_status[200].text
    assert by_status[503].headers["x-should-retry"] == "false"
    eventually(lambda: not served.serving.engine.driver.has_work)


def test_cached_prefixes_are_forgotten(both: tuple[Served, httpx2.Client]) -> None:
    served, admin = both

    def cached() -> int:
        usage = served.complete(prompt=[5, 6] * 40, max_tokens=1)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(), cached() > 0] == [0, True]
    assert admin.post("/reset_prefix_cache").status_code == 200
    assert cached() == 0


def test_adapters_are_refused_with_a_reason(both: tuple[Served, httpx2.Client]) -> None:
    _, admin = both
    response = admin.post("/adapters", json={"name": "a", "path": "b"})
    assert response.status_code == 400
    assert "lora" in response.json()["error"]["message"]
    assert admin.delete("/adapters/a").status_code == 400
    assert admin.post("/adapters", json={"name": "a"}).json()["error"]["param"] == "path"


def test_a_drain_ends_the_server_once(both: tuple[Served, httpx2.Client]) -> None:
    served, admin = both
    thread = threading.Thread(target=lambda: served.complete(prompt="a", **LONG))
    thread.start()
    eventually(lambda: served.serving.engine.driver.num_running == 1)
    assert admin.post("/drain").status_code == 202
    eventually(lambda: served.serving.phase is Phase.DRAINING)
    assert admin.post("/drain").json()["error"]["code"] == "conflict"
    thread.join(60)


def test_an_unknown_path_is_pointed_to_what_this_listener_has(
    both: tuple[Served, httpx2.Client],
) -> None:
    _, admin = both
    for path in ("/nothing", "/v1/completions"):
        error = admin.get(path).json()["error"]
        assert error["code"] == "not_found"
        assert "/v1/" not in error["message"]
        for own in ("/server_info", "/drain", "/abort/{name}", "/adapters"):
            assert own in error["message"]


def test_a_port_needs_a_key_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--admin-api-key-file"):
        ServerConfig(admin_port=9)
    with pytest.raises(ConfigError, match="give one"):
        ServerConfig(admin_port=9, admin_uds="x", admin_api_key_file="y")
