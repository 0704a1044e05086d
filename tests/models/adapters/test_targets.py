"""What takes adapters is found in the model itself; the rest is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from heddle.errors import ModelFileError, UnsupportedError
from heddle.models.adapters.folder import AdapterFolder
from heddle.models.adapters.slots import AdapterSite
from heddle.models.adapters.targets import check_targets, find_sites
from heddle.models.config_json import load_model_config
from heddle.models.weights.memory import HeaderSource
from heddle.models.weights.open import open_weights
from tests.support.adapters import linear_modules, low_rank, save_adapter
from tests.support.tiny import build_tiny


def sites_of(folder: Path, name: str) -> dict[str, AdapterSite]:
    path = build_tiny(folder, name)
    return find_sites(load_model_config(path), HeaderSource(open_weights(path)))


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("llama-bias", set()),
        ("phi3", set()),
        ("glm4", set()),
        ("deepseek-v3", {"kv_b_proj"}),
        ("qwen2-moe", {"shared_expert_gate"}),
        ("bamba", {"in_proj"}),
    ],
)
def test_every_linear_module_is_a_target_but_these(
    tmp_path: Path, name: str, left: set[str]
) -> None:
    sites = sites_of(tmp_path, name)
    linear = linear_modules(name)
    assert len(linear) > 5
    assert set(sites) <= set(linear)
    assert {module.rpartition(".")[2] for module in linear if module not in sites} == left


def test_an_adapter_of_another_shape_rank_or_module_is_refused(tmp_path: Path) -> None:
    sites = sites_of(tmp_path, "deepseek-v3")
    module = "model.layers.0.self_attn.o_proj"
    outputs, inputs = sites[module].num_outputs, sites[module].num_inputs

    def check(name: str, *shape: int) -> None:
        folder = save_adapter(tmp_path / "adapter", low_rank(name, *shape))
        with AdapterFolder(folder) as adapter:
            check_targets(adapter, sites, max_rank=2)

    check(module, outputs, inputs)
    with pytest.raises(ModelFileError, match=rf"\({outputs}, 3\); this model's has"):
        check(module, outputs, 3)
    with pytest.raises(UnsupportedError, match=r"rank 3; max_lora_rank is 2 \(nearest: .* 3\)"):
        check(module, outputs, inputs, 3)
    for name, message in (
        ("model.layers.0.self_attn.kv_b_proj", "either side of the softmax"),
        ("model.layers.1.mlp.experts.0.up_proj", "routed experts"),
        ("model.embed_tokens", "the embedding"),
        ("lm_head", "the output matrix"),
        ("model.layers.0.self_attn.o_prj", rf"nearest: {module}"),
    ):
        with pytest.raises(UnsupportedError, match=message) as refusal:
            check(name, 4, 4)
        assert name in str(refusal.value)
