"""Kernels for a GPU: error against the reference, and share of the device's bandwidth, per op.

    python benchmarks/gpu.py [--quick] [--interpret]

An error is the largest difference from float64, beside that of the reference in float32 on the same
inputs. A share is bytes that must move over the time, divided by the bandwidth of a plain torch
read (for ops that read) or copy (for ops that move) in the same round; the median of all rounds.
A decode step of some layers is timed as Python launches it and as a captured graph, in turn.
Without a device nothing is timed and the last line says `"device": null`; `--interpret` still takes
the errors, of small inputs in Triton's interpreter, and a small step.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from support import Report, parser, say

from heddle.attention.quantized_rows import QuantizedRows
from heddle.kernels.cache_write import reference as write_reference
from heddle.kernels.paged_decode import reference as decode_reference
from heddle.kernels.paged_decode.plan import PagedPlan, RowWidths
from heddle.kernels.state_merge import reference as merge_reference
from heddle.kernels.state_pack import reference as pack_reference
from heddle.kernels.state_pack.reference import Grid
from heddle.layout.cache_rows import RowFormat

ROUNDS = 7
BLOCK_SIZE = 16
LIMIT_BYTES = 4 << 30
"""Of a tensor that is read, or copied: far more than any cache of the device."""
STEP = {
    "num_layers": 8,
    "hidden": 4096,
    "inner": 14336,
    "heads": 32,
    "kv_heads": 8,
    "width": 128,
    "max_rows": 32,
    "max_blocks": 256,
}
"""Of a decode step: the layers of a model with 8 billion weights."""
STEP_CONTEXT = 4096
STEP_REQUESTS = (1, 7, 32)
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Op:
    """One kernel on inputs of one size."""

    name: str
    num_bytes: int
    """That must be read or written at least."""
    limit: str
    """`read` or `copy`: the limit that it is held against."""
    run: Callable[[], Tensors]
    plain: Callable[[], Tensors] | None = None
    """The reference in float32; None: too slow at this size."""
    exact: Callable[[], Tensors] | None = None
    """The reference in float64."""


@dataclass(frozen=True)
class Decode:
    """One shape of paged attention."""

    name: str
    num_rows: int
    context: int
    lanes: int
    kv_heads: int
    widths: RowWidths
    stored: str
    """A float type of torch, `int8` or `fp8_e4m3`."""


GQA, LATENT = RowWidths(128, 128, 128), RowWidths(576, 0, 512)
DECODES = (
    Decode("gqa 1 x 256k", 1, 1 << 18, 32, 8, GQA, "bfloat16"),
    Decode("gqa 32 x 16k", 32, 1 << 14, 32, 8, GQA, "bfloat16"),
    Decode("gqa 32 x 16k", 32, 1 << 14, 32, 8, GQA, "float32"),
    Decode("gqa 32 x 16k", 32, 1 << 14, 32, 8, GQA, "int8"),
    Decode("gqa 32 x 16k", 32, 1 << 14, 32, 8, GQA, "fp8_e4m3"),
    Decode("mla 1 x 256k", 1, 1 << 18, 128, 1, LATENT, "bfloat16"),
    Decode("mla 64 x 16k, 16 lanes", 64, 1 << 14, 16, 1, LATENT, "bfloat16"),
    Decode("mla 64 x 16k, 128 lanes", 64, 1 << 14, 128, 1, LATENT, "bfloat16"),
    Decode("mla 64 x 16k, 16 lanes", 64, 1 << 14, 16, 1, LATENT, "int8"),
)


def decode(shape: Decode, device: torch.device, *, is_small: bool) -> Op:
    """Attention over a pool whose blocks lie in random order."""
    from heddle.kernels.paged_decode import triton_gpu
    from heddle.kernels.paged_decode.triton_plan import DevicePlan, LaneGroups

    num_rows, context = (2, 70) if is_small else (shape.num_rows, shape.context)
    generator = torch.Generator(device).manual_seed(0)
    blocks_each = -(-context // BLOCK_SIZE)
    order = np.random.default_rng(0).permutation(num_rows * blocks_each)
    plan = PagedPlan(
        block_tables=order.reshape(num_rows, blocks_each),
        table_of_row=np.arange(num_rows),
        first=np.zeros(num_rows, dtype=np.int64),
        end=np.full(num_rows, context),
        block_size=BLOCK_SIZE,
    )
    widths = shape.widths
    width = max(widths.key, widths.value_start + widths.value)
    pool = (num_rows * blocks_each * BLOCK_SIZE, shape.kv_heads, width)
    rows, row_format, decoded = stored_rows(pool, shape, device, generator)
    is_float32 = shape.stored == "float32"
    query = torch.randn(num_rows, shape.lanes, widths.key, device=device, generator=generator)
    query = query.to(torch.float32 if is_float32 else torch.bfloat16)
    heads = np.arange(shape.lanes, dtype=np.int32) // (shape.lanes // shape.kv_heads)
    scale = widths.key**-0.5

    groups = LaneGroups.of(heads, triton_gpu.max_lanes(widths), device)
    on_device = DevicePlan.of(plan, device)
    layer = triton_gpu.LayerForm(widths, scale, 0.0, row_format)

    def reference(dtype: torch.dtype) -> Tensors:
        wide = (query.cpu().to(dtype), decoded.cpu().to(dtype))
        return decode_reference.paged_decode(*wide, plan, widths, heads, scale)

    return Op(
        f"decode {shape.name}, {shape.stored}",
        num_rows * context * shape.kv_heads * rows.shape[-1] * rows.element_size(),
        "read",
        lambda: triton_gpu.attend(query, rows, on_device, groups, layer),
        (lambda: reference(torch.float32)) if is_small else None,
        (lambda: reference(torch.float64)) if is_small else None,
    )


def stored_rows(
    pool: tuple[int, int, int], shape: Decode, device: torch.device, generator: torch.Generator
) -> tuple[torch.Tensor, RowFormat | None, torch.Tensor]:
    """Rows as stored, their format, and as numbers; encoded in pieces, to spare memory."""
    if shape.stored not in ("int8", "fp8_e4m3"):
        rows = torch.randn(pool, device=device, generator=generator, dtype=torch.float32)
        rows = rows.to(getattr(torch, shape.stored))
        return rows, None, rows
    key, start, value = shape.widths
    row_format = RowFormat(shape.stored, (key, value) if start else (value, key - value))
    codec = QuantizedRows(row_format)
    pieces = [
        codec.encode(torch.randn(len(part), *pool[1:], device=device, generator=generator))
        for part in torch.arange(pool[0]).split(1 << 16)
    ]
    rows = torch.cat(pieces)
    return rows, row_format, codec.decode(rows[: 1 << 12], torch.float32)


def movers(device: torch.device, *, is_small: bool) -> list[Op]:
    """Merge, pack and write."""
    from heddle.kernels.cache_write import triton_gpu as write
    from heddle.kernels.state_merge import triton_gpu as merge
    from heddle.kernels.state_pack import triton_gpu as pack

    generator = torch.Generator(device).manual_seed(1)
    num_rows = 3 if is_small else 1 << 14

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator)

    outs, lses = draw(8, num_rows, 16, 128), draw(8, num_rows, 16)
    grid = Grid(num_replicas=2, slice_size=4, is_copy=False)
    out, lse = draw(2 * num_rows, 64, 128), draw(2 * num_rows, 64)
    new_rows = draw(num_rows * 4, 8, 256).to(torch.bfloat16)
    slots = torch.randperm(len(new_rows), device=device, generator=generator)
    slots[::4] = -1

    def written(
        function: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None],
    ) -> Callable[[], Tensors]:
        pool = torch.zeros(len(new_rows) + 5, 8, 256, dtype=torch.bfloat16, device=device)

        def run() -> Tensors:
            function(pool, slots, new_rows)
            return (pool,)

        return run

    packed = out.numel() + lse.numel()
    moved = 2 * new_rows.numel() * new_rows.element_size() * 3 // 4
    return [
        Op(
            "merge 8 states, 16 x 128",
            4 * (outs.numel() + lses.numel()) * 9 // 8,
            "read",
            lambda: merge.merge(outs, lses),
            lambda: merge_reference.merge(outs, lses),
            lambda: merge_reference.merge(outs.double(), lses.double()),
        ),
        Op(
            "pack for 8 ranks, 64 x 128",
            8 * packed,
            "copy",
            lambda: (pack.pack(out, lse, grid),),
            lambda: (pack_reference.pack(out, lse, grid),),
            lambda: (pack_reference.pack(out, lse, grid),),
        ),
        Op(
            "cache write, 8 x 256, bfloat16",
            moved,
            "copy",
            written(write.write),
            written(write_reference.write),
            written(write_reference.write),
        ),
    ]


def worst(found: Tensors, exact: Tensors) -> float:
    """The largest difference from float64, of all tensors."""
    return max(
        (one.cpu().double() - other.cpu().double()).abs().max().item()
        for one, other in zip(found, exact, strict=True)
    )


def seconds(run: Callable[[], Any]) -> float:
    """Of one run, by the device's clock, of as many as take some milliseconds."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    repeats = 1
    while True:
        start.record()
        for _ in range(repeats):
            run()
        stop.record()
        torch.cuda.synchronize()
        taken = start.elapsed_time(stop) / 1000
        if taken > 0.005 or repeats >= 1024:
            return taken / repeats
        repeats *= 4


