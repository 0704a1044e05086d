"""Sections of published checkpoints are read; other methods are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from heddle.errors import ModelFileError, UnsupportedError
from heddle.models.config_fields import Fields
from heddle.models.config_quantization import (
    METHODS,
    Quantization,
    named_method,
    read_quantization,
)


def read(section: dict[str, Any] | None, key: str = "quantization_config") -> Quantization | None:
    return read_quantization(Fields(Path("config.json"), {key: section}))


def scheme(**weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


def test_no_section_means_plain_weights() -> None:
    assert read(None) is None


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (
            {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
            },
            Quantization(method="fp8", block_shapes=((128, 128),)),
        ),
        ({"quant_method": "fbgemm_fp8"}, Quantization(method="fbgemm_fp8")),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "GEMM"},
            Quantization(method="awq", bits=4, group_size=128),
        ),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": 64},
            Quantization(method="awq", bits=4, group_size=64),
        ),
        (
            {"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": True},
            Quantization(method="gptq", bits=8, adds_one_to_zeros=True),
        ),
        (
            {
                "quant_method": "gptq",
                "bits": 2,
                "group_size": 32,
                "checkpoint_format": "gptq_v2",
                "dynamic": {"-:.*gate.*": {}},
            },
            Quantization(method="gptq", bits=2, group_size=32),
        ),
        ({"quant_method": "mxfp4"}, Quantization(method="mxfp4", bits=4)),
        (
            scheme(num_bits=4, type="int", strategy="group", group_size=128),
            Quantization(method="compressed-tensors", widths=(4,), block_shapes=((1, 128),)),
        ),
        (
            scheme(num_bits=8, type="float", strategy="block", block_structure=[128, 64]),
            Quantization(method="compressed-tensors", block_shapes=((128, 64),)),
        ),
        (
            scheme(num_bits=8, type="float", strategy="channel"),
            Quantization(method="compressed-tensors"),
        ),
    ],
)
def test_known_sections(section: dict[str, Any], expected: Quantization) -> None:
    assert read(section) == expected


def test_the_old_key_of_compressed_tensors_is_read() -> None:
    section = scheme(num_bits=8, type="int", strategy="channel")
    del section["quant_method"]
    expected = Quantization(method="compressed-tensors", widths=(8,))
    assert read(section, "compression_config") == expected
    fields = Fields(Path("config.json"), {"compression_config": section})
    assert named_method(fields) == "compressed-tensors"


def test_each_group_states_its_width() -> None:
    groups = {
        "a": {"weights": {"num_bits": 4, "type": "int"}},
        "b": {"weights": {"num_bits": 8, "type": "int"}},
        "c": {"weights": {"num_bits": 8, "type": "float"}},
        "d": {"weights": {"num_bits": 4, "type": "int"}},
    }
    section = {"quant_method": "compressed-tensors", "config_groups": groups}
    found = read(section)
    assert found is not None
    assert found.widths == (4, 8)
    del groups["b"]["weights"]["num_bits"]  # then a tensor may have any
    found = read(section)
    assert found is not None
    assert set(found.widths) == {2, 4, 8}


def test_the_method_is_named_whether_it_is_read_or_not() -> None:
    path = Path("config.json")
    assert named_method(Fields(path, {})) is None
    assert named_method(Fields(path, {"quantization_config": {"quant_method": "hqq"}})) == "hqq"
    with pytest.raises(ModelFileError, match="quant_method is missing"):
        named_method(Fields(path, {"quantization_config": {}}))


@pytest.mark.parametrize("method", ["bitsandbytes", "hqq", "quanto", "torchao", "eetq", "exl2"])
def test_other_methods_are_refused_with_a_way_out(method: str) -> None:
    with pytest.raises(
        UnsupportedError, match=rf"quantization_config\.quant_method='{method}'.*save it in 16 bit"
    ) as caught:
        read({"quant_method": method, "load_in_4bit": True})
    assert all(known in str(caught.value) for known in METHODS)


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"quant_method": "fp8", "fmt": "e5m2"}, r"fmt='e5m2'.*e4m3"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, r"version='gemv'.*gemm"),
        ({"quant_method": "awq", "bits": 8}, r"bits=8 .*4 is read"),
        ({"quant_method": "gptq", "bits": 3}, r"bits=3 .*2, 4 and 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin.*gptq_v2"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format"),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down.*": {"bits": 8}}},
            "one width and group size",
        ),
        (scheme(num_bits=4, type="float", strategy="channel"), r"num_bits=4 .*floats of 8"),
        (scheme(num_bits=3, type="int", strategy="channel"), r"num_bits=3 .*2, 4 or 8"),
        (scheme(num_bits=8, type="int", strategy="token"), "strategy='token'"),
        (
            scheme(num_bits=8) | {"format": "nvfp4-pack-quantized"},
            r"quantization_config\.format='nvfp4-pack-quantized'.*pack-quantized",
        ),
        (scheme(num_bits=8) | {"quantization_status": "frozen"}, "stored compressed"),
        (
            scheme(num_bits=8) | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            r"sparsity_config\.format='sparse-24",
        ),
        (
            scheme(num_bits=8) | {"transform_config": {"config_groups": {"u": {"type": "h"}}}},
            "transform_config is not supported",
        ),
    ],
)
def test_variants_that_are_not_read_are_named(section: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        read(section)


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"bits": 4}, "quant_method is missing"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "two sizes"),
        ({"quant_method": "awq", "bits": "4"}, "bits='4'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size=0"),
        (scheme(num_bits=8, strategy="block", block_structure=[1]), "block_structure"),
    ],
)
def test_malformed_sections_are_named(section: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelFileError, match=text):
        read(section)
