"""Every attention backend against torch's own attention and against the limits of this machine.

A backend counts by its share of a limit that is measured in the same run: bytes of the cache read a
second against the read bandwidth, operations a second against a matrix product. Its output must be
that of torch's `scaled_dot_product_attention` on the same numbers (latent rows: of two products),
else it has no time. That peer finds rows dense and in order and returns no log-sum-exp: it does
less.

A backend is called layer by layer; where asked for it also runs as in the decode steps of an
engine, launched from a recording of the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from heddle.attention.backends import BACKENDS, create_backend
from heddle.bench.limits import Limits
from heddle.bench.paged_case import AttentionShape, CaseSize, Inputs, PagedCase, Seat
from heddle.bench.timing import interleaved_seconds, summary
from heddle.config.engine import KernelChoice

RECORDED = "{}, recorded"
"""Name of a backend whose layers are launched from a recording."""
SUMMED = "the cache, summed"
"""Read in the order of memory by torch, beside what runs from a recording: pages of one process do
not lie equally fast, and the array of the limit has others.
"""
ORACLE = "reference"
"""Checked by tests, and too slow to be timed."""
PEER = "torch sdpa"
LATENT_PEER = "torch bmm"
LIMIT_BYTES = 1 << 28
"""Cache that the layers of a case hold together; far more than a processor keeps."""
MAX_LAYERS = 30
TOLERANCE = 2e-3
"""Between outputs near 1; narrow caches are not compared."""


@contextmanager
def with_threads(count: int) -> Iterator[None]:
    """Torch computes with so many threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def timed_backends() -> list[str]:
    """Backends for this device that can be loaded, without the oracle."""
    return [name for name in BACKENDS if name != ORACLE and _loads(name)]


def _loads(name: str) -> bool:
    try:
        create_backend(name)
    except ImportError:
        return False
    return True