def limits(device: torch.device, num_bytes: int) -> dict[str, Callable[[], float]]:
    """Bytes a second of a plain read and of a plain copy."""
    given = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(given)
    return {
        "read": lambda: num_bytes / seconds(given.sum),
        "copy": lambda: 2 * num_bytes / seconds(lambda: target.copy_(given)),
    }


def share(op: Op, limit: Callable[[], float], rounds: int) -> tuple[float, float]:
    """Median share of the limit, and bytes a second; limit and op in turn."""
    op.run()  # compiled now
    rates = [(limit(), op.num_bytes / seconds(op.run)) for _ in range(rounds)]
    return statistics.median(rate / most for most, rate in rates), statistics.median(
        rate for _, rate in rates
    )


def errors(device: torch.device, report: Report) -> dict[str, dict[str, float]]:
    """Small inputs of every op against float64."""
    found = {}
    small = [decode(shape, device, is_small=True) for shape in DECODES]
    for op in (*small, *movers(device, is_small=True)):
        assert op.plain is not None
        assert op.exact is not None
        exact = op.exact()
        found[op.name] = {
            "error": worst(op.run(), exact),
            "reference_error": worst(op.plain(), exact),
        }
    rows = [[name, each["error"], each["reference_error"]] for name, each in found.items()]
    report.table("errors", ["op", "kernel", "reference"], rows)
    return found


