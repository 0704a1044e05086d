"""Known architectures are read, unknown ones refused by name, repository code never run."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from heddle.config.overrides import overrides_text
from heddle.errors import ConfigError, ModelFileError, UnsupportedError
from heddle.models.config_json import ARCHITECTURES, load_model_config
from tests.support.gguf_files import write_gguf
from tests.support.model_files import DEEPSEEK_V3, LLAMA, write_config


def test_the_closed_list() -> None:
    assert set(ARCHITECTURES) == {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "GraniteForCausalLM",
        "SmolLM3ForCausalLM",
        "Phi3ForCausalLM",
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
        "Exaone4ForCausalLM",
        "GlmForCausalLM",
        "Glm4ForCausalLM",
        "MixtralForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "GptOssForCausalLM",
        "Llama4ForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "Qwen3NextForCausalLM",
        "BambaForCausalLM",
        "MiniMaxForCausalLM",
        "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GlmMoeDsaForCausalLM",
        "OlmoeForCausalLM",
        "MiniMaxM2ForCausalLM",
    }


def test_an_unknown_architecture_names_itself_and_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="Phi9ForCausalLM") as caught:
        load_model_config(write_config(tmp_path, LLAMA, architectures=["Phi9ForCausalLM"]))
    assert all(name in str(caught.value) for name in ARCHITECTURES)
    assert "auto_map" not in str(caught.value)


def test_code_of_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    config = {"architectures": ["Phi9ForCausalLM"], "auto_map": {"AutoConfig": "x.Y"}}
    with pytest.raises(UnsupportedError, match=r"Phi9ForCausalLM.*auto_map, is never run"):
        load_model_config(write_config(tmp_path, LLAMA, **config))


def test_code_of_a_known_architecture_is_ignored_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        load_model_config(write_config(tmp_path, DEEPSEEK_V3))
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/config.json: auto_map is ignored; DeepseekV3ForCausalLM is built in"
    ]


def test_forms_of_weights_that_are_not_read_are_refused(tmp_path: Path) -> None:
    section = {"quant_method": "bitsandbytes"}
    with pytest.raises(UnsupportedError, match=r"quant_method='bitsandbytes' .*16 bit"):
        load_model_config(write_config(tmp_path, LLAMA, quantization_config=section))


def test_generation_config_comes_first_among_eos_ids(tmp_path: Path) -> None:
    write_config(tmp_path, LLAMA, eos_token_id=128001)
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [128009, 128001]}))
    assert load_model_config(tmp_path).eos_token_ids == (128009, 128001)
    generation.write_text(json.dumps({"eos_token_id": "x"}))
    with pytest.raises(ModelFileError, match=r"generation_config\.json: eos_token_id='x'"):
        load_model_config(tmp_path)


def test_a_folder_without_config_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"no config\.json; .*\.gguf file"):
        load_model_config(tmp_path)


def test_a_gguf_path_is_read_from_its_header(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", checkpoint("qwen3"))
    assert load_model_config(str(path)).architecture == "Qwen3ForCausalLM"


@pytest.mark.parametrize("name", ["llama-9-3", "qwen2", "mistral", "deepseek-v2", "deepseek-v3"])
def test_what_transformers_writes_is_read(checkpoint: Callable[[str], Path], name: str) -> None:
    """The installed transformers writes the new spelling; sizes come from the builder's table."""
    config = load_model_config(checkpoint(name))
    assert config.vocab_size == 131
    assert config.eos_token_ids == (2,)
    assert config.max_position_embeddings == 512
    assert config.rope.theta == 10000.0


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 131072,
}


def test_overrides_stand_in_for_values_of_the_file(tmp_path: Path) -> None:
    path = write_config(tmp_path, LLAMA)
    given = {"rope_parameters": YARN, "max_position_embeddings": 524288, "bos_token_id": None}
    config = load_model_config(path, overrides_text(given))
    assert config.max_position_embeddings == 524288
    assert (config.rope.rope_type, config.rope.theta) == ("yarn", 500000.0)
    assert config.bos_token_id is None
    merged = write_config(tmp_path, LLAMA, **given)
    assert load_model_config(merged) == config


def test_nested_overrides_keep_their_neighbours(tmp_path: Path) -> None:
    path = write_config(
        tmp_path, LLAMA, rope_parameters={"rope_theta": 7e5, "rope_type": "default"}
    )
    rope = load_model_config(path, overrides_text({"rope_parameters": YARN})).rope
    assert (rope.rope_type, rope.theta, rope.factor) == ("yarn", 7e5, 4.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_position_embedding": 9}, r"max_position_embedding .*nearest: max_position_embed"),
        ({"rope_parameters": {"rope_type": "default", "factor": 2}}, r"rope_parameters\.factor is"),
        ({"moe": {}}, "moe is not read"),
    ],
)
def test_an_override_that_nobody_reads_is_refused(
    tmp_path: Path, given: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^hf_overrides: {message}"):
        load_model_config(write_config(tmp_path, LLAMA), overrides_text(given))


def test_a_wrong_override_is_told_from_a_wrong_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"config\.json with hf_overrides: vocab_size='x'"):
        load_model_config(write_config(tmp_path, LLAMA), overrides_text({"vocab_size": "x"}))
    with pytest.raises(ConfigError, match=r"change a config\.json"):
        load_model_config(tmp_path / "a.gguf", overrides_text({"vocab_size": 3}))
