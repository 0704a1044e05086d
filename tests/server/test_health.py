"""The deep look at the engine: by what is known, by a step of others, or by one canary."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from heddle.engine.async_llm import AsyncLLM
from heddle.errors import PlanMismatch, RankFailed
from heddle.server import health
from heddle.server.app import create_app
from heddle.server.config import ServerConfig
from heddle.server.guard import is_deep
from heddle.server.health import BUDGET_SECONDS, FRESH_SECONDS, DeepHealth
from heddle.server.metrics import Metrics
from heddle.server.openapi import openapi_document
from heddle.server.serving import Serving
from tests.support.served import Served, toy_server
from tests.support.toy_engine import ToyLLM, continued, greedy, ids_of, run_engine, submit, until


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Looked:
    """An engine without work, and its deep health; time stands still unless it is moved."""

    def __init__(self, engine: AsyncLLM, llm: ToyLLM, metrics: Metrics, clock: Clock) -> None:
        self.engine, self.llm, self.clock = engine, llm, clock
        self.deep = DeepHealth(engine, metrics.canaries, clock=clock)

    @property
    def num_steps(self) -> int:
        return self.llm.executor.num_steps

    async def ages(self, count: int = 1) -> list[float | None]:
        """Of so many looks at once, which all find the engine well."""
        findings = await asyncio.gather(*(self.deep.look() for _ in range(count)))
        assert [finding.trouble for finding in findings] == [""] * count
        return [self.deep.age(finding) for finding in findings]


def run_looked(test: Callable[[Looked], Any], **config: Any) -> None:
    clock = Clock()
    metrics = Metrics("toy", clock=clock)

    async def body(engine: AsyncLLM, llm: ToyLLM) -> None:
        await engine.call(lambda: metrics.attach(llm))  # type: ignore[arg-type]
        await test(Looked(engine, llm, metrics, clock))

    run_engine(body, watch=metrics.watch_executor, on_step=metrics.on_step, **config)


def test_the_times_are_those_of_the_contract() -> None:
    assert (FRESH_SECONDS, BUDGET_SECONDS) == (5.0, 20.0)


def test_all_who_ask_at_once_share_one_canary() -> None:
    async def test(looked: Looked) -> None:
        assert await looked.ages(10) == [0.0] * 10
        assert looked.num_steps == 1

    run_looked(test)


def test_what_was_found_holds_for_five_seconds() -> None:
    async def test(looked: Looked) -> None:
        assert await looked.ages() == [0.0]
        looked.clock.now += 4.5
        assert await looked.ages() == [4.5]
        assert looked.num_steps == 1
        looked.clock.now += 0.5
        assert await looked.ages() == [0.0]
        assert looked.num_steps == 2

    run_looked(test)


def test_steps_of_requests_are_proof_enough() -> None:
    async def test(looked: Looked) -> None:
        await ids_of(submit(looked.engine, [3, 4], greedy(6)))
        looked.clock.now += 4.0
        assert await looked.ages() == [4.0]
        finding = await looked.deep.look()
        assert finding.took == 0.0
        assert looked.num_steps == 6

    run_looked(test)


def test_while_a_step_is_under_way_its_end_is_waited_for() -> None:
    async def test(looked: Looked) -> None:
        looked.llm.executor.shut()
        stream = submit(looked.engine, [3, 4], greedy(6))
        await until(lambda: looked.llm.driver.is_busy)
        looking = asyncio.ensure_future(looked.ages(3))
        await asyncio.sleep(0.02)
        assert not looking.done()
        looked.clock.now += 7.0
        looked.llm.executor.open()
        assert await looking == [0.0] * 3
        assert await ids_of(stream) == continued([3, 4], 6)
        assert looked.num_steps == 6  # no canary among them

    run_looked(test)


def test_the_budget_ends_a_look_and_a_later_step_ends_the_trouble(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "BUDGET_SECONDS", 0.05)

    async def test(looked: Looked) -> None:
        looked.llm.executor.shut()
        first, second = await asyncio.gather(looked.deep.look(), looked.deep.look())
        assert first is second
        assert first.trouble == "not every rank has ended a step within 0.05 s"
        assert looked.deep.age(first) is None
        assert await looked.deep.look() is first  # it holds as long as good news
        looked.clock.now += FRESH_SECONDS
        again = await looked.deep.look()
        assert again is not first
        assert again.trouble == first.trouble
        looked.llm.executor.open()
        await until(lambda: looked.num_steps == 1)
        monkeypatch.setattr(health, "BUDGET_SECONDS", 60.0)
        await until(lambda: looked.deep._canaries.proven() > 0)
        assert await looked.ages() == [0.0]
        assert looked.num_steps == 1  # those who gave up have left no second canary behind

    run_looked(test)


def test_one_who_leaves_does_not_take_the_others_along() -> None:
    async def test(looked: Looked) -> None:
        looked.llm.executor.shut()
        leaving = asyncio.ensure_future(looked.deep.look())
        staying = asyncio.ensure_future(looked.ages())
        await until(lambda: looked.llm.executor.rounds)
        leaving.cancel()
        await asyncio.wait({leaving})
        looked.llm.executor.open()
        assert await staying == [0.0]
        assert looked.num_steps == 1

    run_looked(test)


@pytest.mark.parametrize("kind", [RankFailed, PlanMismatch])
def test_a_rank_that_fails_ends_the_engine_and_its_cause_is_for_the_log(
    kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    async def test(looked: Looked) -> None:
        looked.llm.executor.failure = kind("rank 1 has gone")
        finding = await looked.deep.look()
        assert finding.trouble == "the engine has failed"
        assert "rank 1 has gone" in caplog.text
        await until(lambda: looked.engine.failure is not None)
        looked.clock.now += FRESH_SECONDS
        assert (await looked.deep.look()).trouble == "the engine has failed"

    run_looked(test)


def test_bad_numbers_are_told() -> None:
    async def test(looked: Looked) -> None:
        finding = await looked.deep.look()
        assert finding.trouble == "a canary came to NaN or inf"
        assert looked.deep.age(finding) == 0.0
        assert await looked.deep.look() is finding
        looked.clock.now += 1.0
        await ids_of(submit(looked.engine, [3, 4], greedy(2)))
        assert await looked.ages() == [0.0]

    run_looked(test, is_poisoned=lambda tokens: list(tokens) == [1])


# Over HTTP.


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with toy_server(tmp_path_factory.mktemp("toy"), api_key=("secret",)) as made:
        yield made


KEY = {"authorization": "Bearer secret"}


@pytest.mark.parametrize("query", ["deep=1", "deep=true", "deep=0&deep=1", "deep=yes", "%64eep=1"])
def test_a_deep_look_needs_a_key(locked: Served, query: str) -> None:
    refused = locked.client.get(f"/health?{query}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    found = locked.client.get(f"/health?{query}", headers=KEY)
    assert found.status_code == 200
    numbers = found.json()
    assert set(numbers) == {"age_s", "took_s"}
    assert 0 <= numbers["age_s"] < BUDGET_SECONDS
    assert 0 <= numbers["took_s"] < BUDGET_SECONDS


@pytest.mark.parametrize("query", ["", "deep=0", "deep=", "deep=false", "deep=1&deep=0", "DEEP=1"])
def test_any_other_look_is_open_and_asks_nobody(locked: Served, query: str) -> None:
    for path in ("/health", "/ping"):
        found = locked.client.get(f"{path}?{query}")
        assert (found.status_code, found.json()) == (200, {})
    assert locked.client.get("/ping?deep=1").json() == {}


def test_the_document_tells_of_the_deep_look(locked: Served) -> None:
    document = openapi_document()
    described = document["paths"]["/health"]["get"]
    assert [given["name"] for given in described["parameters"]] == ["deep"]
    content = described["responses"]["200"]["content"]["application/json"]
    name = content["schema"]["$ref"].removeprefix("#/components/schemas/")
    numbers = locked.client.get("/health?deep=1", headers=KEY).json()
    assert set(document["components"]["schemas"][name]["properties"]) == set(numbers)
    assert "parameters" not in document["paths"]["/ping"]["get"]


def test_queries_of_any_bytes_are_read() -> None:
    for query in (b"\xff\xfe", b"&&=;%zz", b"deep"):
        assert not is_deep({"path": "/health", "query_string": query})
    assert is_deep({"path": "/health", "query_string": b"\xff&deep=1"})
    assert not is_deep({"path": "/health"})


def test_it_is_not_well_before_a_model_is_there_nor_when_it_has_failed(tmp_path: Path) -> None:
    async def ask(serving: Serving) -> httpx2.Response:
        transport = httpx2.ASGITransport(app=create_app(serving))
        async with httpx2.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.get("/health?deep=1")

    serving = Serving(ServerConfig(), "toy")
    loading = asyncio.run(ask(serving))
    assert (loading.status_code, loading.headers["retry-after"]) == (503, "5")
    assert loading.json() == {
        "error": {
            "message": "the model is loading",
            "type": "server_error",
            "param": None,
            "code": "engine_unavailable",
        },
        "age_s": None,
        "took_s": 0.0,
    }
    serving.fail("rank 1 has gone")
    assert asyncio.run(ask(serving)).json()["error"]["message"] == "the engine has failed"


def test_no_look_is_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "FRESH_SECONDS", 0.0)
    with toy_server(tmp_path, engine={"data_parallel_size": 2}) as served:
        before = served.client.get("/metrics").text
        for _ in range(3):
            assert served.client.get("/health?deep=1").status_code == 200
        after = served.client.get("/metrics").text
        assert _steps(after) > _steps(before)
        kept = [_requests(text) for text in (before, after)]
        assert kept[0] == kept[1]
        assert len(kept[0]) > 200
        served.complete(prompt=[3, 4], max_tokens=3)
        assert served.client.get("/metrics").text != after


def _steps(text: str) -> float:
    """Number of the last step that any rank has ended; -1: none yet."""
    lines = [line for line in text.splitlines() if line.startswith("heddle:rank_step{")]
    return max((float(line.rpartition(" ")[2]) for line in lines), default=-1.0)


def _requests(text: str) -> list[str]:
    """Lines of all metrics of requests, tokens and steps."""
    hidden = ("heddle:rank_", "heddle:kv_blocks", "heddle:measured", "heddle:event_loop", "http_")
    return [line for line in text.splitlines() if not line.startswith(("#", *hidden))]
