"""W1, W1m, W2: attention over a paged cache against the limits of this machine and torch's SDPA.

    python benchmarks/attention.py [--quick] [--threads N] [--rounds R] [--only W1 W1m W2] [--save]

    W1    decode, blocks in random order     >= 80% of the read bandwidth of the same run
    W1m   decode of latent rows 576/512      >= 65% of the GEMM rate of the same run
    W2    causal prefill, cached prefix      >= 75% of the GEMM rate, and never below SDPA

The backend judged is the one that engines choose; the others stand beside it. SDPA finds keys dense
and in order, and tells no log-sum-exp.

W1 has two rows of that backend. `called`: layer by layer from Python, which runs out of cold caches
once a layer has been read. `recorded`: as an engine runs decode steps that look alike, from the
third on; W1 is held against this one. A table beside it tells what the kernel's arithmetic takes
where memory is no limit, and how much of it hides under reading.
"""

from __future__ import annotations

from typing import Any

from support import NUM_CORES, Report, parser, say

from heddle.bench.attention import (
    PEER,
    RECORDED,
    SUMMED,
    measure_attention,
    num_layers_for,
    timed_backends,
    with_threads,
)
from heddle.bench.limits import Limits
from heddle.bench.paged_case import AttentionShape, CaseSize, latent_shape
from heddle.bench.resident import measure_resident
from heddle.engine.args import engine_config
from heddle.engine.machine import resolve_here

SMALL = AttentionShape(num_query_heads=9, num_kv_heads=3, head_dim=64)
LARGE = AttentionShape(num_query_heads=32, num_kv_heads=8, head_dim=128)
RESIDENT = ((SMALL, 131072), (LARGE, 32768))
"""Contexts of which one layer is 201 and 268 MB."""
MANY_PRODUCTS, FEW_ROUNDS = 10**11, 3
"""Of scores, in one pass: more is run no more often than that."""
TITLES = {"W1": "decode", "W1m": "decode of latent rows", "W2": "prefill"}
COLUMNS = ("heads", "context", "new rows", "block", "backend", "seconds", "GB/s", "GFLOP/s")
COLUMNS += ("of read", "of GEMM")


def decode_sizes(quick: bool) -> list[tuple[int, int]]:
    """(context, block size)."""
    if quick:
        return [(4096, 16)]
    return [(length, block) for length in (4096, 16384, 131072) for block in (16, 128)]


def prefill_sizes(quick: bool) -> list[tuple[int, int]]:
    """(context, new rows)."""
    return [(1024, 512)] if quick else [(2048, 2048), (8192, 512), (8192, 2048), (8192, 8192)]


def sizes(name: str, quick: bool) -> list[tuple[AttentionShape, int, int, int]]:
    """Shape, context, new rows and block size of each case of a target."""
    if name == "W1m":
        contexts = (4096,) if quick else (4096, 32768)
        return [(latent_shape(heads), n, 1, 16) for heads in (16, 128) for n in contexts]
    if name == "W1":
        return [(shape, n, 1, size) for shape in (SMALL, LARGE) for n, size in decode_sizes(quick)]
    return [(shape, n, rows, 16) for shape in (SMALL, LARGE) for n, rows in prefill_sizes(quick)]


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--threads", type=int, default=NUM_CORES)
    flags.add_argument("--only", nargs="*", choices=TITLES, default=tuple(TITLES))
    arguments = flags.parse_args()
    rounds = arguments.rounds or (2 if arguments.quick else 7)
    ours = resolve_here(engine_config("demo")).backend
    report = Report("attention", "Attention against the limits of the machine")
    limits = Limits()
    cases: dict[str, list[dict[str, Any]]] = {name: [] for name in TITLES}
    resident: list[dict[str, Any]] = []
    with with_threads(arguments.threads):
        for name in arguments.only:
            for case in sizes(name, arguments.quick):
                cases[name].append(run(name, *case, rounds, limits, ours))
        if "W1" in arguments.only:
            resident = run_resident(arguments.quick, rounds, limits, ours)
    for name in arguments.only:
        rows = [row for case in cases[name] for row in rows_of(case)]
        report.table(TITLES[name], COLUMNS, rows)
    if resident:
        tell_resident(report, resident)
    judge(report, cases, ours)
    metrics = {"threads": arguments.threads, **cases, "resident": resident}
    return report.finish(arguments, metrics)


