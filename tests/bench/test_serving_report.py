from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.bench.serving_report import (
    METRICS,
    RequestRecord,
    is_good,
    lines,
    peak_concurrency,
    peak_tokens_per_second,
    percentile_name,
    summarize,
)

SECONDS = st.integers(0, 40).map(lambda quarter: quarter / 4)


@st.composite
def records_of_a_load(draw, min_size=0):
    made = []
    for index in range(draw(st.integers(min_size, 6))):
        sent = draw(SECONDS)
        gaps = draw(st.lists(SECONDS, min_size=1, max_size=5))
        chunks = [sent + sum(gaps[: place + 1]) for place in range(len(gaps))]
        failed = draw(st.booleans())
        made.append(
            RequestRecord(
                index=index,
                prompt_tokens=draw(st.integers(1, 9)),
                output_tokens=draw(st.integers(1, 9)),
                sent=sent,
                ended=chunks[-1],
                chunks=tuple(chunks),
                error="no" if failed else None,
            )
        )
    return made


ONE = RequestRecord(
    index=0, prompt_tokens=3, output_tokens=5, sent=1.0, ended=3.0, chunks=(1.5, 2.0, 3.0)
)


def test_figures_of_two_requests_by_hand():
    two = RequestRecord(
        index=1, prompt_tokens=4, output_tokens=1, sent=2.0, ended=2.25, chunks=(2.25,)
    )
    failed = dataclasses.replace(two, index=2, error="refused")
    found = summarize([ONE, two, failed], duration=4.0, percentiles=(50.0,), goodput={"ttft": 400})
    assert found["completed"] == 2
    assert found["failed"] == 1
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (7, 6)
    assert found["request_throughput"] == 0.5
    assert found["request_goodput"] == 0.25
    assert found["output_throughput"] == 1.5
    assert found["total_token_throughput"] == 13 / 4
    assert found["max_concurrent_requests"] == 3
    assert (found["mean_ttft_ms"], found["median_ttft_ms"]) == (375.0, 375.0)
    assert found["mean_tpot_ms"] == found["p50_tpot_ms"] == 1500 / 4  # of the first alone
    assert (found["mean_itl_ms"], found["std_itl_ms"]) == (750.0, 250.0)
    assert found["mean_e2el_ms"] == 1125.0
    # The chunks of the first hold 5/3 tokens each; one of them shares its second with the other.
    assert found["max_output_tokens_per_s"] == pytest.approx(5 / 3 + 1)


@given(records_of_a_load(), st.integers(1, 400))
def test_every_request_is_counted_once_and_failures_give_no_figure(records, quarters):
    duration = quarters / 4
    found = summarize(records, duration=duration, goodput={})
    done = [record for record in records if record.error is None]
    assert found["completed"] + found["failed"] == len(records)
    assert found["completed"] == len(done)
    assert found["request_goodput"] == found["request_throughput"] == len(done) / duration
    alone = summarize(done, duration=duration, goodput={})
    for name in set(found) - {"failed", "max_concurrent_requests"}:
        assert found[name] == alone[name]


@given(records_of_a_load())
def test_latencies_of_a_request_add_up(records):
    for record in records:
        rest = sum(record.itls)
        assert record.ttft + rest == pytest.approx(record.e2el, abs=1e-9)
        if record.tpot is not None:
            assert record.tpot * (record.output_tokens - 1) == pytest.approx(rest, abs=1e-9)
        assert (record.tpot is None) == (record.output_tokens < 2)


@given(records_of_a_load(min_size=1), st.floats(0, 1e5))
def test_goodput_falls_with_every_bound(records, bound):
    for record in records:
        assert is_good(record, {})
        assert is_good(record, {"ttft": bound}) == (record.ttft * 1e3 <= bound)
        both = is_good(record, {"ttft": bound, "e2el": bound})
        assert both == (is_good(record, {"ttft": bound}) and is_good(record, {"e2el": bound}))


@given(records_of_a_load())
def test_peaks_are_at_least_the_mean_and_at_most_the_whole(records):
    most = peak_concurrency(records)
    assert most <= len(records)
    moments = [record.sent for record in records]
    open_then = [sum(each.sent <= when < each.ended for each in records) for when in moments]
    # A request of no length is open at no moment, but it was open.
    assert (
        max(open_then, default=0)
        <= most
        <= max(open_then, default=0) + sum(each.sent == each.ended for each in records)
    )
    total = sum(record.output_tokens for record in records)
    peak = peak_tokens_per_second(records)
    seconds = {int(when) for record in records for when in record.chunks}
    assert peak <= total + 1e-9
    assert peak >= (total / len(seconds) if seconds else 0) - 1e-9


def test_requests_one_behind_the_other_are_not_open_together():
    later = dataclasses.replace(ONE, sent=3.0, ended=4.0)
    assert peak_concurrency([ONE, later]) == 1
    assert peak_concurrency([ONE, dataclasses.replace(later, sent=2.9)]) == 2


def test_nothing_measured_is_null_and_a_dash():
    failed = dataclasses.replace(ONE, chunks=(), error="refused")
    found = summarize([failed], duration=1.0)
    assert found["mean_ttft_ms"] is found["p99_tpot_ms"] is None
    assert (found["failed"], found["max_output_tokens_per_s"]) == (1, 0.0)
    told = lines(
        found, metrics=["ttft"], percentiles=[99], request_rate=float("inf"), max_concurrency=None
    )
    assert "P99 TTFT (ms):                           -         " in told
    assert failed.document()["ttft_s"] is None
    assert failed.document()["error"] == "refused"


def test_lines_have_the_names_and_the_order_of_the_other_benchmark():
    found = summarize([ONE], duration=2.0, percentiles=(50.0, 99.9), goodput={"ttft": 1})
    told = lines(
        found,
        metrics=list(METRICS),
        percentiles=[50.0, 99.9],
        request_rate=2.5,
        max_concurrency=8,
    )
    names = [line.partition(":")[0] for line in told if ":" in line]
    expected = """Successful requests|Failed requests|Maximum request concurrency
Request rate configured (RPS)|Benchmark duration (s)|Total input tokens|Total generated tokens
Request throughput (req/s)|Request goodput (req/s)|Output token throughput (tok/s)
Peak output token throughput (tok/s)|Peak concurrent requests|Total token throughput (tok/s)"""
    expected = expected.replace("\n", "|").split("|")
    for name in ("TTFT", "TPOT", "ITL", "E2EL"):
        expected += [f"{word} {name} (ms)" for word in ("Mean", "Median", "P50", "P99.9")]
    assert names == expected
    assert told[0] == "============ Serving Benchmark Result ============"
    assert told[1] == "Successful requests:                     1         "
    assert told[4] == "Request rate configured (RPS):           2.50      "
    assert "---------------Time to First Token----------------" in told
    assert told[-1] == "=" * 50


def test_lines_leave_out_what_was_not_asked_for():
    found = summarize([ONE], duration=2.0)
    told = lines(found, metrics=[], percentiles=[], request_rate=float("inf"), max_concurrency=None)
    assert len(told) == 2 + 13 - 3
    assert percentile_name(99.0) == "99"


def test_raw_times_are_those_of_the_request():
    assert ONE.document() == {
        "index": 0,
        "prompt_tokens": 3,
        "output_tokens": 5,
        "sent_s": 1.0,
        "ttft_s": 0.5,
        "itls_s": [0.5, 1.0],
        "e2el_s": 2.0,
        "error": None,
    }