def graph_steps(
    device: torch.device, arguments: Any, report: Report
) -> dict[str, dict[str, float]]:
    """One decode step, eager and as a graph, in turn; padded to the row count that is captured."""
    from heddle.bench.graph_step import DecodeStep, StepShape
    from heddle.kernels.recording.cuda_graphs import CudaGraphApi
    from heddle.kernels.recording.graphs import Graphs

    rounds = arguments.rounds or (2 if arguments.quick else ROUNDS)
    step = DecodeStep(StepShape(**STEP), device, torch.bfloat16)
    graphs = Graphs(CudaGraphApi(device))
    found = {}
    for num_requests in STEP_REQUESTS:
        name = f"decode step, {num_requests} x {STEP_CONTEXT}"
        say(name)
        num_rows = graphs.num_rows(num_requests, lambda: None)
        assert num_rows is not None, "of the counts that are captured"
        hidden = torch.randn(num_rows, STEP["hidden"], device=device).to(torch.bfloat16)
        slots = step.plan([STEP_CONTEXT] * num_requests, num_rows)

        def eager(hidden: torch.Tensor = hidden, slots: torch.Tensor = slots) -> torch.Tensor:
            return step.compute(hidden, slots)

        def graph(hidden: torch.Tensor = hidden, slots: torch.Tensor = slots) -> torch.Tensor:
            return graphs.run("step", [hidden, slots], lambda: step.compute(hidden, slots))

        with torch.inference_mode():
            expected = eager().clone()
            for _ in range(4):  # watched, watched, captured, replayed
                result = graph()
            pairs = [(seconds(eager), seconds(graph)) for _ in range(rounds)]
        found[name] = {
            "eager_seconds": statistics.median(one for one, _ in pairs),
            "graph_seconds": statistics.median(other for _, other in pairs),
            "eager_over_graph": statistics.median(one / other for one, other in pairs),
            "error": worst((result,), (expected,)),
        }
    rows = [
        [name, each["eager_seconds"] * 1e6, each["graph_seconds"] * 1e6, each["eager_over_graph"]]
        for name, each in found.items()
    ]
    report.table("decode step", ["step", "eager us", "graph us", "eager / graph"], rows)
    return found


