"""Every metric that `/metrics` has: its name, type, labels, second names and meaning, once.

`docs/metrics.md` is made from this table, and tests hold both, the dashboard and a live server
against it. Label sets are closed: no label takes a word of a request.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Literal

from heddle.scheduler.request import FinishReason, WaitReason

Kind = Literal["gauge", "counter", "histogram"]
Alias = Literal["gateway", "vllm", "none"]
"""Who knows the metric under `vllm:` too: the endpoint picker of the Gateway API inference
extension as well as dashboards made for vLLM, such dashboards alone, or nobody."""

FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_SECONDS = (0.001, 0.0025, 0.005, *TOKEN_SECONDS)
COLLECTIVE_SECONDS = tuple(float(f"{d}e{power}") for power in range(-5, 2) for d in (1, 3))
RECOVERY_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
LAG_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
HTTP_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKENS = tuple(float(step * 10**power) for power in range(7) for step in (1, 2, 5))
STEP_ROWS = (1.0, *(float(2**power) for power in range(3, 15)))
SMALL_COUNTS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0)

FINISH_REASONS = typing.get_args(FinishReason)
WAIT_REASONS = typing.get_args(WaitReason)
STEP_KINDS = ("prefill", "decode", "mixed")
LAUNCHES = ("recording", "eager")
PROMPT_SOURCES = ("local_compute", "local_cache_hit")
ABORT_PLACES = ("waiting", "prefill", "decode")
BLOCK_STATES = ("used", "cached", "free")
MEMORY_PARTS = ("weights", "kv_pool", "states", "exchange", "activations")
REFUSALS = (
    "engine_overloaded",
    "engine_unavailable",
    "context_length_exceeded",
    "kv_capacity_exceeded",
    "invalid_grammar",
)
"""Codes of errors that keep a request out; wrong fields and wrong paths are no matter of load."""
METHODS = ("GET", "POST", "OPTIONS", "other")
STATUS_CLASSES = ("2xx", "3xx", "4xx", "5xx", "none")
FOREIGN_FIELDS = (
    "audio",
    "detokenize",
    "kv_transfer_params",
    "length_penalty",
    "mm_processor_kwargs",
    "prediction",
    "use_beam_search",
    "verbosity",
    "vllm_xargs",
    "web_search_options",
    "other",
)
"""Fields of other servers that clients may send; what is not among them is `other`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A row of the table."""

    name: str
    """Without prefix, and without `_total`."""
    kind: Kind
    text: str
    """What it says, with its unit."""
    labels: tuple[str, ...] = ()
    """Beside `model_name` and `engine`, which all but those of HTTP have."""
    alias: Alias = "none"
    buckets: tuple[float, ...] = ()
    is_common: bool = False
    """Has no prefix, no model and no engine: the name that every HTTP service uses."""

    @property
    def full_name(self) -> str:
        """With prefix."""
        return self.name if self.is_common else f"heddle:{self.name}"

    @property
    def alias_name(self) -> str:
        """Under which vLLM knows it."""
        return f"vllm:{self.name}"

    @property
    def shown_name(self) -> str:
        """As a scrape shows it: counters end in `_total`."""
        return f"{self.full_name}_total" if self.kind == "counter" else self.full_name


def _gauge(name: str, text: str, *labels: str, alias: Alias = "none") -> Metric:
    return Metric(name=name, kind="gauge", text=text, labels=labels, alias=alias)


def _counter(name: str, text: str, *labels: str, alias: Alias = "none") -> Metric:
    return Metric(name=name, kind="counter", text=text, labels=labels, alias=alias)


def _histogram(
    name: str, text: str, buckets: tuple[float, ...], *labels: str, alias: Alias = "vllm"
) -> Metric:
    return Metric(
        name=name, kind="histogram", text=text, buckets=buckets, labels=labels, alias=alias
    )


METRICS: tuple[Metric, ...] = (
    _gauge("num_requests_running", "sequences that hold KV blocks", alias="gateway"),
    _gauge("num_requests_waiting", "sequences that wait to start", alias="gateway"),
    _gauge(
        "kv_cache_usage_perc",
        "share of the KV pool that sequences hold, 0 to 1; the same on every rank",
        alias="gateway",
    ),
    _gauge(
        "cache_config_info",
        "1; labels describe the pool: their product block_size * num_gpu_blocks is its tokens",
        "block_size",
        "num_gpu_blocks",
        "cache_dtype",
        "enable_prefix_caching",
        alias="gateway",
    ),
    _gauge(
        "num_requests_waiting_by_reason",
        "waiting sequences by what they lack",
        "reason",
        alias="vllm",
    ),
    _counter("num_preemptions", "sequences that gave up their blocks to others", alias="vllm"),
    _counter(
        "admission_rejections",
        "requests refused, by the code of the error",
        "reason",
        alias="vllm",
    ),
    _counter("prefix_cache_queries", "prompt tokens looked up in the prefix cache", alias="vllm"),
    _counter("prefix_cache_hits", "prompt tokens found there", alias="vllm"),
    _counter(
        "prompt_tokens",
        "prompt tokens done: computed or found, each once, as steps end",
        alias="vllm",
    ),
    _counter("generation_tokens", "tokens of answers", alias="vllm"),
    _counter("prompt_tokens_cached", "prompt tokens taken from the prefix cache", alias="vllm"),
    _counter("prompt_tokens_by_source", "prompt tokens by origin", "source", alias="vllm"),
    _counter("request_success", "answers that ended, by reason", "finished_reason", alias="vllm"),
    _counter("corrupted_requests", "requests that ended by NaN or inf in logits", alias="vllm"),
    _counter("spec_decode_num_draft_tokens", "guessed tokens that were checked", alias="vllm"),
    _counter("spec_decode_num_accepted_tokens", "guessed tokens that were right", alias="vllm"),
    _histogram(
        "time_to_first_token_seconds", "from arrival to the first token", FIRST_TOKEN_SECONDS
    ),
    _histogram(
        "inter_token_latency_seconds",
        "between two tokens of a sequence; tokens of one step share its time",
        TOKEN_SECONDS,
    ),
    _histogram(
        "request_time_per_output_token_seconds",
        "from the first token to the end, per further token of the longest answer",
        TOKEN_SECONDS,
    ),
    _histogram("e2e_request_latency_seconds", "from arrival to the end", REQUEST_SECONDS),
    _histogram("request_queue_time_seconds", "from arrival to the first step", REQUEST_SECONDS),
    _histogram("request_inference_time_seconds", "from the first step to the end", REQUEST_SECONDS),
    _histogram(
        "request_prefill_time_seconds", "from the first step to the first token", REQUEST_SECONDS
    ),
    _histogram("request_decode_time_seconds", "from the first token to the end", REQUEST_SECONDS),
    _histogram("iteration_tokens_total", "rows of a step, over all its ranks", STEP_ROWS),
    _histogram("request_prompt_tokens", "tokens of a prompt", TOKENS),
    _histogram("request_generation_tokens", "tokens of all answers of a request", TOKENS),
    _histogram("request_params_max_tokens", "max_tokens that was asked for, if any", TOKENS),
    _histogram("request_params_n", "answers that were asked for", SMALL_COUNTS[1:]),
    _histogram("request_num_preemptions", "times that a request was preempted", SMALL_COUNTS),
    _histogram(
        "request_prefill_kv_computed_tokens", "prompt tokens less those from the cache", TOKENS
    ),
    _histogram(
        "request_max_num_generation_tokens", "tokens of the longest answer of a request", TOKENS
    ),
    Metric(
        name="http_requests",
        kind="counter",
        text="answers by route and class of status; none: the connection ended before a status",
        labels=("method", "handler", "status"),
        is_common=True,
    ),
    Metric(
        name="http_request_duration_seconds",
        kind="histogram",
        text="from the head of a request to the end of its answer",
        labels=("method", "handler"),
        buckets=HTTP_SECONDS,
        is_common=True,
    ),
    _gauge("rank_up", "1 while a rank works", "rank"),
    _gauge("engine_epoch", "life of the ranks: how often they were started anew"),
    _counter("recoveries", "times that new ranks took over from failed ones; told of engine 0"),
    _histogram(
        "recovery_seconds",
        "from seeing that ranks failed to new ones that go on; told of engine 0",
        RECOVERY_SECONDS,
        alias="none",
    ),
    _counter(
        "step_mismatch",
        "steps that stopped because ranks and driver disagreed, by what differed; told of engine 0",
        "kind",
    ),
    _counter(
        "verify_rows",
        "live rows that were to be held against one rank (verify_every), by result; told of "
        "engine 0",
        "result",
    ),
    _counter("verify_mismatch", "those that one rank did not confirm; told of engine 0"),
    _gauge(
        "verify_running",
        "1 while live rows are held against one rank, 0 once that has stopped for good, which the "
        "log explains; told of engine 0, and only with verify_every",
    ),
    _counter("requests_replayed", "open requests that went on after that; told of engine 0"),
    _counter(
        "requests_condemned",
        "requests that ended because ranks failed each time that they were computed; told of "
        "engine 0",
    ),
    _gauge("rank_step", "number of the last step that a rank has ended", "rank"),
    _counter(
        "rank_busy_seconds",
        "seconds that a rank spent in steps, waits for its peers included; in the rest it was idle "
        "or waited for the driver",
        "rank",
    ),
    _counter(
        "rank_collective_seconds",
        "seconds of those that a rank spent in collectives, waits for its peers included; who "
        "spends the least is the one that the others wait for",
        "rank",
    ),
    _counter("requests_aborted", "requests whose client left, by how far they were", "where"),
    _gauge("kv_blocks", "blocks of a rank's pool by state", "rank", "state"),
    _gauge(
        "kv_imbalance_ratio",
        "KV tokens of open sequences: largest rank over the mean; 1 is even",
    ),
    _gauge(
        "pcp_load_ratio",
        "keys met by the rows of the last step with prompt rows: largest PCP rank over the mean",
    ),
    _counter("pcp_padding_tokens", "rows that were computed as padding, over all PCP ranks"),
    _histogram(
        "step_seconds", "from sending a step to its last reply", STEP_SECONDS, "kind", alias="none"
    ),
    _counter(
        "steps",
        "steps by how their layers ran: launched from a recording on every rank, or computed anew",
        "how",
    ),
    _gauge("recordings", "recordings of steps that a rank keeps", "rank"),
    _gauge("recording_bytes", "memory that they compute in", "rank"),
    _histogram(
        "collective_seconds",
        "seconds of a step that its ranks spent in calls of a kind, waits for peers included; the "
        "mean of the ranks",
        COLLECTIVE_SECONDS,
        "op",
        "group",
        alias="none",
    ),
    _counter("collective_calls", "such calls, over all ranks", "op", "group"),
    _counter(
        "collective_bytes",
        "bytes that ranks received in them, over all ranks; as `heddle plan` predicts them",
        "op",
        "group",
    ),
    _gauge("plan_predicted_bytes", "memory of a rank as planned, by part", "rank", "part"),
    _gauge("measured_bytes", "resident memory of a rank's process", "rank", "part"),
    _histogram(
        "event_loop_lag_seconds", "how late the server's loop wakes up", LAG_SECONDS, alias="none"
    ),
    _counter("ignored_fields", "unknown fields of requests", "field"),
)
BY_NAME = {metric.name: metric for metric in METRICS}


def render_table() -> str:
    """The table as Markdown, for `docs/metrics.md`."""
    lines = [
        "| name | type | labels | also `vllm:` | what it says |",
        "| --- | --- | --- | --- | --- |",
    ]
    words = {"gateway": "yes, gateway", "vllm": "yes", "none": "no"}
    for metric in METRICS:
        labels = ", ".join(metric.labels) or "-"
        lines.append(
            f"| `{metric.shown_name}` | {metric.kind} | {labels} | {words[metric.alias]} | "
            f"{metric.text} |"
        )
    return "\n".join(lines) + "\n"
