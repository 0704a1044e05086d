"""Flags of `heddle bench serve`, named as those of vLLM's benchmark, and their checks."""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import Any

from heddle.cli.parser import CommandParser
from heddle.cli.values import integer, number, size
from heddle.errors import ConfigError, quoted

ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
_POSITIVE = (
    "num_prompts",
    "random_input_len",
    "random_output_len",
    "max_concurrency",
    "vocab_size",
)
_ABOVE_ZERO = ("request_rate", "burstiness")


def add_flags(parser: CommandParser) -> None:
    """Server, load, prompts, and what to report."""

    def declare(section: str, name: str, kind: Any, default: object, text: str) -> None:
        parser.declare(section, name, type=kind, default=default, metavar="VALUE", help=text)

    declare("server", "--base-url", str, None, "http://... of the server; wins over host and port")
    declare("server", "--host", str, "127.0.0.1", "of the server")
    declare("server", "--port", integer, 8000, "of the server")
    parser.declare(
        "server", "--endpoint", choices=ENDPOINTS, default=ENDPOINTS[0], help="path that is asked"
    )
    declare("server", "--model", str, None, "name in requests; absent: the first of /v1/models")
    declare("server", "--api-key", str, None, "key to show")
    text = "give up when a first request has no answer by then; 0 sends none"
    declare("server", "--ready-check-timeout-sec", number, 600.0, text)
    declare("load", "--num-prompts", size, 1000, "requests to send")
    text = "mean requests per second; inf: all at once"
    declare("load", "--request-rate", number, math.inf, text)
    text = "shape of the gaps: 1 is Poisson, less comes in bursts, more comes evenly"
    declare("load", "--burstiness", number, 1.0, text)
    declare("load", "--max-concurrency", integer, None, "most open requests; absent: no limit")
    declare("load", "--seed", integer, 0, "of prompts and gaps")
    declare("load", "--temperature", number, 0.0, "of every request")
    parser.declare(
        "load", "--ignore-eos", action="store_true", help="answers have their full length"
    )
    parser.declare(
        "prompts", "--dataset-name", choices=("random",), default="random", help="kind of prompts"
    )
    declare("prompts", "--random-input-len", size, 1024, "tokens (chat: words) behind the prefix")
    declare("prompts", "--random-output-len", size, 128, "most tokens of an answer")
    declare("prompts", "--random-prefix-len", size, 0, "tokens (chat: words) that all begin with")
    text = "token ids are below this; absent: those that /tokenize gives"
    declare("prompts", "--vocab-size", size, None, text)
    text = "latencies to print: any of ttft,tpot,itl,e2el"
    declare("report", "--percentile-metrics", str, "ttft,tpot,itl,e2el", text)
    declare("report", "--metric-percentiles", str, "99", "of these, separated by commas")
    parser.declare(
        "report",
        "--goodput",
        nargs="+",
        metavar="METRIC:MS",
        help="bounds of a good request, as ttft:500 tpot:50 e2el:10000",
    )
    parser.declare(
        "report", "--save-result", action="store_true", help="keep the JSON document in a file"
    )
    declare("report", "--result-dir", str, ".", "folder of that file")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What is told of a load."""

    metrics: list[str]
    percentiles: list[float]
    goodput: dict[str, float] | None


def read_report(arguments: argparse.Namespace) -> Report:
    """The lists among the flags.

    Raises:
        ConfigError: a metric that there is not, or a number outside its range.
    """
    from heddle.bench.serving_report import GOODPUT_METRICS, METRICS

    metrics = _names(arguments.percentile_metrics)
    for name in metrics:
        if name not in METRICS:
            raise ConfigError(
                f"--percentile-metrics {quoted(name)} is not one of {', '.join(METRICS)}"
            )
    percentiles = [
        _number("--metric-percentiles", word) for word in _names(arguments.metric_percentiles)
    ]
    for value in percentiles:
        if not 0 <= value <= 100:
            raise ConfigError(f"--metric-percentiles {value:g} is not legal; it is in 0..100")
    if arguments.goodput is None:
        return Report(metrics=metrics, percentiles=percentiles, goodput=None)
    goodput = {}
    for word in arguments.goodput:
        name, _, bound = word.partition(":")
        if name not in GOODPUT_METRICS:
            raise ConfigError(
                f"--goodput {quoted(word)} is not METRIC:MS; metrics: {', '.join(GOODPUT_METRICS)}"
            )
        goodput[name] = _number("--goodput", bound)
    return Report(metrics=metrics, percentiles=percentiles, goodput=goodput)


def check_load(arguments: argparse.Namespace) -> None:
    """Refuse sizes that make no load.

    Raises:
        ConfigError: one is not legal.
    """
    for name in _POSITIVE:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"{_flag(name)} {value} is not legal; it is at least 1 (nearest: 1)")
    for name in _ABOVE_ZERO:
        value = getattr(arguments, name)
        if not value > 0:
            raise ConfigError(f"{_flag(name)} {value:g} is not legal; it is above 0")
    if arguments.vocab_size is not None and arguments.endpoint != ENDPOINTS[0]:
        raise ConfigError(f"--vocab-size has no effect on {arguments.endpoint}; its text is words")
    if arguments.burstiness == math.inf:
        raise ConfigError("--burstiness inf is not legal; it is finite")


def _names(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _number(flag: str, word: str) -> float:
    try:
        value = number(word)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{flag}: {error}") from None
    if not math.isfinite(value):
        raise ConfigError(f"{flag}: {word} is not finite")
    return value


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
