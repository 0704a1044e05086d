from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from heddle.bench import float_folder as module
from heddle.bench.float_folder import float_folder, hugging_face_config
from heddle.config.model import ModelConfig, RopeConfig
from heddle.errors import UnsupportedError
from heddle.models.config_json import load_model_config
from heddle.models.weights.memory import MemorySource

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=16,
    hidden_size=8,
    intermediate_size=12,
    num_layers=1,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=5000.0),
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_ids=(2, 3),
)


def test_a_folder_is_read_as_it_is(tmp_path):
    assert float_folder(tmp_path, MODEL) == tmp_path


def test_what_is_written_is_read_back_as_the_same_model(tmp_path, monkeypatch):
    tensors = {
        "model.embed_tokens.weight": torch.randn(16, 8).half(),
        "lm_head.weight": torch.randn(16, 8),
    }
    monkeypatch.setattr(module, "open_weights", lambda path: MemorySource(tensors))
    path = tmp_path / "small.gguf"
    path.touch()
    folder = float_folder(path, MODEL, tmp_path / "cache")
    assert load_model_config(str(folder)) == MODEL
    found = load_file(folder / "model.safetensors")
    # A tied head is stored once, as the embedding.
    assert list(found) == ["model.embed_tokens.weight"]
    assert found["model.embed_tokens.weight"].dtype == torch.float32
    assert torch.equal(found["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    assert json.loads((folder / "config.json").read_text()) == hugging_face_config(MODEL)
    # Written once.
    monkeypatch.setattr(module, "open_weights", lambda path: pytest.fail("read again"))
    assert float_folder(path, MODEL, tmp_path / "cache") == folder


@pytest.mark.parametrize(
    "change",
    [{"architecture": "Qwen3ForCausalLM"}, {"rope": RopeConfig(rope_type="linear", factor=2.0)}],
    ids=["family", "rotation"],
)
def test_what_peers_would_read_otherwise_is_refused(tmp_path, change):
    import dataclasses

    path = tmp_path / "small.gguf"
    path.touch()
    with pytest.raises(UnsupportedError, match=r"small\.gguf is a \.gguf of"):
        float_folder(path, dataclasses.replace(MODEL, **change), tmp_path)
