"""A rank that loads needs memory for what it keeps, and little more, from every kind of file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig

from tests.support.gguf_files import Kind, write_gguf

ROOT = Path(__file__).parents[3]
BOUND = 1.2
LEAST_BYTES = 80_000_000
"""What a chunk takes does not grow with the model; below that it would show."""

SIZES: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_hidden_layers": 1,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
DENSE = LlamaConfig(**SIZES, intermediate_size=2816, rope_parameters=ROPE)
MIXTURE = GptOssConfig(
    **SIZES,
    intermediate_size=512,
    num_local_experts=8,
    num_experts_per_tok=2,
    rope_parameters=ROPE,
)
NOISE = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).to(torch.float16)


def noise(shape: torch.Size) -> torch.Tensor:
    return NOISE[: shape.numel()].view(shape).clone()


def parts_of(method: str, name: str, shape: torch.Size) -> dict[str, torch.Tensor]:
    """A tensor as it is stored: random, and of the right form."""
    if method == "mxfp4" and name.endswith(("gate_up_proj", "down_proj")):
        num_experts, m, n = shape
        generator = torch.Generator().manual_seed(1)
        grid = (num_experts, n, m // 32)
        blocks = torch.randint(0, 256, (*grid, 16), generator=generator, dtype=torch.uint8)
        return {f"{name}_blocks": blocks, f"{name}_scales": blocks[..., 0] % 8 + 120}
    return {name: noise(shape)}


def write(folder: Path, config: Any, method: str = "") -> Path:
    with torch.device("meta"):
        shapes = {
            name: tensor.shape
            for name, tensor in AutoModelForCausalLM.from_config(config).state_dict().items()
        }
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        tensors |= parts_of(method, name, shape)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    data = config.to_dict()
    data["architectures"] = [type(config).__name__.replace("Config", "ForCausalLM")]
    if method:
        data["quantization_config"] = {"quant_method": method}
    (folder / "config.json").write_text(json.dumps(data))
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_peak_while_loading_is_within_a_fifth_of_what_is_kept(tmp_path: Path) -> None:
    paths = {
        "float16": write(tmp_path / "dense", DENSE),
        "mxfp4": write(tmp_path / "mxfp4", MIXTURE, "mxfp4"),
    }
    paths["gguf"] = write_gguf(tmp_path / "m.gguf", paths["float16"], kind=Kind.F16)
    words = [sys.executable, "-m", "tests.support.load_peak", "float32", *map(str, paths.values())]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    found = dict(zip(paths, json.loads(done.stdout), strict=True))
    assert min(sizes["kept_bytes"] for sizes in found.values()) > LEAST_BYTES
    ratios = {name: sizes["peak_bytes"] / sizes["kept_bytes"] for name, sizes in found.items()}
    assert min(ratios.values()) > 0.95, f"the measure sees too little: {ratios}"
    assert max(ratios.values()) <= BOUND, ratios
