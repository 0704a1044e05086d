"""W6: causal prefill attention over two ranks, against PyTorch's ring template on gloo.

    python benchmarks/ring_peer.py [--quick] [--ranks N] [--rounds R] [--save]

PyTorch's public `context_parallel` does not run on a CPU; its private template does, with the flash
kernel of the CPU, load balanced as ours (two mirrored chunks a rank). Both compute the same rows of
the same prompt, a thread a rank; outputs are compared before anything is timed. Target, 4k to 32k
tokens: at least 1.3 times as fast.
"""

from __future__ import annotations

import os
import sys
import tempfile
from functools import partial
from pathlib import Path

from support import Report, parser, say

WORKERS = Path(__file__).parent / "workers"
sys.path.insert(0, str(WORKERS))

from ring import LENGTHS, OURS, SHAPE, STORE, THEIRS  # noqa: E402
from roofline import Roofline, Work, machine_limits  # noqa: E402

from heddle.bench.timing import interleaved, summary  # noqa: E402
from heddle.engine.args import engine_config  # noqa: E402
from heddle.engine.executors.base import Executor  # noqa: E402
from heddle.engine.executors.processes import ProcessesExecutor  # noqa: E402
from heddle.engine.machine import resolve_here  # noqa: E402
from heddle.step.batch import GlobalBatch, ScheduledRequest  # noqa: E402


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--ranks", type=int, default=2)
    flags.add_argument("--kernels", choices=("auto", "torch", "numba"), default="auto")
    arguments = flags.parse_args()
    lengths = [256, 512] if arguments.quick else [4096, 8192, 16384, 32768]
    report = Report("ring_peer", "Prefill over ranks, against PyTorch's ring template")
    config = engine_config(
        "demo",
        prefill_context_parallel_size=arguments.ranks,
        executor="processes",
        num_threads=1,
        kernels=arguments.kernels,
    )
    metrics = {}
    with tempfile.TemporaryDirectory() as folder:
        # Rank processes inherit these; the worker's module is found through the first.
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(WORKERS), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        os.environ[STORE] = str(Path(folder) / "store")
        os.environ[LENGTHS] = " ".join(map(str, lengths))
        with ProcessesExecutor(resolve_here(config), worker="ring:RingWorker") as executor:
            for place, length in enumerate(lengths):
                say(f"{length} tokens")
                calls = {
                    name: partial(run, executor, 2 * place + side, length)
                    for name, side in (("heddle", OURS), ("ring template", THEIRS))
                }
                for call in calls.values():
                    call()
                times = interleaved(calls, arguments.rounds or 3)
                metrics[length] = {name: summary(found) for name, found in times.items()}
    columns = ["tokens", "heddle s", "template s", "times as fast"]
    rows = []
    roofline = Roofline(machine_limits(arguments.ranks, is_quick=arguments.quick))
    for length, found in metrics.items():
        ours, theirs = (found[name]["median_seconds"] for name in ("heddle", "ring template"))
        rows.append([length, ours, theirs, theirs / ours])
        what = f"{length} tokens over {arguments.ranks} ranks: times as fast"
        why = roofline.add(f"heddle, {length} tokens", attention_work(length), ours)
        roofline.add(f"template, {length} tokens", attention_work(length), theirs)
        report.target("W6", what, theirs / ours, at_least=1.3, why=why)
    report.table("attention of one layer", columns, rows)
    roofline.tell(report)
    return report.finish(arguments, metrics)


def attention_work(length: int) -> Work:
    """Of all ranks: scores and values of each pair, and queries, rows and outputs once."""
    pairs = length * (length + 1) / 2
    heads, width = SHAPE.num_query_heads, SHAPE.head_dim
    return Work(4 * heads * width * pairs, 4 * 4 * heads * width * length)


def run(executor: Executor, step: int, length: int) -> float:
    """Seconds of the slowest rank; the batch says how much work it is, so that a long prompt is not
    taken for a rank that hangs.
    """
    prompt = ScheduledRequest(
        request_id=0,
        token_ids=(0,) * length,
        num_computed_tokens=0,
        packed_tables=(),
        layout_fingerprint=0,
    )
    batch = GlobalBatch(epoch=0, step=step, requests=(prompt,))
    return max(reply.seconds for reply in executor.execute(batch, digest=0))


if __name__ == "__main__":
    raise SystemExit(main())
