from __future__ import annotations

import math

import pytest

from heddle.cli.bench_serve import create_parser
from heddle.cli.bench_serve_flags import check_load, read_report
from heddle.cli.output import Output
from heddle.errors import ConfigError


def parsed(*words):
    return create_parser({}, Output()).parse(words)


def test_defaults_ask_for_everything_at_once_and_report_all_latencies():
    arguments = parsed()
    check_load(arguments)
    assert arguments.request_rate == math.inf
    assert (arguments.num_prompts, arguments.max_concurrency) == (1000, None)
    assert arguments.endpoint == "/v1/completions"
    report = read_report(arguments)
    assert report.metrics == ["ttft", "tpot", "itl", "e2el"]
    assert (report.percentiles, report.goodput) == ([99.0], None)


def test_lists_are_read():
    arguments = parsed(
        *("--percentile-metrics", "ttft, e2el", "--metric-percentiles", "50,99.9"),
        *("--goodput", "ttft:500", "tpot:50.5"),
    )
    report = read_report(arguments)
    assert report.metrics == ["ttft", "e2el"]
    assert report.percentiles == [50.0, 99.9]
    assert report.goodput == {"ttft": 500.0, "tpot": 50.5}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--percentile-metrics", "tttf"), "'tttf' is not one of ttft, tpot, itl, e2el"),
        (("--metric-percentiles", "101"), r"101 is not legal; it is in 0\.\.100"),
        (("--metric-percentiles", "nan"), "nan is not finite"),
        (("--goodput", "itl:5"), "'itl:5' is not METRIC:MS; metrics: ttft, tpot, e2el"),
        (("--goodput", "ttft"), "--goodput: '' is not a number"),
    ],
    ids=str,
)
def test_a_list_that_means_nothing_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        read_report(parsed(*words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--num-prompts", "0"), "--num-prompts 0 .*nearest: 1"),
        (("--random-input-len", "0"), "--random-input-len 0"),
        (("--max-concurrency", "-1"), "--max-concurrency -1"),
        (("--vocab-size", "0"), "--vocab-size 0"),
        (("--request-rate", "0"), "--request-rate 0 is not legal; it is above 0"),
        (("--request-rate", "nan"), "--request-rate nan"),
        (
            ("--endpoint", "/v1/chat/completions", "--vocab-size", "9"),
            "--vocab-size has no effect on /v1/chat/completions",
        ),
        (("--burstiness", "inf"), "--burstiness inf is not legal; it is finite"),
    ],
    ids=str,
)
def test_a_load_of_no_size_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        check_load(parsed(*words))
