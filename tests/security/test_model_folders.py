"""A model folder is data: whatever lies in it, none of it is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from heddle import LLM
from heddle.config.sampling import SamplingParams
from heddle.engine.tokenizer import load_tokenizer
from heddle.errors import HeddleError, ModelFileError, UnsupportedError
from heddle.models.config_json import load_model_config
from heddle.models.weights.open import open_weights
from tests.security.gadgets import gadgets
from tests.support.byte_tokenizer import TEMPLATE, printable, save_folder
from tests.support.tiny import build_tiny

CODE = """
from pathlib import Path
Path({path!r}).touch()
class Model: pass
Config = Tokenizer = Model
"""


@pytest.fixture
def folder(tmp_path: Path, trap: Path) -> Path:
    """A good model beside code that makes a file when it is imported."""
    path = build_tiny(tmp_path, "llama-8-2")
    save_folder(path, printable(), eos_token="<|end|>", chat_template=TEMPLATE)
    for name in ("code", "modeling_x", "configuration_x", "tokenization_x", "__init__", "setup"):
        (path / f"{name}.py").write_text(CODE.format(path=str(trap)))
    return path


def change(file: Path, **fields: Any) -> None:
    data = json.loads(file.read_text())
    file.write_text(json.dumps({**data, **fields}))


MAPS = {
    "AutoConfig": "configuration_x.Config",
    "AutoModel": "modeling_x.Model",
    "AutoModelForCausalLM": "modeling_x.Model",
    "AutoTokenizer": ["tokenization_x.Tokenizer", None],
}


def test_a_known_architecture_runs_our_own_class(folder: Path) -> None:
    change(folder / "config.json", auto_map=MAPS)
    change(folder / "tokenizer_config.json", auto_map=MAPS, tokenizer_class="Tokenizer")
    with LLM(str(folder), num_gpu_blocks_override=20) as llm:
        (output,) = llm.generate(["ab"], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 2


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
def test_an_unknown_architecture_is_refused(folder: Path, model_impl: Any) -> None:
    change(
        folder / "config.json",
        auto_map=MAPS,
        architectures=["LoomForCausalLM"],
        model_type="loom",
    )
    with pytest.raises((UnsupportedError, ModelFileError)):
        LLM(str(folder), num_gpu_blocks_override=20, model_impl=model_impl)


def test_layers_of_transformers_are_its_own(folder: Path) -> None:
    change(folder / "config.json", auto_map=MAPS)
    assert load_model_config(folder, model_impl="transformers").foreign is not None
    with LLM(str(folder), num_gpu_blocks_override=20, model_impl="transformers") as llm:
        (output,) = llm.generate(["ab"], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 2


def test_a_tokenizer_of_its_own_code_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    change(folder / "tokenizer_config.json", auto_map=MAPS, tokenizer_class="Tokenizer")
    with pytest.raises((ModelFileError, UnsupportedError), match="tokenizer"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize(
    "name",
    [
        *("model.safetensors", "pytorch_model.bin", "model.pt", "model.gguf", "config.json"),
        *("tokenizer.json", "tokenizer_config.json", "generation_config.json"),
        *("chat_template.jinja", "special_tokens_map.json", "model.safetensors.index.json"),
    ],
)
def test_a_pickle_in_place_of_a_file_is_refused(name: str, folder: Path, trap: Path) -> None:
    if name.endswith((".bin", ".pt", ".gguf", ".index.json")):
        (folder / "model.safetensors").unlink()
    for data in gadgets(trap)[2:]:  # the oldest forms are plain text
        (folder / name).write_bytes(data)
        with pytest.raises(HeddleError):
            read_all(folder / name if name.endswith(".gguf") else folder)


def read_all(place: Path) -> None:
    """What a start reads of a model."""
    load_model_config(place)
    load_tokenizer(str(place))
    open_weights(place)
