"""W5: how time grows with context and falls with ranks; with fitted laws and a picture.

    python benchmarks/scaling.py [--quick] [--rounds R] [--save]

    prefill of the longest prompt, 2 ranks x 1 thread over 1 rank x 1 thread    >= 1.8x  (PCP 2)
    decode behind it                                                            >= 1.7x  (DCP 2)
    both                                       within 10% of 1 rank x 2 threads

The laws that times are fitted to, S tokens of context:

    prefill seconds          = a S + b S^2        dense layers, attention
    decode seconds a token   = w + k S            weights once, stored rows once

w and k give the rates at which weights and rows are read; a log-log slope says what power it looks
like in the measured range. All engines run in rank processes, in turn, on the same prompts.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
from roofline import (
    ROW_BYTES,
    WEIGHT_BYTES,
    Roofline,
    Work,
    decode_work,
    machine_limits,
    prefill_work,
)
from support import RESULTS, Report, parser, say, stem

from heddle.bench.contest import HeddleEngine, bench_config, race, text_prompts
from heddle.bench.laws import fit_law, power
from heddle.engine.args import engine_config
from heddle.engine.llm import LLM

ONE, TWO_THREADS, TWO_RANKS = "1 rank x 1 thread", "1 rank x 2 threads", "2 ranks x 1 thread"
TENSOR, TENSOR_DCP = "2 ranks, TP", "2 ranks, TP DCP"
SETTINGS: dict[str, dict[str, Any]] = {
    ONE: {"num_threads": 1},
    TWO_THREADS: {"num_threads": 2},
    TWO_RANKS: {
        "num_threads": 1,
        "prefill_context_parallel_size": 2,
        "decode_context_parallel_size": 2,
    },
    TENSOR: {"num_threads": 1, "tensor_parallel_size": 2},
    TENSOR_DCP: {
        "num_threads": 1,
        "tensor_parallel_size": 2,
        "decode_context_parallel_size": 2,
    },
}
READS: dict[str, tuple[float, float]] = {TWO_RANKS: (2, 1), TENSOR: (1, 4 / 3), TENSOR_DCP: (1, 1)}
"""How often all ranks together read the weights, and the cached rows: every PCP rank needs all
weights; of three kv heads two lie on the fuller one of two TP ranks, which is the slower."""


def main() -> int:
    arguments = parser(__doc__).parse_args()
    lengths = (64, 128, 256) if arguments.quick else (1000, 2000, 4000, 8000)
    num_tokens = 4 if arguments.quick else 24
    report = Report("scaling", "Scaling over context and ranks")
    cases = measure(lengths, num_tokens, arguments.rounds or (1 if arguments.quick else 2))
    columns = ["engine", "context", "prefill s", "decode ms a token"]
    rows = [[n, s, *times(cases[s][n], s)] for n in SETTINGS for s in lengths]
    report.table("times", columns, [[n, s, a, 1e3 * b] for n, s, a, b in rows])
    laws = {name: fit(name, cases) for name in SETTINGS}
    columns = ["engine", "a: us a token", "b: ns a pair", "power", "w: GB/s", "k: GB/s", "power"]
    report.table("fitted laws", columns, [[name, *law.values()] for name, law in laws.items()])
    why = explain(report, cases[lengths[-1]], lengths[-1], is_quick=arguments.quick)
    judge(report, cases[lengths[-1]], lengths[-1], why)
    if arguments.save:
        RESULTS.mkdir(exist_ok=True)
        name = f"{stem(report.theme)}.png"
        draw(cases, laws, str(RESULTS / name))
        report.pictures.append(name)
    return report.finish(arguments, {"cases": cases, "laws": laws})


def measure(
    lengths: tuple[int, ...], num_tokens: int, rounds: int
) -> dict[int, dict[str, dict[str, Any]]]:
    """Rates by context and engine."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    with ExitStack() as stack:
        engines = []
        for name, settings in SETTINGS.items():
            say(f"loading {name}")
            config = engine_config("demo", executor="processes", **settings)
            llm = stack.enter_context(LLM.from_config(bench_config(config, num_streams=1)))
            engines.append(HeddleEngine(llm.driver, name))
            tokenizer, vocab_size = llm.get_tokenizer(), llm.plan.model.vocab_size
        for length in lengths:
            say(f"{length} tokens")
            prompts = text_prompts(tokenizer, vocab_size, length, 1)
            rows = race(engines, prompts, num_tokens, rounds)
            found[length] = {row["name"]: row for row in rows}
    return found


