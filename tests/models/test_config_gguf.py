"""A converted checkpoint reads as the original does."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from heddle.config.model import RopeConfig
from heddle.config.visibility import Visibility
from heddle.errors import ModelFileError, UnsupportedError
from heddle.models.config_gguf import read_gguf_config
from heddle.models.config_json import load_model_config
from tests.support.gguf_files import write_gguf

Checkpoint = Callable[[str], Path]


@pytest.mark.parametrize("name", ["llama-9-3", "llama-bias", "qwen2", "qwen3"])
def test_equal_to_the_original(checkpoint: Checkpoint, tmp_path: Path, name: str) -> None:
    expected = load_model_config(checkpoint(name))
    found = read_gguf_config(write_gguf(tmp_path / "m.gguf", checkpoint(name)))
    assert found.rms_norm_eps == pytest.approx(expected.rms_norm_eps, rel=1e-6)
    assert found.eos_token_ids == (2, 5)  # end of turn joins end of sequence
    same = replace(found, rms_norm_eps=expected.rms_norm_eps, eos_token_ids=(2,))
    assert same == expected


def test_vocabulary_size_may_be_stated(checkpoint: Checkpoint, tmp_path: Path) -> None:
    fields = {"vocab_size": 200, "attention.sliding_window": 64}
    path = write_gguf(tmp_path / "m.gguf", checkpoint("qwen2"), extra_fields=fields)
    assert read_gguf_config(path).vocab_size == 200
    config = read_gguf_config(path)
    assert {kind.visibility for kind in config.layer_kinds} == {Visibility("window", 64)}
    assert len(config.layer_kinds) == config.num_layers


def test_an_unknown_architecture_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", checkpoint("qwen2"), architecture="gemma9")
    with pytest.raises(UnsupportedError, match=r"'gemma9' .*llama, qwen2, qwen3"):
        read_gguf_config(path)


@pytest.mark.parametrize("key", ["rope.dimension_count", "attention.value_length"])
def test_uneven_widths_are_refused(checkpoint: Checkpoint, tmp_path: Path, key: str) -> None:
    path = tmp_path / "m.gguf"
    if key == "attention.value_length":
        write_gguf(path, checkpoint("qwen2"), value_length=4)
    else:
        write_gguf(path, checkpoint("qwen2"), extra_fields={key: 4})
    with pytest.raises(UnsupportedError, match=rf"qwen2\.{key}=4 is not supported; it must be 8"):
        read_gguf_config(path)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rope.scaling.type": "none"}, RopeConfig()),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
            RopeConfig(rope_type="linear", factor=2.0),
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
            },
            RopeConfig(rope_type="yarn", factor=4.0, original_max_position_embeddings=128),
        ),
    ],
)
def test_scaling_kinds(
    checkpoint: Checkpoint, tmp_path: Path, fields: dict[str, object], expected: RopeConfig
) -> None:
    path = write_gguf(tmp_path / "m.gguf", checkpoint("qwen2"), extra_fields=fields)
    assert read_gguf_config(path).rope == expected


def test_an_unknown_scaling_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    fields = {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}
    path = write_gguf(tmp_path / "m.gguf", checkpoint("qwen2"), extra_fields=fields)
    with pytest.raises(UnsupportedError, match=r"longrope.*none, linear, yarn"):
        read_gguf_config(path)


def divisors(theta: float, width: int, factor: float) -> np.ndarray:
    """The converter's rule: 1 for waves below 2,048, `factor` above 8,192, a blend in between."""
    found = []
    for pair in range(width // 2):
        wave = 2 * math.pi * theta ** (2 * pair / width)
        if wave < 8192 / 4:
            found.append(1.0)
        elif wave > 8192 / 1:
            found.append(factor)
        else:
            smooth = (8192 / wave - 1) / (4 - 1)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, dtype=np.float32)


THETA = 500000.0  # width 8: waves of 6, 167, 4,443 and 118,000 tokens


def write_with_divisors(path: Path, checkpoint: Path, values: np.ndarray) -> Path:
    extra = {"rope_freqs.weight": values}
    return write_gguf(path, checkpoint, extra_tensors=extra, rope_theta=THETA)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_its_divisors(
    checkpoint: Checkpoint, tmp_path: Path, factor: float
) -> None:
    values = divisors(THETA, 8, factor)
    assert values[0] == values[1] == 1 < values[2] < values[3] == factor
    rope = read_gguf_config(
        write_with_divisors(tmp_path / "m.gguf", checkpoint("llama-8-2"), values)
    ).rope
    assert rope == RopeConfig(
        theta=THETA,
        rope_type="llama3",
        factor=factor,
        original_max_position_embeddings=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )


def test_divisors_of_one_change_nothing(checkpoint: Checkpoint, tmp_path: Path) -> None:
    ones = np.ones(4, dtype=np.float32)
    path = write_with_divisors(tmp_path / "m.gguf", checkpoint("llama-8-2"), ones)
    assert read_gguf_config(path).rope == RopeConfig(theta=THETA)


def test_other_divisors_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    values = divisors(THETA, 8, 8.0)
    values[2] *= 1.01
    path = write_with_divisors(tmp_path / "m.gguf", checkpoint("llama-8-2"), values)
    with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight is not the Llama 3"):
        read_gguf_config(path)


def test_divisors_of_another_width_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    values = divisors(THETA, 16, 8.0)
    path = write_with_divisors(tmp_path / "m.gguf", checkpoint("llama-8-2"), values)
    with pytest.raises(
        ModelFileError, match=r"rope_freqs\.weight .*\(8,\); .*\(4,\) were expected"
    ):
        read_gguf_config(path)


def test_an_odd_head_width_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    fields = {"attention.key_length": 7}
    path = write_gguf(tmp_path / "m.gguf", checkpoint("qwen2"), extra_fields=fields)
    with pytest.raises(ModelFileError, match="head width 7 must be even"):
        read_gguf_config(path)


def test_a_part_of_a_split_file_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", checkpoint("qwen2"), num_parts=3)
    with pytest.raises(UnsupportedError, match=r"split\.count=3 .*--merge"):
        read_gguf_config(path)


def test_windows_of_olmo_3_are_refused_under_the_name_of_olmo_2(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    fields = {"attention.sliding_window": 16}
    path = write_gguf(tmp_path / "m.gguf", checkpoint("olmo2"), extra_fields=fields)
    with pytest.raises(UnsupportedError, match=r"sliding_window=16 .*OLMo 2 has none"):
        read_gguf_config(path)


def test_the_multipliers_of_granite_are_read(checkpoint: Checkpoint, tmp_path: Path) -> None:
    found = read_gguf_config(write_gguf(tmp_path / "m.gguf", checkpoint("granite")))
    assert found.embedding_scale == pytest.approx(1.7)
    assert found.attention_scale == pytest.approx(0.21)
    assert found.residual_factors.attention.block == pytest.approx(0.6)
    assert found.logits_scale == pytest.approx(1 / 0.4)
