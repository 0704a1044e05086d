"""Compiles kernels for GPUs that need not be there; run as a program, it prints what came out.

    TRITON_INTERPRET=0 python -m tests.kernels.compile_kernels 90 [--all]

The interpreter knows neither registers nor shared memory, and accepts what the compiler does not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from triton import compile as compile_source
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from heddle.kernels.cache_write.triton_gpu import _write_kernel
from heddle.kernels.paged_decode.plan import RowWidths
from heddle.kernels.paged_decode.triton_gpu import LayerForm, kernel_constants, max_lanes
from heddle.kernels.paged_decode.triton_kernel import decode_kernel
from heddle.kernels.state_merge.triton_gpu import _merge_kernel
from heddle.kernels.state_pack.triton_gpu import _pack_kernel
from heddle.kernels.triton_math import OPTIONS
from heddle.layout.cache_rows import RowFormat

GQA, LATENT = RowWidths(64, 64, 64), RowWidths(576, 0, 512)
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
FLOATS = ("scale", "softcap")
_ALIGNED = [["tt.divisibility", 16]]

Job = tuple[str, Any, dict[str, str], dict[str, Any]]


def movers() -> Iterator[Job]:
    """The kernels without products: name, kernel, pointers, constants."""
    floats = dict.fromkeys(("outs", "lses", "merged_out", "merged_lse"), "*fp32")
    sizes = {"width": 64, "block_width": 64, "block_lanes": 16, **OPTIONS}
    merge = {**floats, "visible": "*u8"}
    yield "merge", _merge_kernel, merge, {**sizes, "has_visible": True}
    yield "pack", _pack_kernel, dict.fromkeys(("out", "lse", "blocks"), "*fp32"), sizes
    write = {"pool": "*bf16", "slot_mapping": "*i64", "rows": "*fp32"}
    shape = {"num_heads": 8, "width": 256, "block": 2048, **OPTIONS}
    yield "write", _write_kernel, write, shape


def decoders(*, every: bool) -> Iterator[Job]:
    """The decode kernel for bfloat16, or for all widths, types, and groups of lanes."""
    pointers = dict.fromkeys(("scales", "outs", "lses"), "*fp32") | dict.fromkeys(
        ("block_tables", "table_of_row", "first_of_row", "end_of_row", "group_heads"), "*i32"
    )
    pointers["group_lanes"] = "*i32"
    types: list[tuple[torch.dtype, str | None]] = [(torch.bfloat16, None)]
    if every:
        types += [(torch.float32, None), (torch.float16, None)]
        types += [(torch.bfloat16, "int8"), (torch.bfloat16, "fp8_e4m3")]
    for widths in (GQA, RowWidths(128, 128, 128), LATENT) if every else (GQA,):
        for dtype, codes in types:
            for lanes in {16, max_lanes(widths)} if every else {16}:
                form = None
                if codes:
                    parts = (widths.key, widths.value) if widths.value_start else (512, 64)
                    form = RowFormat(codes, parts)
                stored = "*i8" if codes else POINTERS[dtype]
                name = f"decode {widths.key} {codes or stored[1:]} {lanes} lanes"
                layer = LayerForm(widths, 1.0, float(every), form)
                constants = kernel_constants(dtype, dtype, layer, lanes)
                constants |= {"block_size": 16, "upcast": False}
                yield (
                    name,
                    decode_kernel,
                    {**pointers, "query": POINTERS[dtype], "rows": stored},
                    (constants),
                )


def build(capability: int, job: Job) -> dict[str, Any]:
    """Compile to machine code; what it needs."""
    name, kernel, pointers, given = job
    constants = {key: value for key, value in given.items() if key in kernel.arg_names}
    options = {key: value for key, value in given.items() if key not in kernel.arg_names}
    signature = {
        each: pointers.get(each)
        or ("constexpr" if each in constants else "fp32" if each in FLOATS else "i32")
        for each in kernel.arg_names
    }
    hints = {(place,): _ALIGNED for place, each in enumerate(kernel.arg_names) if each in pointers}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=hints)
    found = compile_source(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {
        "name": name,
        "code_bytes": len(found.asm["cubin"]),
        "shared_bytes": found.metadata.shared,
        "has_tensor_cores": "mma" in found.asm["ptx"],
    }


def main() -> None:
    jobs = [*movers(), *decoders(every="--all" in sys.argv)]
    print(json.dumps([build(int(sys.argv[1]), job) for job in jobs]))


if __name__ == "__main__":
    main()
