"""The table of metrics: names that dashboards know, closed labels, and its page."""

from __future__ import annotations

import re

from heddle.server.errors import KINDS
from heddle.server.metric_table import BY_NAME, METRICS, REFUSALS, render_table


def test_names_are_unique_and_well_formed() -> None:
    assert len(BY_NAME) == len(METRICS) > 40
    for metric in METRICS:
        assert re.fullmatch(r"[a-z0-9_]+", metric.name)
        assert metric.text
        assert not metric.text.endswith(".")
        if metric.kind == "counter":
            assert not metric.name.endswith("_total")  # it is added


def test_histograms_have_rising_buckets_and_others_none() -> None:
    for metric in METRICS:
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert list(metric.buckets) == sorted(set(metric.buckets))


def test_times_reach_as_far_as_long_prompts_take() -> None:
    assert BY_NAME["time_to_first_token_seconds"].buckets[0] == 0.001
    assert BY_NAME["time_to_first_token_seconds"].buckets[-1] == 2560
    assert BY_NAME["inter_token_latency_seconds"].buckets[:2] == (0.01, 0.025)
    assert BY_NAME["inter_token_latency_seconds"].buckets[-1] == 80
    assert BY_NAME["e2e_request_latency_seconds"].buckets[0] == 0.3
    assert BY_NAME["e2e_request_latency_seconds"].buckets[-1] == 7680


def test_the_gateway_finds_what_it_reads() -> None:
    assert [metric.alias_name for metric in METRICS if metric.alias == "gateway"] == [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:cache_config_info",
    ]


def test_common_names_have_no_prefix() -> None:
    common = [metric.shown_name for metric in METRICS if metric.is_common]
    assert common == ["http_requests_total", "http_request_duration_seconds"]


def test_the_rendered_table_has_a_row_for_each() -> None:
    rows = render_table().splitlines()[2:]
    assert len(rows) == len(METRICS)
    cells = [cell.strip() for cell in rows[0].strip("|").split("|")]
    assert cells == [
        "`heddle:num_requests_running`",
        "gauge",
        "-",
        "yes, gateway",
        "sequences that hold KV blocks",
    ]


def test_refusals_are_codes_of_the_server() -> None:
    assert set(REFUSALS) <= set(KINDS)
