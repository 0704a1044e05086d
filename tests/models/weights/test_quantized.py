"""A model whose projections are quantised equals the model of the plain numbers, cut or whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from heddle.comm.base import Communicator
from heddle.comm.solo import SoloCommunicator
from heddle.models.base import RowInputs
from heddle.models.config_json import load_model_config
from heddle.models.registry import create_model
from heddle.models.weights.open import open_weights
from tests.support.checkpoints import CPU, head_layout, run_tp
from tests.support.comparison import POSITIONS, TOKEN_IDS
from tests.support.quantized_files import awq, compressed, fp8, gptq, write_quantized
from tests.support.tiny import DenseAttention

CASES = {
    "fp8": ("deepseek-v3", fp8((16, 32)), {}),
    "awq": ("mixtral", awq(24), {22: 24}),
    "gptq": ("llama-8-2", gptq(4, 32, acts_in_order=False), {100: 96}),
    "compressed-int4": (
        "qwen3-moe",
        compressed("pack-quantized", num_bits=4, type="int", strategy="channel", symmetric=False),
        {},
    ),
    "compressed-int8": (
        "llama-8-2",
        compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
        {},
    ),
    "mxfp4": ("gpt-oss", ({"quant_method": "mxfp4"}, None), {72: 64, 22: 32, 44: 64}),
}


def logits(path: Path, tp_rank: int, tp_size: int, tp: Communicator) -> torch.Tensor:
    config = load_model_config(path)
    heads = head_layout(config, tp_size)
    model = create_model(config, heads, tp_rank, open_weights(path), torch.float32, CPU, tp)
    rows = RowInputs(TOKEN_IDS, POSITIONS, torch.full_like(POSITIONS, 40))
    with torch.inference_mode():
        return model.logits(model.forward(rows, DenseAttention(config)))


@pytest.mark.parametrize("name", CASES)
def test_a_quantised_model_equals_its_plain_numbers(
    checkpoint: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    family, (config, write), sizes = CASES[name]
    quantised, plain = write_quantized(tmp_path, checkpoint(family), config, write, sizes)
    expected = logits(plain, 0, 1, SoloCommunicator())
    bound = 1e-5 * float(expected.abs().max())
    assert expected.std() > 1000 * bound
    assert (logits(quantised, 0, 1, SoloCommunicator()) - expected).abs().max() <= bound
    for found in run_tp(2, lambda rank, tp: logits(quantised, rank, 2, tp)):
        assert (found - expected).abs().max() <= bound
