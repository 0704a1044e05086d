"""`/metrics` of a server whose ranks are played: names, values, second names, and no waiting."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from heddle import LLM
from heddle.engine.async_llm import AsyncLLM
from heddle.engine.executors.base import Executor
from heddle.server import metric_table
from heddle.server.app import create_app
from heddle.server.config import ServerConfig
from heddle.server.guard import Guard, KeyRing
from heddle.server.metrics import CONTENT_TYPE, Metrics
from heddle.server.serving import Serving
from tests.support.fake_executor import FakeExecutor
from tests.support.served import toy_folder

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "heddle" / "server" / "dashboards" / "heddle.json"
Get = Callable[..., Any]


class Offered:
    """A server without sockets, and what it counts."""

    def __init__(self, metrics: Metrics, client: httpx2.AsyncClient, engine: AsyncLLM) -> None:
        self.metrics, self.client, self.engine = metrics, client, engine

    async def scrape(self) -> str:
        response = await self.client.get("/metrics")
        assert response.status_code == 200
        assert response.headers["content-type"] == CONTENT_TYPE
        return str(response.text)

    async def complete(self, **body: Any) -> httpx2.Response:
        return await self.client.post("/v1/completions", json=body)


@asynccontextmanager
async def offered(
    folder: Path,
    metrics: Metrics,
    *,
    executor: Callable[..., Executor] = FakeExecutor,
) -> AsyncIterator[Offered]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "heddle.engine.llm.create_executor",
            lambda resolved, **_: metrics.watch_executor(executor(resolved)),
        )
        llm = LLM(str(toy_folder(folder)), max_num_batched_tokens=32, kv_cache_memory_bytes=1 << 20)
    engine = AsyncLLM(llm, on_step=metrics.on_step)
    await engine.call(lambda: metrics.attach(llm))
    serving = Serving(ServerConfig(), "toy")
    serving.begin(engine)
    app = Guard(
        create_app(serving, metrics.route()),
        keys=KeyRing(()),
        local_only=True,
        origins=(),
        observe=metrics.observe_http,
    )
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield Offered(metrics, client, engine)
    await engine.close()


def shown_names(text: str) -> set[str]:
    """Names after `# TYPE`."""
    return set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))


def sample(text: str, name: str, **labels: str) -> float:
    """The value of one sample."""
    (found,) = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return float(found)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a server shows that has answered once."""

    async def run() -> str:
        async with offered(tmp_path_factory.mktemp("toy"), Metrics("toy")) as server:
            answer = await server.complete(prompt=[2, 3, 4, 5], max_tokens=3, ignore_eos=True)
            assert answer.status_code == 200, answer.text
            assert (await server.client.get("/nowhere/at/all")).status_code == 404
            return await server.scrape()

    return asyncio.run(run())


