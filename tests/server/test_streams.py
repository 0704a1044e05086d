"""How streams begin, go on and end; clients that leave; the end of the server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from heddle.errors import RankFailed
from heddle.server.serving import Phase
from tests.support.served import Served, parse_events, toy_server

LONG = {"max_tokens": 200, "temperature": 0, "ignore_eos": True}


def eventually(condition: Callable[[], bool], limit: float = 60.0) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def is_empty(served: Served) -> bool:
    """Nothing is open, and every block is free or cached."""
    driver = served.serving.engine.driver
    cache = driver.replicas[0].cache
    return (
        not driver.has_work
        and served.serving.num_open == 0
        and cache.num_available_blocks == cache.num_usable_blocks
    )


def test_headers_of_a_stream(served: Served) -> None:
    body = {"prompt": "a", "max_tokens": 2, "stream": True}
    with served.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        response.read()


def test_all_of_a_stream_is_ascii(served: Served) -> None:
    body = {"prompt": "a", "echo": True, "max_tokens": 1, "stream": True}
    body["prompt"] = "\u2028\u0085\u2029é\U0001f600"
    with served.client.stream("POST", "/v1/completions", json=body) as response:
        data = response.read()
    assert data.isascii()
    first = parse_events(data.decode())[0]["choices"][0]["text"]
    assert first.startswith("\u2028\u0085\u2029é\U0001f600")


def test_errors_before_the_first_token_are_plain(served: Served) -> None:
    response = served.post("/v1/completions", prompt=[1] * 400, stream=True)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_a_silent_prefill_reports_its_progress(tmp_path: Path) -> None:
    with toy_server(
        tmp_path,
        engine={"max_num_batched_tokens": 8},
        step_seconds=0.15,
        sse_keep_alive_interval=0.1,
    ) as served:
        body = {"prompt": [3] * 60, "max_tokens": 1, "stream": True}
        with served.client.stream("POST", "/v1/completions", json=body) as response:
            comments = [line for line in response.iter_lines() if line.startswith(":")]
        numbers = [
            int(line.split()[2].split("/")[0]) for line in comments if line.startswith(": prefill")
        ]
        assert len(numbers) >= 3
        assert numbers == sorted(numbers)
        assert all(line.endswith("/60") for line in comments if line.startswith(": prefill"))


def test_progress_comes_in_chunks_where_asked_for(tmp_path: Path) -> None:
    with toy_server(tmp_path, engine={"max_num_batched_tokens": 4}, step_seconds=0.2) as served:
        *chunks, last, done = served.events(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "word " * 10}],
            max_tokens=2,
            stream_options={"include_progress": True},
        )
        reports = [chunk["progress"] for chunk in chunks if "progress" in chunk]
        assert len(reports) >= 2
        computed = [report["computed_tokens"] for report in reports]
        assert computed == sorted(set(computed))
        assert all(report["prompt_tokens"] > computed[-1] for report in reports)
        assert any(report["estimated_seconds_to_first_token"] for report in reports)
        assert all(chunk["choices"] == [] for chunk in chunks if "progress" in chunk)
        assert done == "[DONE]"
        assert last["choices"][0]["finish_reason"] == "length"


def test_a_failure_in_mid_stream_is_an_event_and_no_end_follows(tmp_path: Path) -> None:
    with toy_server(tmp_path, is_poisoned=lambda tokens: len(tokens) == 20) as served:
        events = served.events("/v1/completions", prompt=[5] * 10, **LONG)
        error = events[-1]["error"]
        assert error["code"] == "generation_failed"
        assert error["type"] == "server_error"
        assert all("choices" in event for event in events[:-1])
        assert len(events) > 3
        response = served.post("/v1/completions", prompt=[5] * 10, **LONG)
        assert response.status_code == 500
        assert response.headers["x-should-retry"] == "false"
        short = served.complete(prompt=[6], max_tokens=3, ignore_eos=True)
        assert short["choices"][0]["finish_reason"] == "length"
        eventually(lambda: is_empty(served))


def test_a_failed_engine_ends_all_streams_and_the_server(tmp_path: Path) -> None:
    with toy_server(tmp_path, step_seconds=0.02, engine={"max_restarts": 0}) as served:
        found: list[list[Any]] = []
        threads = [
            threading.Thread(
                target=lambda: found.append(served.events("/v1/completions", prompt="a", **LONG))
            )
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        driver = served.serving.engine.driver
        eventually(lambda: driver.num_running == 3)
        steps = driver.counters.totals()["steps"]
        eventually(lambda: driver.counters.totals()["steps"] > steps + 3)  # all have begun
        driver._executor.inner.failure = RankFailed("rank 1 was killed")
        for thread in threads:
            thread.join(60)
        assert len(found) == 3
        for events in found:
            assert events[-1]["error"]["code"] == "engine_unavailable"
        eventually(lambda: served.serving.phase is Phase.FAILED)


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_leaves_frees_its_blocks(tmp_path: Path, path: str, is_stream: bool) -> None:
    with toy_server(tmp_path, step_seconds=0.01) as served:
        body = (
            {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
        )
        data = json.dumps({**body, **LONG, "stream": is_stream}).encode()
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(data)}\r\n\r\n".encode()
                + data
            )
            eventually(lambda: served.serving.engine.driver.num_running == 1)
        eventually(lambda: is_empty(served))
        metrics = served.serving.engine.llm.get_metrics()
        assert metrics["requests_abort"] == 1


def test_many_clients_that_leave_at_random_points_leave_nothing(tmp_path: Path) -> None:
    choose = random.Random(5)
    with toy_server(tmp_path, engine={"max_num_seqs": 16}, step_seconds=0.001) as served:

        async def visit(client: httpx2.AsyncClient, number: int) -> None:
            body = {
                "prompt": [choose.randrange(3, 200) for _ in range(choose.randrange(1, 150))],
                "max_tokens": choose.randrange(1, 90),
                "stream": bool(number % 2),
                "n": choose.choice((1, 1, 3)),
                "ignore_eos": True,
            }
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(choose.choice((0.01, 0.05, 0.2, 1.0, 30.0))):
                    response = await client.post("/v1/completions", json=body)
                    assert response.status_code in (200, 429)

        async def all_of_them() -> None:
            limits = httpx2.Limits(max_connections=60)
            async with httpx2.AsyncClient(
                base_url=served.url, timeout=120.0, limits=limits
            ) as client:
                await asyncio.gather(*(visit(client, number) for number in range(500)))

        asyncio.run(all_of_them())
        eventually(lambda: is_empty(served))
        served.serving.engine.driver.audit()
        door = served.serving._door
        assert door is not None
        assert (door.num_open_requests, door.num_open_tokens) == (0, 0)


def test_a_deadline_ends_a_request(tmp_path: Path) -> None:
    with toy_server(tmp_path, step_seconds=0.05) as served:
        headers = {"x-request-timeout-ms": "400"}
        body = {"prompt": "a", **LONG}
        late = served.client.post("/v1/completions", json=body, headers=headers)
        assert (late.status_code, late.json()["error"]["code"]) == (408, "request_timeout")
        assert late.headers["x-should-retry"] == "false"
        with served.client.stream(
            "POST", "/v1/completions", json={**body, "stream": True}, headers=headers
        ) as response:
            events = parse_events(response.read().decode())
        assert events[-1]["error"]["code"] == "request_timeout"
        eventually(lambda: is_empty(served))
        for bad in ("0", "-1", "x", "1.5", ""):
            refused = served.client.post(
                "/v1/completions", json=body, headers={"x-request-timeout-ms": bad}
            )
            assert refused.status_code == 400


def test_a_full_queue_refuses_with_a_time_to_come_back(tmp_path: Path) -> None:
    engine = {"max_num_seqs": 1, "max_num_queued_reqs": 2}
    with toy_server(tmp_path, engine=engine, step_seconds=0.02) as served:
        threads = [
            threading.Thread(target=served.complete, kwargs={"prompt": "a", **LONG})
            for _ in range(3)
        ]
        door = served.serving._door
        assert door is not None
        threads[0].start()
        eventually(lambda: (door.num_open_requests, door.num_queued_requests) == (1, 0))
        for thread in threads[1:]:
            thread.start()
        eventually(lambda: served.serving.engine.driver.num_waiting == 2)
        refused = served.post("/v1/completions", prompt="a", **LONG)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "engine_overloaded"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert int(refused.headers["retry-after-ms"]) >= 1000
        for thread in threads:
            thread.join(60)
        served.complete(prompt="a", max_tokens=1)


def test_a_server_that_stops_finishes_what_is_open(tmp_path: Path) -> None:
    with toy_server(tmp_path, step_seconds=0.02) as served:
        found: list[list[Any]] = []
        thread = threading.Thread(
            target=lambda: found.append(served.events("/v1/completions", prompt="a", **LONG))
        )
        thread.start()
        eventually(lambda: served.serving.engine.driver.num_running == 1)
        served.stop()
        eventually(lambda: served.serving.phase is Phase.DRAINING)
        refused = served.post("/v1/completions", prompt="a")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        assert served.client.get("/health").status_code == 200
        assert served.client.get("/ready").status_code == 503
        thread.join(60)
        assert found[0][-1] == "[DONE]"


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    with toy_server(tmp_path, step_seconds=0.1) as served:
        ended: list[BaseException | list[Any]] = []

        def read() -> None:
            try:
                ended.append(served.events("/v1/completions", prompt="a", **LONG))
            except (httpx2.HTTPError, AssertionError) as error:
                ended.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        eventually(lambda: served.serving.engine.driver.num_running == 1)
        served.stop()
        eventually(lambda: served.serving.phase is Phase.DRAINING)
        served.stop()
        thread.join(60)
        (end,) = ended
        assert not (isinstance(end, list) and end[-1] == "[DONE]"), "a cut stream looks whole"