def run(
    name: str,
    shape: AttentionShape,
    context: int,
    num_rows: int,
    block_size: int,
    rounds: int,
    limits: Limits,
    ours: str,
) -> dict[str, Any]:
    say(f"{shape.name}: {context} tokens, {num_rows} new, blocks of {block_size}")
    size = CaseSize(
        context=context,
        num_rows=num_rows,
        block_size=block_size,
        num_layers=num_layers_for(shape, context, 1) if num_rows == 1 else 1,
    )
    # Prefill is measured against SDPA alone, and its longest case in few rounds: the rest of the
    # backends, and the rest of the rounds, would take twice as long as all else.
    backends = [ours] if name == "W2" else timed_backends()
    if size.pairs * shape.num_query_heads * shape.head_dim > MANY_PRODUCTS:
        rounds = min(rounds, FEW_ROUNDS)
    recorded = [ours] if name == "W1" else []
    return measure_attention(shape, size, rounds, limits, backends=backends, recorded=recorded)


def run_resident(quick: bool, rounds: int, limits: Limits, ours: str) -> list[dict[str, Any]]:
    found = []
    for shape, most in RESIDENT:
        context = 4096 if quick else most
        say(f"{shape.name}: {context} tokens, in memory and in a cache")
        found.append(measure_resident(shape, context, (16, 128), rounds, limits, backend=ours))
    return found


def tell_resident(report: Report, cases: list[dict[str, Any]]) -> None:
    """The table of the parts, and what it says."""
    columns = ["heads", "context", "block", "ns a key", "to read", "to compute", "overlap"]
    rows: list[list[Any]] = []
    for case in cases:
        for found in case["blocks"]:
            parts = ("taken", "read", "compute")
            ns = [found[f"{part}_seconds"] / case["context"] * 1e9 for part in parts]
            what = [case["shape"], case["context"], found["block_size"]]
            rows.append([*what, *ns, found["overlap"]])
    report.table("decode, reading and arithmetic apart", columns, rows)
    for case in cases:
        limits, first = case["limits"], case["blocks"][0]
        of_gemm = case["compute_flops"] / limits["gemm_flops"]
        of_read = case["compute_bytes_per_second"] / limits["read_bytes_per_second"]
        report.note(
            f"{case['shape']}: with rows in a core's own cache the kernel reaches {of_gemm:.2f} of "
            f"the GEMM rate and meets {of_read:.2f} times the bytes that memory can deliver; out "
            f"of memory, in blocks of {first['block_size']}, {first['overlap']:.2f} of the shorter "
            "part hides under the longer."
        )


def rows_of(case: dict[str, Any]) -> list[list[Any]]:
    limits = case["limits"]
    what = [case["shape"], case["context"], case["num_rows"], case["block_size"]]
    rows = [
        [
            *what,
            "the limit",
            None,
            limits["read_bytes_per_second"] / 1e9,
            limits["gemm_flops"] / 1e9,
            1.0,
            1.0,
        ]
    ]
    summed = case["summed_bytes_per_second"]
    if summed is not None:
        of_read = summed / limits["read_bytes_per_second"]
        rows.append([*what, SUMMED, None, summed / 1e9, None, of_read, None])
    names = [row["name"] for row in case["backends"]]
    for row in case["backends"]:
        is_twice = RECORDED.format(row["name"]) in names
        name = f"{row['name']}, called" if is_twice else row["name"]
        rates = [None if row[name] is None else row[name] / 1e9 for name in RATES]
        shares = [row["share_of_read"], row["share_of_gemm"]]
        rows.append([*what, name, row["median_seconds"], *rates, *shares])
    return rows


RATES = ("bytes_per_second", "flops")


def judge(report: Report, cases: dict[str, list[dict[str, Any]]], ours: str) -> None:
    for target_id, name, share, least in (
        ("W1", RECORDED.format(ours), "share_of_read", 0.8),
        ("W1m", ours, "share_of_gemm", 0.65),
        ("W2", ours, "share_of_gemm", 0.75),
    ):
        for case in cases[target_id]:
            what = f"{name}, {case['shape']}, {case['num_rows']} of {case['context']} tokens, "
            what += f"blocks of {case['block_size']}"
            found = {row["name"]: row for row in case["backends"]}
            report.target(
                target_id, f"{what}: {share.replace('_', ' ')}", found[name][share], at_least=least
            )
            if target_id == "W2" and found[name]["median_seconds"] is not None:
                ratio = found[PEER]["median_seconds"] / found[name]["median_seconds"]
                report.target("W2", f"{what}: times as fast as SDPA", ratio, at_least=1.0)


if __name__ == "__main__":
    raise SystemExit(main())
