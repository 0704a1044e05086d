"""Models that cannot be exact through the transformers library are refused with the reason."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from heddle.config.adapters import AdapterConfig
from heddle.config.engine import EngineConfig
from heddle.config.overrides import overrides_text
from heddle.config.visibility import FULL, Visibility
from heddle.errors import ConfigError, UnsupportedError
from heddle.layout.resolve import resolve
from heddle.models.config_any import read_any_config
from heddle.models.config_fields import Fields
from heddle.models.config_json import load_model_config
from tests.support.foreign import foreign_config
from tests.support.gguf_files import write_gguf
from tests.support.tiny import build_tiny


def write(folder: Path, model_type: str, **changes: Any) -> Path:
    foreign_config(model_type, **changes).save_pretrained(folder)
    return folder


def test_what_is_read(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    path = write(tmp_path, "cohere2", sliding_window=9, layer_types=types)
    model = load_model_config(path)
    assert (model.architecture, model.num_layers, model.vocab_size) == (
        "Cohere2ForCausalLM",
        3,
        131,
    )
    assert (model.num_query_heads, model.num_kv_heads, model.head_dim) == (8, 2, 8)
    assert model.attention_scale == pytest.approx(8**-0.5)
    assert model.eos_token_ids == (2,)
    window = Visibility("window", 9)
    assert [kind.visibility for kind in model.layer_kinds] == [window, FULL, window]
    assert model.foreign is not None
    assert [feature for feature, _ in model.foreign.refused] == ["pp", "a2a+Wq"]
    assert json.loads(model.foreign.config_json)["model_type"] == "cohere2"


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("bloom", {}, "does not go through the attention interface"),
    ("falcon", {}, "does not go through the attention interface"),
    ("mamba", {}, "does not go through the attention interface"),
    ("nemotron_h", {"num_hidden_layers": 3}, "one call per layer"),
    ("diffllama", {}, r"layers \[0, 0, 1, 1"),
    ("doge", {}, r"differs by .* from transformers"),
    ("helium", {"head_dim": 16}, "fails in the library's code"),
    ("arcee", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type=dynamic"),
]


@pytest.mark.parametrize(("model_type", "changes", "reason"), REFUSED, ids=lambda x: str(x)[:12])
def test_a_refusal_says_why(
    tmp_path: Path, model_type: str, changes: dict[str, Any], reason: str
) -> None:
    path = write(tmp_path, model_type, **changes)
    with pytest.raises(UnsupportedError, match=reason) as caught:
        load_model_config(path, model_impl="transformers")
    assert "cannot be served through transformers" in str(caught.value)


@pytest.mark.parametrize("hidden_size", [10**40, 10**400])
def test_a_quoted_error_is_one_short_line(tmp_path: Path, hidden_size: int) -> None:
    """Torch tells of such a size over a page of C++ frames."""
    path = write(tmp_path, "olmo2")
    overrides = overrides_text({"hidden_size": hidden_size})
    with pytest.raises(UnsupportedError, match="fails in the library's code") as caught:
        load_model_config(path, overrides, model_impl="transformers")
    message = str(caught.value)
    assert "frame #" not in message
    assert "\n" not in message
    assert len(message) < 400 + len(str(path))


def test_auto_gives_both_reasons(tmp_path: Path) -> None:
    path = write(tmp_path, "bloom")
    both = r"BloomForCausalLM.*is not supported.*known: Llama.*does not go through"
    with pytest.raises(UnsupportedError, match=both):
        load_model_config(path)
    with pytest.raises(UnsupportedError, match="is not supported") as caught:
        load_model_config(path, model_impl="native")
    assert "does not go through" not in str(caught.value)


def test_an_encoder_decoder_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        load_model_config(write(tmp_path, "bart"))
    fields = Fields(tmp_path / "config.json", json.loads((tmp_path / "config.json").read_text()))
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        read_any_config(fields, ())


def test_another_head_of_a_known_model_is_refused(tmp_path: Path) -> None:
    config = foreign_config("arcee")
    config.architectures = ["ArceeForSequenceClassification"]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="ArceeForCausalLM was expected"):
        load_model_config(tmp_path)


def test_code_of_the_folder_is_never_run(tmp_path: Path) -> None:
    path = write(tmp_path, "arcee")
    data = json.loads((path / "config.json").read_text())
    data["auto_map"] = {"AutoModelForCausalLM": "code.Model", "AutoConfig": "code.Config"}
    (path / "config.json").write_text(json.dumps(data))
    (path / "code.py").write_text("raise SystemExit('was run')\n")
    assert load_model_config(path).foreign is not None


def test_overrides_reach_the_library_and_misspelt_ones_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "arcee")
    model = load_model_config(path, overrides_text({"max_position_embeddings": 77}))
    assert model.max_position_embeddings == 77
    with pytest.raises(ConfigError, match="max_position_embedings is not read"):
        load_model_config(path, overrides_text({"max_position_embedings": 77}))


def test_a_gguf_file_has_no_configuration_of_the_library(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", build_tiny(tmp_path, "llama-8-2"))
    with pytest.raises(ConfigError, match=r"model_impl=transformers.*no config\.json"):
        load_model_config(path, model_impl="transformers")


def test_adapters_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "arcee")
    config = EngineConfig(model=str(path), adapters=AdapterConfig(enable_lora=True))
    with pytest.raises(ConfigError, match="enable_lora is not legal with a model whose layers"):
        resolve(
            config,
            load_model_config(path),
            free_memory_bytes=1 << 30,
            num_cores=2,
            model_path=str(path),
        )


def test_a_native_model_never_imports_the_library(tmp_path: Path) -> None:
    path = build_tiny(tmp_path, "llama-8-2")
    code = (
        "import sys; from heddle.models.config_json import load_model_config; "
        f"load_model_config({str(path)!r}); sys.exit('transformers' in sys.modules or "
        "'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
