"""How a step grows with context, batch and ranks: laws of theory, fitted; a picture and a page.

    python benchmarks/sweep.py [--quick] [--ranks N ...] [--rounds R] [--save]

Costs must grow as theory says. For steps of the demo model on N ranks with one thread each (PCP N,
DCP N), B sequences of S tokens, q new rows, p pairs of a row and a key that it sees:

    decode step   = a + c B + b B S     weights once; products of a row; cached rows, once each
    prefill step  = a + c q + b p       the same; scores and values of a pair

so that a prompt of T tokens in pieces of C costs (a / C + c) T + b T (T + 1) / 2. Constants become
rates of useful work, each thing once whatever ranks repeat, beside what as many threads read and
multiply at most. Cached rows are filled in, not computed (`heddle.bench.filled_steps`), and a step
is timed from its message to the last reply; `scaling.py` times whole prompts through the engine.
More ranks than cores would measure how these are shared, and are left out.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from statistics import median
from typing import Any

from pictures.steps import Phase, draw
from roofline import (
    HEAD_FLOPS,
    PAIR_FLOPS,
    ROW_BYTES,
    ROW_FLOPS,
    WEIGHT_BYTES,
    machine_limits,
)
from support import NUM_CORES, RESULTS, Report, parser, say, stem

from heddle.bench.filled_steps import WORKER, FilledSteps
from heddle.bench.laws import Law, fit_law
from heddle.bench.paged_case import CaseSize
from heddle.bench.timing import interleaved
from heddle.engine.args import engine_config
from heddle.engine.executors.processes import ProcessesExecutor
from heddle.engine.machine import resolve_here

LEGEND = (
    "Decode step of B sequences of S tokens: a + c B + b B S. Prefill step of q new rows that see "
    "p keys in all: a + c q + b p. Rates count useful work, each thing once whatever ranks repeat, "
    "for all ranks together; the limits are those of as many threads."
)
BATCHES = (1, 2, 4, 8, 16, 32)
PIECE = 512
"""C: rows of a prompt in one step."""
MOST_TOKENS = 32_768
"""In the pool: what a batch may have in all."""
BLOCK_SIZE = 16
_WARM_RUNS = 2
"""The second step of a shape may still prepare what later ones use."""
Seconds = dict[CaseSize, dict[int, float]]
"""By size and number of ranks, median of rounds."""
Laws = dict[str, dict[int, Law]]
"""By phase and number of ranks."""


def main() -> int:
    flags = parser(__doc__)
    usual = [count for count in (1, 2, 4, 8) if count <= NUM_CORES]
    flags.add_argument("--ranks", type=int, nargs="+", default=usual, metavar="N")
    arguments = flags.parse_args()
    contexts = (128, 256, 512) if arguments.quick else tuple(512 << k for k in range(6))
    decode, prefill = sizes(contexts, arguments.quick)
    with ExitStack() as stack:
        engines = {count: stack.enter_context(started(count)) for count in arguments.ranks}
        rounds = arguments.rounds or (1 if arguments.quick else 3)
        phases = {
            "decode": measure(engines, decode, rounds),
            "prefill": measure(engines, prefill, max(rounds // 2, 1)),
        }
    limits = {n: machine_limits(n, is_quick=arguments.quick) for n in arguments.ranks}
    laws = {phase: fitted(found) for phase, found in phases.items()}
    report = Report("sweep", "Steps over context, batch and ranks")
    tell(report, phases, laws, limits)
    if arguments.save:
        keep_pictures(report, phases, laws)
    return report.finish(arguments, metrics(phases, laws, limits))


def sizes(contexts: Sequence[int], is_quick: bool) -> tuple[list[CaseSize], list[CaseSize]]:
    """Of decode steps and of prefill steps."""
    batches, piece = (BATCHES[:3], 64) if is_quick else (BATCHES, PIECE)
    decode = [
        CaseSize(context=context, num_streams=count)
        for context in contexts
        for count in batches
        if context * count <= MOST_TOKENS
    ]
    rows = [(context, piece) for context in contexts]
    # Shorter pieces tell the products of a row from the weights that every step reads.
    rows += [(context, piece // part) for context in contexts[:3:2] for part in (4, 2)]
    return decode, [CaseSize(context=context, num_rows=count) for context, count in sorted(rows)]


@contextmanager
def started(num_ranks: int) -> Iterator[FilledSteps]:
    """Filled ranks, while they run."""
    say(f"loading {num_ranks} x 1 thread")
    config = engine_config(
        "demo",
        executor="processes",
        num_threads=1,
        prefill_context_parallel_size=num_ranks,
        decode_context_parallel_size=num_ranks,
        max_num_seqs=max(BATCHES),
        block_size=BLOCK_SIZE,
        num_blocks_override=MOST_TOKENS // BLOCK_SIZE // num_ranks + 1,
    )
    resolved = resolve_here(config)
    # Longer than the model was made for: rotary tables grow, and nothing else.
    model = replace(resolved.model, max_position_embeddings=MOST_TOKENS)
    resolved = replace(resolved, model=model)
    with ProcessesExecutor(resolved, worker=WORKER) as executor:
        yield FilledSteps(resolved, executor)


def measure(engines: dict[int, FilledSteps], cases: Sequence[CaseSize], rounds: int) -> Seconds:
    """Every engine in turn at every size, once it is warm."""
    found = {}
    for size in cases:
        say(f"{size.num_streams} x {size.context} tokens, {size.num_rows} new")
        calls = {count: partial(steps.seconds, size) for count, steps in engines.items()}
        if size.num_rows == 1 or size is cases[0]:  # prefill steps are long: one size warms all
            interleaved(calls, _WARM_RUNS)
        times = interleaved(calls, rounds)
        found[size] = {count: median(seconds) for count, seconds in times.items()}
    return found


def terms(size: CaseSize) -> list[int]:
    """What the law of a step's phase is made of."""
    if size.num_rows == 1:
        return [1, size.num_streams, size.num_streams * size.context]
    return [1, size.num_rows, size.pairs]