def times(row: dict[str, Any], length: int) -> tuple[float, float]:
    """Seconds of the prefill and of a decoded token; not a number where tokens differ."""
    if row["prefill_tok_s"] is None:
        return float("nan"), float("nan")
    return length / row["prefill_tok_s"], 1 / row["decode_tok_s"]


def fit(name: str, cases: dict[int, dict[str, dict[str, Any]]]) -> dict[str, float]:
    """The constants of both laws."""
    contexts = np.array(list(cases), dtype=float)
    prefill, decode = np.array([times(cases[s][name], s) for s in cases]).T
    a, b = fit_law(np.stack([contexts, contexts**2], 1), prefill).constants
    w, k = fit_law(np.stack([np.ones_like(contexts), contexts], 1), decode).constants
    return {
        "a_microseconds": 1e6 * a,
        "b_nanoseconds": 1e9 * b,
        "prefill_power": power(contexts, prefill),
        "weights_gb_per_second": WEIGHT_BYTES / w / 1e9 if w > 0 else 0.0,
        "rows_gb_per_second": ROW_BYTES / k / 1e9 if k > 0 else 0.0,
        "decode_power": power(contexts, decode),
    }


def explain(
    report: Report, rows: dict[str, dict[str, Any]], length: int, *, is_quick: bool
) -> dict[tuple[str, str], str]:
    """By engine and phase, how near the limits of two threads it came."""
    roofline = Roofline(machine_limits(2, is_quick=is_quick))
    words: dict[tuple[str, str], str] = {}
    for name in (TWO_THREADS, TWO_RANKS, TENSOR, TENSOR_DCP):
        if rows[name]["prefill_tok_s"] is None:
            continue
        prefill, decode = times(rows[name], length)
        weights, cached = READS.get(name, (1, 1))
        step = Work(decode_work(length).flops, WEIGHT_BYTES * weights + ROW_BYTES * length * cached)
        words[name, "prefill"] = roofline.add(f"{name}: prefill", prefill_work(length), prefill)
        words[name, "decode"] = roofline.add(f"{name}: decode", step, decode)
    roofline.tell(report)
    return words


def judge(
    report: Report,
    rows: dict[str, dict[str, Any]],
    length: int,
    why: dict[tuple[str, str], str],
) -> None:
    for phase, least in (("prefill", 1.8), ("decode", 1.7)):
        rates = {name: row[f"{phase}_tok_s"] for name, row in rows.items()}
        if None in rates.values():
            report.target("W5", f"{phase} of {length}: tokens differ", None, at_least=least)
            continue
        for name in (TWO_RANKS, TENSOR_DCP):
            for other, bound in ((ONE, least), (TWO_THREADS, 0.9)):
                what = f"{phase} at {length}: {name} over {other}"
                ratio = rates[name] / rates[other]
                report.target("W5", what, ratio, at_least=bound, why=why[name, phase])


def draw(
    cases: dict[int, dict[str, dict[str, Any]]], laws: dict[str, dict[str, float]], path: str
) -> None:
    """Measured points and fitted lines, prefill and decode side by side."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5))
    line = np.linspace(min(cases), max(cases), 100)
    for place, (name, law) in enumerate(laws.items()):
        prefill, decode = np.array([times(cases[s][name], s) for s in cases]).T
        style = {"color": f"C{place}"}
        left.plot(list(cases), prefill, "o", label=name, **style)
        left.plot(
            line, line * law["a_microseconds"] / 1e6 + line**2 * law["b_nanoseconds"] / 1e9, **style
        )
        right.plot(list(cases), 1e3 * decode, "o", label=name, **style)
        right.plot(line, 1e3 * np.poly1d(np.polyfit(list(cases), decode, 1))(line), **style)
    left.set(xscale="log", yscale="log", xlabel="prompt, tokens", title="prefill, seconds")
    right.set(xlabel="context, tokens", title="decode, ms a token", ylim=(0, None))
    for panel in (left, right):
        panel.grid(alpha=0.3)
        panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    raise SystemExit(main())
