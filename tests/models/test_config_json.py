"""Known architectures are read, unknown ones refused by name, repository code never run."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from heddle.errors import ModelFileError, UnsupportedError
from heddle.models.config_json import ARCHITECTURES, load_model_config
from tests.support.gguf_files import write_gguf
from tests.support.model_files import DEEPSEEK_V3, LLAMA, write_config


def test_the_closed_list() -> None:
    assert set(ARCHITECTURES) == {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
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


def test_quantised_checkpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"quantization_config=.*fp8.*16 or 32 bit"):
        load_model_config(write_config(tmp_path, LLAMA, quantization_config={"method": "fp8"}))


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