def fitted(found: Seconds) -> dict[int, Law]:
    """The law of each number of ranks."""
    counts = next(iter(found.values()))
    steps = list(map(terms, found))
    return {n: fit_law(steps, [times[n] for times in found.values()]) for n in counts}


def whole_prompt(law: Law, tokens: int) -> float:
    """Seconds of a prompt in pieces, by the law of one."""
    return float(law.seconds([tokens / PIECE, tokens, tokens * (tokens + 1) / 2]))


def rate(work: float, seconds: float) -> float | None:
    """Thousand millions a second; None where the law has no such term."""
    return work / seconds / 1e9 if seconds > 0 else None


def tell(
    report: Report,
    phases: dict[str, Seconds],
    laws: Laws,
    limits: dict[int, dict[str, float]],
) -> None:
    """What was found, in short first."""
    report.note(LEGEND)
    tell_laws(report, phases, laws, limits)
    names = [f"{count} rank{'s' * (count > 1)}" for count in limits]
    longest = max(size.context for size in phases["prefill"])
    lengths = [PIECE << k for k in range(20) if PIECE << k <= longest]
    rows = [[t, *(whole_prompt(law, t) for law in laws["prefill"].values())] for t in lengths]
    report.table("whole prompt by the law, s", ["tokens", *names], rows)
    for phase, found in phases.items():
        columns = ["sequences", "context", "new rows", *(f"{name}, ms" for name in names)]
        rows = []
        for size, times in found.items():
            by_law = [float(law.seconds(terms(size))) for law in laws[phase].values()]
            milliseconds = [1e3 * seconds for seconds in (*times.values(), *by_law)]
            rows.append([size.num_streams, size.context, size.num_rows, *milliseconds])
        report.table(f"{phase} step", [*columns, *(f"{name}, law" for name in names)], rows)


def tell_laws(
    report: Report,
    phases: dict[str, Seconds],
    laws: Laws,
    limits: dict[int, dict[str, float]],
) -> None:
    """Constants, and the rates that they mean beside the limits of the machine."""
    columns = ["ranks", "a: ms", "c: ms a sequence", "b: us a 1k tokens", "weights GB/s"]
    columns += ["cached rows GB/s", "read limit", "products GFLOP/s", "GEMM limit", "worst step"]
    rows = []
    for count, law in laws["decode"].items():
        a, c, b = law.constants
        read, gemm = peaks(limits[count])
        rates = [rate(WEIGHT_BYTES, a), rate(ROW_BYTES, b), read, rate(ROW_FLOPS, c), gemm]
        worst = worst_step(phases["decode"], law, count)
        rows.append([count, 1e3 * a, 1e3 * c, 1e9 * b, *rates, worst])
    report.table("laws of a decode step", columns, rows)
    columns = ["ranks", "a: ms", "c: ms a row", "b: ns a pair", "products GFLOP/s"]
    columns += ["attention GFLOP/s", "GEMM limit", "worst step"]
    rows = []
    for count, law in laws["prefill"].items():
        a, c, b = law.constants
        rates = [rate(ROW_FLOPS - HEAD_FLOPS, c), rate(PAIR_FLOPS, b), peaks(limits[count])[1]]
        worst = worst_step(phases["prefill"], law, count)
        rows.append([count, 1e3 * a, 1e3 * c, 1e9 * b, *rates, worst])
    report.table("laws of a prefill step", columns, rows)


def peaks(found: dict[str, float]) -> tuple[float, float]:
    """Thousand millions of bytes and of operations a second."""
    return found["read_bytes_per_second"] / 1e9, found["gemm_flops"] / 1e9


def worst_step(found: Seconds, law: Law, count: int) -> str:
    """How far a law is off at most, and where: above 0 where the step took longer."""
    off = {
        size: times[count] / float(law.seconds(terms(size))) - 1 for size, times in found.items()
    }
    size = max(off, key=lambda each: abs(off[each]))
    rows = f", {size.num_rows} new" if size.num_rows > 1 else ""
    return f"{off[size]:+.1%} at {size.num_streams} x {size.context}{rows}"


def metrics(
    phases: dict[str, Seconds], laws: Laws, limits: dict[int, dict[str, float]]
) -> dict[str, Any]:
    """The same for machines."""
    steps = [
        {
            "context": size.context,
            "num_streams": size.num_streams,
            "num_rows": size.num_rows,
            "seconds": times,
        }
        for found in phases.values()
        for size, times in found.items()
    ]
    fits = {phase: {n: asdict(law) for n, law in each.items()} for phase, each in laws.items()}
    return {"steps": steps, "laws": fits, "limits": limits}


def keep_pictures(report: Report, phases: dict[str, Seconds], laws: Laws) -> None:
    """As a file beside the result, and inside its page."""
    figure = draw(*(Phase(found, laws[name], terms) for name, found in phases.items()))
    name = f"{stem(report.theme)}.png"
    figure.savefig(RESULTS / name, dpi=110)
    report.pictures.append(name)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    report.drawings.append(text.getvalue())


if __name__ == "__main__":
    raise SystemExit(main())