def test_names_are_those_of_the_page_and_no_others(live: str) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(\S+)` \| \w+ \|", page, re.MULTILINE)
    assert len(documented) == len(set(documented)) == len(metric_table.METRICS) > 40
    assert set(documented) == {n for n in shown_names(live) if not n.startswith("vllm:")}


def test_each_name_of_the_dashboard_is_there(live: str) -> None:
    queries = re.findall(r'"(?:expr|query)": "(.*)"', DASHBOARD.read_text(encoding="utf-8"))
    used = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for query in queries
        for name in re.findall(r"(?:heddle:|http_)\w+", query)
    }
    assert len(used) > 25
    assert used <= shown_names(live)


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert all(0 <= x < 24 for x, _ in cells)
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_values_are_those_of_the_request(live: str) -> None:
    toy = {"model_name": "toy", "engine": "0"}
    assert sample(live, "heddle:prompt_tokens_total", **toy) == 4
    assert sample(live, "heddle:generation_tokens_total", **toy) == 3
    assert sample(live, "heddle:request_success_total", finished_reason="length") == 1
    assert sample(live, "heddle:time_to_first_token_seconds_count", **toy) == 1
    assert sample(live, "heddle:inter_token_latency_seconds_count", **toy) == 2
    assert sample(live, "heddle:num_requests_running", **toy) == 0
    assert sample(live, "heddle:rank_up", rank="0") == 1
    blocks = [sample(live, "heddle:kv_blocks", state=s) for s in metric_table.BLOCK_STATES]
    pool = re.search(r'heddle:cache_config_info\{.*num_gpu_blocks="(\d+)"', live)
    assert pool is not None
    assert sum(blocks) == int(pool.group(1))
    assert blocks[0] == 0
    assert 0 <= blocks[1] < blocks[2]  # a short prompt leaves little behind


def test_http_is_counted_by_route_and_not_by_path(live: str) -> None:
    assert sample(live, "http_requests_total", handler="/v1/completions", status="2xx") == 1
    assert sample(live, "http_requests_total", handler="other", status="4xx") == 1
    assert "nowhere" not in live


def test_no_time_of_creation_is_shown(live: str) -> None:
    assert "_created" not in live


def test_second_names_have_the_same_values(live: str) -> None:
    pairs = 0
    for line in live.splitlines():
        if line.startswith("vllm:"):
            assert line.replace("vllm:", "heddle:", 1) in live.splitlines()
            pairs += 1
    assert pairs > 300


@pytest.mark.parametrize(
    ("compat", "expected"),
    [
        ("off", set()),
        (
            "gateway",
            {
                "vllm:num_requests_running",
                "vllm:num_requests_waiting",
                "vllm:kv_cache_usage_perc",
                "vllm:cache_config_info",
            },
        ),
        ("vllm", None),
    ],
)
def test_second_names_can_be_fewer(compat: Any, expected: set[str] | None) -> None:
    found = {n for n in shown_names(Metrics("m", compat).render().decode()) if n[:5] == "vllm:"}
    if expected is None:
        expected = {
            metric.shown_name.replace("heddle:", "vllm:")
            for metric in metric_table.METRICS
            if metric.alias != "none"
        }
        assert len(expected) > 25
    assert found == expected


class Held(FakeExecutor):
    """Its steps end when they may."""

    may_end = threading.Event()
    has_begun = threading.Event()

    def collect(self, replica: int) -> Any:
        self.has_begun.set()
        assert self.may_end.wait(60)
        return super().collect(replica)


def test_a_scrape_waits_for_no_step(tmp_path: Path) -> None:
    async def run() -> str:
        async with offered(tmp_path, Metrics("toy"), executor=Held) as server:
            request = asyncio.ensure_future(server.complete(prompt=[2, 3], max_tokens=1))
            await asyncio.to_thread(Held.has_begun.wait, 60)
            during = await server.scrape()
            Held.may_end.set()
            assert (await request).status_code == 200
            return during

    assert sample(asyncio.run(run()), "heddle:num_requests_running") == 1


def test_labels_take_no_word_of_a_request() -> None:
    metrics = Metrics("toy")
    metrics.observe_http("BREW\n", "/v1/models", 0, 0.1)
    metrics.observe_http("GET", "/v1/models", 999, 0.1)
    metrics.count_ignored('evil"} 1\n')
    metrics.count_ignored("verbosity")
    metrics.count_refusal("not a code")
    metrics.count_refusal("engine_overloaded")
    text = metrics.render().decode()
    assert sample(text, "http_requests_total", method="other", status="none") == 1
    assert sample(text, "http_requests_total", method="GET", status="none") == 1
    assert sample(text, "heddle:ignored_fields_total", field="other") == 1
    assert sample(text, "heddle:ignored_fields_total", field="verbosity") == 1
    assert "not a code" not in text
    assert sample(text, "heddle:admission_rejections_total", reason="engine_overloaded") == 1


def test_the_plan_is_shown_by_rank_and_part() -> None:
    metrics = Metrics("toy")
    metrics.tell_plan({0: {"weights": 5}, 1: {"weights": 7}})
    text = metrics.render().decode()
    assert sample(text, "heddle:plan_predicted_bytes", rank="1", part="weights") == 7


def test_ranks_are_down_when_the_engine_has_failed(tmp_path: Path) -> None:
    async def run() -> str:
        async with offered(tmp_path, Metrics("toy")) as server:
            server.metrics.note_failure()
            return await server.scrape()

    assert sample(asyncio.run(run()), "heddle:rank_up", rank="0") == 0


def test_the_lag_of_a_loop_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heddle.server.metrics.LAG_INTERVAL_SECONDS", 0.001)
    metrics = Metrics("toy")

    async def run() -> None:
        watch = asyncio.ensure_future(metrics.watch_loop())
        await asyncio.sleep(0.005)
        while not metrics.of("event_loop_lag_seconds")._sum.get():
            await asyncio.sleep(0.001)
        watch.cancel()
        await asyncio.wait({watch})

    asyncio.run(run())
    assert sample(metrics.render().decode(), "heddle:event_loop_lag_seconds_sum") > 0


def test_numbers_are_there_before_an_engine_is() -> None:
    metrics = Metrics("toy")
    assert metrics.queues().num_running == 0
    assert metrics.totals.num_steps == 0
    assert shown_names(metrics.render().decode()) >= {m.shown_name for m in metric_table.METRICS}