def small_step(report: Report) -> dict[str, float]:
    """The step that is timed on a device, small and interpreted: pads against none."""
    from heddle.bench.graph_step import DecodeStep, StepShape

    device, found = torch.device("cpu"), []
    sizes = {"num_layers": 1, "hidden": 32, "inner": 32, "heads": 4, "kv_heads": 2}
    for num_rows in (2, 4):
        step = DecodeStep(
            StepShape(**sizes, width=16, max_rows=4, max_blocks=2), device, torch.float32
        )
        hidden = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))[:num_rows]
        found.append(step.compute(hidden, step.plan([9, 20], num_rows))[:2])
    error = worst((found[1],), (found[0],))
    report.table("decode step, 2 rows as 4", ["largest difference"], [[error]])
    return {"difference": error}


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--interpret", action="store_true", help="errors without a device")
    arguments = flags.parse_args()
    report = Report("gpu", "Kernels on a GPU")
    metrics: dict[str, Any] = {"device": None}
    if arguments.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, below
        metrics["errors"] = errors(torch.device("cpu"), report)
        metrics["padded_step"] = small_step(report)
        return report.finish(arguments, metrics)
    if not torch.cuda.is_available():
        report.note("No CUDA device: nothing was timed. --interpret takes the errors.")
        return report.finish(arguments, metrics)
    device = torch.device("cuda")
    metrics["device"] = torch.cuda.get_device_name(device)
    metrics["errors"] = errors(device, report)
    metrics["shares"] = shares(device, arguments, report)
    metrics["steps"] = graph_steps(device, arguments, report)
    return report.finish(arguments, metrics)


def shares(device: torch.device, arguments: Any, report: Report) -> dict[str, dict[str, float]]:
    """Large inputs of every op, one after the other."""
    measure = limits(device, LIMIT_BYTES >> 4 if arguments.quick else LIMIT_BYTES)
    rounds = arguments.rounds or (2 if arguments.quick else ROUNDS)
    makers: list[Callable[[], list[Op]]] = [
        lambda shape=shape: [decode(shape, device, is_small=False)] for shape in DECODES
    ]
    makers.append(lambda: movers(device, is_small=False))
    found = {}
    for make in makers:
        for op in make():
            say(op.name)
            ratio, rate = share(op, measure[op.limit], rounds)
            found[op.name] = {"share": ratio, "bytes_per_second": rate}
        torch.cuda.empty_cache()
    rows = [[name, each["share"], each["bytes_per_second"] / 1e9] for name, each in found.items()]
    report.table("share of the limit", ["op", "share", "GB/s"], rows)
    return found


if __name__ == "__main__":
    sys.exit(main())
