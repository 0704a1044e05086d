"""W8: what the driver adds to a step, and how long it plans a large one.

python benchmarks/driver.py [--quick] [--rounds R] [--save]

schedule + plan + localize + messages of 32 decode rows          <= 3% of the step
plan of 256 decode rows and an 8k chunk of a 1M-token prompt, 64 ranks        <= 3 ms
"""

from __future__ import annotations

from statistics import median
from typing import Any

from support import NUM_CORES, Report, parser, say

from heddle.bench.step import measure_step
from heddle.bench.timing import timed
from heddle.config.model import ModelConfig, RopeConfig
from heddle.engine.args import engine_config
from heddle.layout.resolve import resolve
from heddle.step.batch import GlobalBatch, ScheduledRequest
from heddle.step.localize import localize
from heddle.step.packed import pack_table
from heddle.step.plan import plan
from heddle.step.topology import Topology

LAYOUTS: dict[str, dict[str, Any]] = {
    "1 rank": {"num_threads": NUM_CORES},
    "2 ranks": {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2},
}
LONG, CHUNK, CACHED, DECODES = 1_000_000, 8192, 500_000, 256
LARGE = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_layers=80,
    num_query_heads=64,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=1 << 20,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    tie_word_embeddings=False,
)


def main() -> int:
    arguments = parser(__doc__).parse_args()
    report = Report("driver", "What the driver adds")
    steps = {}
    for name, settings in LAYOUTS.items():
        say(name)
        steps[name] = measure_step(
            engine_config("demo", **settings),
            num_streams=4 if arguments.quick else 32,
            prompt_len=32 if arguments.quick else 128,
            num_steps=4 if arguments.quick else 32,
        )
        columns = ["where", "part", "ms", "share"]
        rows = [
            [part["where"], part["part"], 1e3 * part["seconds"], part["share"]]
            for part in steps[name]["parts"]
        ]
        step_ms = 1e3 * steps[name]["step_seconds"]
        report.table(f"{name}: a step of {step_ms:.1f} ms", columns, rows)
        share = steps[name]["driver_share"]
        report.target("W8", f"{name}: driver's share of a step", share, at_most=0.03)
    planning = measure_planning(arguments.rounds or 15)
    report.table("64 ranks", ["part", "ms"], [[k, 1e3 * v] for k, v in planning.items()])
    report.target("W8", "plan for 64 ranks, ms", 1e3 * planning["plan"], at_most=3.0)
    return report.finish(arguments, {"steps": steps, "planning_seconds": planning})


def measure_planning(rounds: int) -> dict[str, float]:
    """Median seconds of planning a large step, and of one rank's part of it."""
    config = engine_config(
        "shapes",
        tensor_parallel_size=8,
        prefill_context_parallel_size=8,
        decode_context_parallel_size=8,
        executor="threads",
        max_model_len=LONG,
        max_num_batched_tokens=CHUNK + DECODES,
        max_num_seqs=DECODES + 1,
    )
    resolved = resolve(
        config, LARGE, free_memory_bytes=1 << 42, num_cores=64, model_path=config.model
    )
    topology = Topology.from_resolved(resolved)
    batch = large_batch(topology)
    found = plan(batch, topology)
    calls = {
        "plan": lambda: plan(batch, topology),
        "localize": lambda: localize(found, topology, 0),
    }
    return {name: median(timed(call)() for _ in range(rounds)) for name, call in calls.items()}


def large_batch(topology: Topology) -> GlobalBatch:
    """256 decode rows behind contexts of different lengths, and a chunk in the middle of a million
    tokens.
    """
    unit = topology.kv_layout().virtual_block_size

    def request(index: int, cached: int, count: int) -> ScheduledRequest:
        blocks = range(1, 2 - (-(cached + count) // unit))
        return ScheduledRequest(
            request_id=index,
            token_ids=(1,) * count,
            num_computed_tokens=cached,
            packed_tables=(pack_table(blocks),),
            layout_fingerprint=topology.fingerprint(),
        )

    decodes = [request(index, 1000 + 97 * index, 1) for index in range(DECODES)]
    return GlobalBatch(epoch=0, step=0, requests=(*decodes, request(DECODES, CACHED, CHUNK)))


if __name__ == "__main__":
    raise SystemExit(main())
