"""Numbers, scales and offsets of GGML's quantised blocks, for weights that are kept as they are.

    kind    inputs  bytes                                         w
    Q4_0    32      d f16, 16 x 2 nibbles                         d (q - 8)
    Q4_1    32      d f16, m f16, 16 x 2 nibbles                  d q + m
    Q8_0    32      d f16, 32 int8                                d q
    Q4_K    256     d f16, e f16, 8 x (s, t) of 6 bits, nibbles   d s q - e t, per 32 inputs

Products of two stored numbers have few enough digits for float32, so nothing is rounded here: what
a kernel multiplies is what the library's reader gives.

Source: the formats of ggml, as the `gguf` package reads them.
"""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import torch

from heddle.kernels.linear.base import PackedPart
from heddle.kernels.linear.quantized import BLOCK, BytePanels, NibblePanels

Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]


def place_blocks(target: PackedPart, blocks: Bytes) -> None:
    """Fill a range of a packed weight.

    Args:
        target: of the kind of the blocks.
        blocks: `[n, blocks, bytes of a block]`.
    """
    weight, first, start = target.weight, target.outputs[0], target.inputs[0]
    if target.kind == "Q8_0":
        assert isinstance(weight, BytePanels), "made for this kind"
        numbers = torch.from_numpy(blocks[..., 2:].view(np.int8))
        weight.place(first, numbers, torch.from_numpy(_halves(blocks, 0, 1)[..., 0]), start)
        return
    assert isinstance(weight, NibblePanels), "made for this kind"
    q, d, m = (torch.from_numpy(np.ascontiguousarray(p)) for p in _NIBBLES[target.kind](blocks))
    weight.place(first, q, d, m, start)


def _halves(blocks: Bytes, first: int, count: int) -> _Floats:
    """float16 numbers of each block, from a byte on."""
    part = np.ascontiguousarray(blocks[..., first : first + 2 * count])
    return part.view(np.float16).astype(np.float32)


def _low_then_high(packed: Bytes) -> Bytes:
    """16 bytes -> 32 numbers: their low halves, then their high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _q4_0(blocks: Bytes) -> tuple[Bytes, _Floats, _Floats]:
    scales = _halves(blocks, 0, 1)[..., 0]
    return _low_then_high(blocks[..., 2:]), scales, -8 * scales


def _q4_1(blocks: Bytes) -> tuple[Bytes, _Floats, _Floats]:
    pairs = _halves(blocks, 0, 2)
    return _low_then_high(blocks[..., 4:]), pairs[..., 0], pairs[..., 1]


def _q4_k(blocks: Bytes) -> tuple[Bytes, _Floats, _Floats]:
    """Superblocks of 8 blocks."""
    rows, count, _ = blocks.shape
    pairs = _halves(blocks, 0, 2)
    packed = np.ascontiguousarray(blocks[..., 4:16]).reshape(rows * count, 12)
    scales, offsets = gguf.quants.Q4_K.get_scale_min(packed)
    shape = (rows, count * 8)
    numbers = _low_then_high(blocks[..., 16:].reshape(rows, count * 4, BLOCK))
    return (
        numbers.reshape(*shape, BLOCK),
        (pairs[..., :1] * scales.reshape(rows, count, 8).astype(np.float32)).reshape(shape),
        (-pairs[..., 1:] * offsets.reshape(rows, count, 8).astype(np.float32)).reshape(shape),
    )


_NIBBLES = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}
