"""What is kept of a file is, bit for bit, what the library makes of it."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from heddle.kernels.linear.base import PackedPart
from heddle.kernels.linear.quantized import BytePanels, NibblePanels
from heddle.models.weights.ggml_blocks import place_blocks
from tests.support.gguf_files import Kind

ROWS, COLS = 37, 512


def stored(kind: Kind) -> np.ndarray:
    """`[n, blocks, bytes]`; the library reads Q4_K and writes none, but any bytes are a block."""
    rng = np.random.default_rng(3)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if kind == Kind.Q4_K:
        # Bytes below 0x3c keep half-precision scales finite.
        return rng.integers(0, 0x3C, size=(ROWS, COLS // block, block_bytes), dtype=np.uint8)
    rows = gguf.quantize(rng.normal(size=(ROWS, COLS)).astype(np.float32), kind)
    return rows.reshape(ROWS, COLS // block, block_bytes)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q8_0])
def test_kept_numbers_are_the_librarys(kind: Kind) -> None:
    blocks = stored(kind)
    block = COLS // blocks.shape[1]
    weight: BytePanels | NibblePanels
    if kind == Kind.Q8_0:
        weight = BytePanels.zeros(ROWS, COLS, 32)
    else:
        weight = NibblePanels.zeros(ROWS, COLS, is_half=kind != Kind.Q4_K)
    whole = PackedPart.whole(weight, kind.name)
    for rows in ((5, ROWS), (0, 5)):
        for cols in ((0, block), (block, COLS)):
            part = blocks[slice(*rows), cols[0] // block : cols[1] // block]
            place_blocks(whole[slice(*rows), slice(*cols)], part)
    expected = gguf.dequantize(blocks.reshape(ROWS, -1), kind)
    assert np.abs(expected).max() > 0
    assert torch.equal(weight.matrix().t(), torch.from_numpy(expected))