def num_layers_for(shape: AttentionShape, context: int, num_streams: int) -> int:
    """Layers that together exceed every processor cache; latent attention is bound by arithmetic,
    so two are enough.
    """
    width = shape.widths[0] if shape.mla is not None else 2 * shape.head_dim
    layer_bytes = 4 * num_streams * context * shape.num_kv_heads * width
    most = MAX_LAYERS if shape.mla is None else 2
    return max(1, min(most, -(-LIMIT_BYTES // layer_bytes)))


def measure_attention(
    shape: AttentionShape,
    size: CaseSize,
    rounds: int,
    limits: Limits,
    *,
    backends: Sequence[str],
    kernels: KernelChoice = "auto",
    recorded: Sequence[str] = (),
) -> dict[str, Any]:
    """Time backends on one case.

    Args:
        shape: heads.
        size: sequences and new rows.
        rounds: times that each is run.
        limits: timed beside them.
        backends: names, for example `timed_backends()`.
        kernels: of the rank.
        recorded: those of them that also run from a recording, under the name `RECORDED`.
    Returns:
        `{shape, context, num_rows, num_streams, block_size, kv_cache_dtype, limits,
        summed_bytes_per_second, backends: [{name, max_abs_error, median_seconds, min_seconds,
        bytes_per_second, flops, share_of_read, share_of_gemm}]}`; rates and shares are of the
        medians; the sum of `SUMMED` is None where nothing is recorded.
    Raises:
        UnsupportedError: a backend of `recorded` cannot be repeated.
    """
    inputs = Inputs.random(shape, size)
    cases = {
        name: PagedCase(shape, size, inputs, Seat(backend=name, kernels=kernels))
        for name in backends
    }
    calls: dict[str, Callable[[], torch.Tensor]] = {n: case.run for n, case in cases.items()}
    calls |= {RECORDED.format(name): cases[name].recorded() for name in recorded}
    peer = PEER if shape.mla is None else LATENT_PEER
    create_peer = _dense_peer if shape.mla is None else _latent_peer
    calls[peer] = create_peer(shape, size, inputs)
    outputs = {name: call().clone() for name, call in calls.items()}
    if recorded:
        calls = {SUMMED: cases[recorded[0]].sum_rows, **calls}
    seconds = {
        name: summary(found)
        for name, found in interleaved_seconds({**limits.calls, **calls}, rounds).items()
    }
    rates = limits.rates({name: seconds[name]["median_seconds"] for name in limits.calls})
    case = next(iter(cases.values()))
    rows = []
    for name in outputs:
        error = float((outputs[name] - outputs[peer]).abs().max())
        rows.append(_row(name, case, seconds[name], rates, error))
    return {
        "shape": shape.name,
        "context": size.context,
        "num_rows": size.num_rows,
        "num_streams": size.num_streams,
        "block_size": size.block_size,
        "num_layers": size.num_layers,
        "kv_cache_dtype": size.kv_cache_dtype,
        "limits": rates,
        "summed_bytes_per_second": _summed(case, seconds),
        "backends": [_checked(row, size) for row in rows],
    }


def _summed(case: PagedCase, seconds: dict[str, dict[str, float]]) -> float | None:
    return case.kv_bytes / seconds[SUMMED]["median_seconds"] if SUMMED in seconds else None


def _row(
    name: str,
    case: PagedCase,
    seconds: dict[str, float],
    limits: dict[str, float],
    error: float,
) -> dict[str, Any]:
    bytes_per_second = case.kv_bytes / seconds["median_seconds"]
    flops = case.flops / seconds["median_seconds"]
    return {
        "name": name,
        "max_abs_error": error,
        **seconds,
        "bytes_per_second": bytes_per_second,
        "flops": flops,
        "share_of_read": bytes_per_second / limits["read_bytes_per_second"],
        "share_of_gemm": flops / limits["gemm_flops"],
    }


def _checked(row: dict[str, Any], size: CaseSize) -> dict[str, Any]:
    """The row, without times where the output is wrong."""
    error = row["max_abs_error"]
    if error <= TOLERANCE or size.kv_cache_dtype not in ("auto", "float32"):
        return row
    return {key: value if key in ("name", "max_abs_error") else None for key, value in row.items()}


def _dense_peer(
    shape: AttentionShape, size: CaseSize, inputs: Inputs
) -> Callable[[], torch.Tensor]:
    """Torch's attention on a dense copy of the same numbers, for each layer its own."""
    key, value = inputs.rows.transpose(1, 2).chunk(2, dim=-1)  # [B, K, S, D]
    layers = [(key.contiguous(), value.contiguous()) for _ in range(size.num_layers)]
    query = inputs.query.view(size.num_streams, size.num_rows, shape.num_query_heads, -1)
    query = query.transpose(1, 2)  # [B, H, q, D]
    is_square = size.num_rows == size.context
    mask = None
    if size.num_rows > 1 and not is_square:
        ends = torch.arange(size.context - size.num_rows, size.context)
        mask = torch.arange(size.context) <= ends.unsqueeze(1)  # [q, S]

    def run() -> torch.Tensor:
        out = query
        with torch.inference_mode():
            for keys, values in layers:
                out = scaled_dot_product_attention(
                    query,
                    keys,
                    values,
                    attn_mask=mask,
                    is_causal=is_square and size.num_rows > 1,
                    enable_gqa=shape.num_query_heads != shape.num_kv_heads,
                )
        return out.transpose(1, 2).flatten(0, 1)

    return run


def _latent_peer(
    shape: AttentionShape, size: CaseSize, inputs: Inputs
) -> Callable[[], torch.Tensor]:
    """Latent decode as two products of torch, on dense rows; of one new row a sequence."""
    mla = shape.mla
    assert mla is not None, "called for latent rows"
    if size.num_rows != 1:
        raise ValueError(f"{size.num_rows} new rows; the latent peer decodes one")
    rank, unused = mla.kv_lora_rank, slice(mla.qk_nope_head_dim, mla.kv_lora_rank)
    query = inputs.query * shape.head_dim**-0.5  # [B, H, Dq]
    query[..., unused] = 0.0  # `PagedCase` lifts a narrow query with an identity
    layers = [inputs.rows[:, :, 0].clone() for _ in range(size.num_layers)]  # [B, S, W]

    def run() -> torch.Tensor:
        out = query
        with torch.inference_mode():
            for rows in layers:
                weights = torch.softmax(query @ rows.transpose(1, 2), dim=-1)
                out = weights @ rows[..., :rank]
        found: torch.Tensor = out[..., : mla.v_head_dim]
        return found

    return run


def measure_contexts(
    shape: AttentionShape,
    contexts: Sequence[int],
    *,
    num_rows: int = 1,
    num_streams: int = 1,
    block_size: int = 16,
    kv_cache_dtype: str = "auto",
    rounds: int,
    report: Callable[[str], object],
    backends: Sequence[str] | None = None,
    kernels: KernelChoice = "auto",
) -> list[dict[str, Any]]:
    """`measure_attention` over contexts; a prefill of more rows than a context is the whole of it.

    Args:
        shape: heads.
        contexts: tokens of the sequences, new rows included.
        num_rows: new rows of each sequence.
        num_streams: sequences.
        block_size: tokens of a block.
        kv_cache_dtype: of stored rows.
        rounds: times that each backend is run.
        report: told what is done.
        backends: names; None: `timed_backends()`.
        kernels: of the rank.
    """
    names = timed_backends() if backends is None else backends
    limits = Limits()
    found = []
    for context in contexts:
        rows = min(num_rows, context)
        report(f"{shape.name}: {num_streams} x {context} tokens, {rows} new")
        size = CaseSize(
            context=context,
            num_rows=rows,
            num_streams=num_streams,
            block_size=block_size,
            num_layers=num_layers_for(shape, context, num_streams) if rows == 1 else 1,
            kv_cache_dtype=kv_cache_dtype,
        )
        case = measure_attention(shape, size, rounds, limits, backends=names, kernels=kernels)
        found.append(case)
    return found
