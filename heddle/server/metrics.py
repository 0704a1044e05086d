"""What `/metrics` says: numbers of the engine and of HTTP, in Prometheus' text format 0.0.4.

    engine thread  --step, request-->  EngineWatch --+
    event loop     --answer, lag---------------------+--> registry --render--> text
    scrape         --refresh: lengths of queues------+

Only the text format is offered: the OpenMetrics one turns the colon of a name into an underscore,
and dashboards would find nothing. Values carry locks of their own, so a scrape waits for no step;
what it reads of the engine itself are lengths and other single numbers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.core import Sample
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from heddle.engine.executors.base import Executor
from heddle.engine.llm import LLM
from heddle.server import metric_table as table
from heddle.server.canary import Canaries
from heddle.server.config import MetricsCompat
from heddle.server.engine_state import QueueState, Totals
from heddle.server.engine_watch import EngineWatch
from heddle.server.verify_numbers import VerifyNumbers

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LAG_INTERVAL_SECONDS = 0.25
"""Between two looks at the lag of the loop."""
_KINDS = {"gauge": Gauge, "counter": Counter, "histogram": Histogram}


class Metrics:
    """All metrics of one server; its own registry, so several servers fit into one process."""

    def __init__(
        self,
        model_name: str,
        compat: MetricsCompat = "vllm",
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with zeros.

        Args:
            model_name: label of every metric of the engine.
            compat: which second names are offered.
            clock: monotonic seconds, the same as the driver's.
        """
        self._model_name, self._compat = model_name, compat
        self._registry = CollectorRegistry()
        self._families = {metric.name: self._create(metric) for metric in table.METRICS}
        self._children: dict[tuple[object, ...], Any] = {}
        self._engine: LLM | None = None
        self.watch = EngineWatch(self, clock=clock)
        self._verified = VerifyNumbers(self)
        for reason in table.REFUSALS:
            self.of("admission_rejections", reason=reason)
        for field in table.FOREIGN_FIELDS:
            self.of("ignored_fields", field=field)

    # Values.

    def of(self, name: str, replica: int = 0, **labels: object) -> Any:
        """The counter, gauge or histogram of a name and its labels; made when first asked for."""
        key = (name, replica, *labels.items())
        found = self._children.get(key)
        if found is None:  # looking it up by labels takes ten times as long
            words = {label: str(value) for label, value in labels.items()}
            if not table.BY_NAME[name].is_common:
                words |= {"model_name": self._model_name, "engine": str(replica)}
            found = self._children[key] = self._families[name].labels(**words)
        return found

    # Whom it listens to.

    def watch_executor(self, executor: Executor) -> Executor:
        """Put a watch between a driver and its ranks, to time steps."""
        return self.watch.around(executor)

    def attach(self, llm: LLM) -> None:
        """Listen to an engine from now on; called in the thread that owns its driver."""
        self._engine = llm
        self.watch.listen(llm.driver)
        _describe_pools(self, llm)

    def on_step(self, llm: LLM) -> None:
        """After each step, in the engine's thread: copy what only that thread may look through."""
        if self._engine is llm:
            self.watch.look(llm.driver)

    def observe_http(self, method: str, route: str, status: int, seconds: float) -> None:
        """An answer was given; `route` is the pattern of a path, never the path itself."""
        method = method if method in table.METHODS else "other"
        found = f"{status // 100}xx"
        status_class = found if found in table.STATUS_CLASSES else "none"
        self.of("http_requests", method=method, handler=route, status=status_class).inc()
        self.of("http_request_duration_seconds", method=method, handler=route).observe(seconds)

    def count_refusal(self, code: str) -> None:
        """A request was refused with this code; those that are not about admission do not count."""
        if code in table.REFUSALS:
            self.of("admission_rejections", reason=code).inc()

    def count_ignored(self, field: str) -> None:
        """A request had a field that nobody knows."""
        word = field if field in table.FOREIGN_FIELDS else "other"
        self.of("ignored_fields", field=word).inc()

    def tell_plan(self, predicted: dict[int, dict[str, int]]) -> None:
        """What each rank was planned to hold: part -> bytes, by rank."""
        for rank, parts in predicted.items():
            for part, num_bytes in parts.items():
                self.of("plan_predicted_bytes", rank=rank, part=part).set(num_bytes)

    def note_failure(self) -> None:
        """The engine has failed, and with it every rank."""
        if self._engine is not None:
            self.watch.note_ranks(up=False)

    async def watch_loop(self) -> None:
        """Measure the lag of the running loop until cancelled."""
        lag = self.of("event_loop_lag_seconds")
        while True:
            began = time.monotonic()
            await asyncio.sleep(LAG_INTERVAL_SECONDS)
            lag.observe(max(0.0, time.monotonic() - began - LAG_INTERVAL_SECONDS))

    # What is shown.

    @property
    def canaries(self) -> Canaries:
        """Of the engine that is listened to."""
        assert self.watch.canaries is not None, "attach comes first"
        return self.watch.canaries

    @property
    def totals(self) -> Totals:
        """What the engine has done so far, for log lines."""
        return self.watch.totals

    def queues(self) -> QueueState:
        """Who runs and waits now, for log lines."""
        if self._engine is None:
            return QueueState(0, 0, 0.0)
        return self.watch.queue_state(self._engine.driver)

    def render(self) -> bytes:
        """All metrics now."""
        if self._engine is not None:
            self._refresh(self._engine)
        return generate_latest(self)

    def collect(self) -> Iterator[Family]:
        """The families of the registry, and the second names of some."""
        for family in self._registry.collect():
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
            yield family
            metric = table.BY_NAME[family.name.removeprefix("heddle:")]
            if _has_alias(metric, self._compat):
                yield _renamed(family, metric)

    def route(self) -> Route:
        """`GET /metrics`."""

        async def show(request: Request) -> Response:
            del request
            text = await asyncio.to_thread(self.render)  # takes tens of milliseconds
            return Response(text, headers={"content-type": CONTENT_TYPE})

        return Route("/metrics", show, methods=["GET"])

    def _create(self, metric: table.Metric) -> Any:
        own = () if metric.is_common else ("model_name", "engine")
        options: dict[str, Any] = {"buckets": metric.buckets} if metric.buckets else {}
        return _KINDS[metric.kind](
            metric.full_name,
            metric.text,
            (*own, *metric.labels),
            registry=self._registry,
            **options,
        )

    def _refresh(self, llm: LLM) -> None:
        """Sums of what ranks have told, lengths that change without a step, and memory."""
        self.watch.ranks.show()
        if llm.shadow is not None:
            self._verified.show(llm.shadow)
        for replica in llm.driver.replicas:
            cache = replica.cache
            usable, available = cache.num_usable_blocks, cache.num_available_blocks
            self.of("num_requests_running", replica.index).set(self.watch.num_running(replica))
            self.of("num_requests_waiting", replica.index).set(self.watch.num_waiting(replica))
            self.of("kv_cache_usage_perc", replica.index).set(
                1 - available / usable if usable else 0
            )
            cached = min(cache.num_cached_blocks, available)
            states = {"used": usable - available, "cached": cached, "free": available - cached}
            for rank in self.watch.ranks_of(replica.index):
                for state, count in states.items():
                    self.of("kv_blocks", replica.index, rank=rank, state=state).set(count)
        for rank, num_bytes in enumerate(self.watch.resident_bytes()):
            self.of("measured_bytes", rank=rank, part="resident").set(num_bytes)


def _describe_pools(metrics: Metrics, llm: LLM) -> None:
    plan = llm.plan
    for replica in llm.driver.replicas:
        metrics.of(
            "cache_config_info",
            replica.index,
            block_size=replica.cache.virtual_block_size,
            num_gpu_blocks=replica.cache.num_usable_blocks,
            cache_dtype=plan.kv_cache_dtype,
            enable_prefix_caching=plan.cache.enable_prefix_caching,
        ).set(1)


def _has_alias(metric: table.Metric, compat: MetricsCompat) -> bool:
    if compat == "off":
        return False
    return metric.alias == "gateway" or (metric.alias == "vllm" and compat == "vllm")


def _renamed(family: Family, metric: table.Metric) -> Family:
    """The same values under vLLM's name."""
    copy = Family(metric.alias_name, family.documentation, family.type)
    copy.samples = [
        Sample(sample.name.replace("heddle:", "vllm:", 1), *sample[1:]) for sample in family.samples
    ]
    return copy
