"""A folder is read as PEFT wrote it, or refused by the name of what is not built."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from heddle.errors import ModelFileError, UnsupportedError
from heddle.models.adapters.folder import AdapterFolder, LowRank
from tests.support.adapters import low_rank, save_adapter, write_adapter

ONE = low_rank("m.q_proj", 6, 5)


def test_modules_have_shapes_ranks_and_scales(tmp_path: Path) -> None:
    tensors = ONE | low_rank("m.k_proj", 3, 5, rank=9)
    plain = save_adapter(tmp_path / "a", tensors, r=2, lora_alpha=6)
    stable = save_adapter(tmp_path / "b", tensors, lora_alpha=6, use_rslora=True)
    own = save_adapter(tmp_path / "c", tensors, lora_alpha=6, alpha_pattern={"k_proj": 18})
    for folder, scales in ((plain, (3, 6 / 9)), (stable, (6 / 2**0.5, 2)), (own, (3, 2))):
        with AdapterFolder(folder) as adapter:
            assert adapter.modules == {
                "m.q_proj": LowRank(rank=2, num_inputs=5, num_outputs=6, scale=scales[0]),
                "m.k_proj": LowRank(rank=9, num_inputs=5, num_outputs=3, scale=scales[1]),
            }


def test_slices_are_those_of_the_file(tmp_path: Path) -> None:
    with AdapterFolder(save_adapter(tmp_path, ONE)) as adapter:
        assert torch.equal(adapter.down("m.q_proj", (1, 4)), ONE["m.q_proj.lora_A"][:, 1:4])
        assert torch.equal(adapter.up("m.q_proj", (2, 6)), ONE["m.q_proj.lora_B"][2:6])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "LOHA"}, "only LORA"),
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "replaces whole weights"),
        ({"trainable_token_indices": [3]}, "rows of the embedding"),
        ({"target_parameters": ["experts"]}, "fused experts"),
        ({"alora_invocation_tokens": [1]}, "middle of a prompt"),
        ({"layer_replication": [[0, 2]]}, "number of layers"),
        ({"lora_bias": True}, "biases"),
        ({"bias": "lora_only"}, "biases"),
        ({"fan_in_fan_out": True}, "not known here"),
        ({"use_new_thing": 1}, "not known here"),
        ({"init_lora_weights": "pissa"}, "changes the weights of the model"),
        ({"alpha_pattern": {"q.*(": 3}}, "only plain names"),
    ],
)
def test_what_is_not_built_is_refused_by_its_name(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    folder = save_adapter(tmp_path, ONE, **settings)
    with pytest.raises(UnsupportedError, match=message) as refusal:
        AdapterFolder(folder)
    assert f"adapter_config.json: {next(iter(settings))}=" in str(refusal.value)


def test_settings_that_are_off_or_of_training_are_no_reason(tmp_path: Path) -> None:
    settings = {"use_dora": False, "modules_to_save": None, "use_new_thing": []}
    with AdapterFolder(save_adapter(tmp_path, ONE, lora_dropout=0.1, **settings)) as adapter:
        assert len(adapter.modules) == 1


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ({}, ModelFileError, "holds no tensor"),
        ({"m.lora_A": torch.ones(2, 3)}, ModelFileError, r"shapes \(2, 3\) and None"),
        (
            {"m.lora_A": torch.ones(2, 3), "m.lora_B": torch.ones(4, 3)},
            ModelFileError,
            r"shapes \(2, 3\) and \(4, 3\)",
        ),
        (
            {"m.lora_A": torch.ones(0, 3), "m.lora_B": torch.ones(4, 0)},
            ModelFileError,
            "none is 0",
        ),
        (ONE | {".base_model.model.m.lora_magnitude_vector": torch.ones(3)}, UnsupportedError,
         "magnitude_vector is not lora_A"),
        (ONE | {".base_model.model.lm_head.weight": torch.ones(3)}, UnsupportedError, "lm_head"),
        ({".m.lora_A.weight": torch.ones(2, 2)}, UnsupportedError, "under base_model.model."),
        (
            {"m.lora_A": torch.ones(2, 3).int(), "m.lora_B": torch.ones(4, 2).int()},
            UnsupportedError,
            "stored as I32",
        ),
    ],
)  # fmt: skip
def test_other_tensors_are_refused_with_their_name(
    tmp_path: Path, tensors: dict[str, torch.Tensor], error: type[Exception], message: str
) -> None:
    folder = save_adapter(tmp_path, tensors)
    with pytest.raises(error, match=message) as refusal:
        AdapterFolder(folder)
    assert "adapter_model.safetensors" in str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"r": 8}, "have rank 2; adapter_config.json says 8"),
        ({"rank_pattern": {"q_proj": 3}}, "have rank 2; adapter_config.json says 3"),
        ({"rank_pattern": {"q.proj": 3}}, "have rank 2; adapter_config.json says 3"),
        ({"r": 0}, "r=0 is not legal"),
        ({"r": None}, "r is missing"),
        ({"rank_pattern": [1]}, "an object was expected"),
    ],
)
def test_ranks_are_those_of_the_configuration(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFileError, match=message):
        AdapterFolder(save_adapter(tmp_path, ONE, **settings))


@pytest.mark.parametrize(
    ("part", "value", "alpha"),
    [("lora_A", "nan", 4), ("lora_B", "inf", 4), ("lora_B", "1e38", 40), ("lora_A", "1", 1e300)],
)
def test_numbers_without_end_are_found(tmp_path: Path, part: str, value: str, alpha: float) -> None:
    tensors = {name: tensor.clone() for name, tensor in ONE.items()}
    with AdapterFolder(save_adapter(tmp_path / "good", tensors)) as adapter:
        adapter.check_numbers()
    tensors[f"m.q_proj.{part}"][1, 1] = float(value)
    with (
        AdapterFolder(save_adapter(tmp_path / "bad", tensors, lora_alpha=alpha)) as adapter,
        pytest.raises(ModelFileError, match=r"m\.q_proj\.lora_A, lora_B hold NaN or inf"),
    ):
        adapter.check_numbers()


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "adapter_config.json")
    with pytest.raises(ModelFileError, match="is not a file"):
        AdapterFolder(tmp_path)


def test_a_pickle_is_never_read_and_damage_is_told(tmp_path: Path) -> None:
    folder = save_adapter(tmp_path, ONE)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-3])
    with pytest.raises(ModelFileError, match="not a whole safetensors file"):
        AdapterFolder(folder)
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(ModelFileError, match=r"adapter_model\.bin is never read"):
        AdapterFolder(folder)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(ModelFileError, match=r"adapter_config\.json: cannot be read"):
        AdapterFolder(folder)


def test_a_folder_of_the_library_itself_is_read(tmp_path: Path) -> None:
    modules = ["model.layers.0.self_attn.q_proj"]
    folder = write_adapter(tmp_path, "llama-6-2", modules, 1, r=4, rank_pattern={"q_proj": 6})
    with AdapterFolder(folder) as adapter:
        (low,) = adapter.modules.values()
    assert (low.rank, low.scale) == (6, 7 / 6)
