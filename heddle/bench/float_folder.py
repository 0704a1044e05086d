"""A GGUF checkpoint as other engines read it: a folder with `config.json` and float32 weights.

Peers read GGUF files each in their own way, or not at all. Written once by our own reader, all of
them get the same numbers. The folder is kept, since it takes seconds to write.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from heddle.config.folders import default_cache_dir
from heddle.config.model import ModelConfig
from heddle.errors import UnsupportedError
from heddle.models.weights.open import open_weights

_ARCHITECTURE = "LlamaForCausalLM"


def float_folder(path: Path, model: ModelConfig, cache_dir: Path | None = None) -> Path:
    """The folder that holds a checkpoint's numbers.

    Args:
        path: folder or `.gguf` file; a folder is returned as it is.
        model: its configuration.
        cache_dir: where folders are kept; None: the package's cache.
    Raises:
        UnsupportedError: a GGUF file of another family than plain Llama.
    """
    if path.is_dir():
        return path
    if model.architecture != _ARCHITECTURE or model.rope.rope_type != "default":
        raise UnsupportedError(
            f"{path.name} is a .gguf of {model.architecture} with {model.rope.rope_type} rotation; "
            "peers are given plain Llama from .gguf files, any model from a folder"
        )
    folder = (cache_dir or default_cache_dir()) / "float32" / path.stem
    if not (folder / "config.json").exists():
        _write(path, model, folder)
    return folder


def _write(path: Path, model: ModelConfig, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    source = open_weights(path)
    tensors = {name: source.read(name).float().contiguous() for name in source.names()}
    if model.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="part-") as scratch:
        part = Path(scratch) / folder.name
        part.mkdir()
        save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
        (part / "config.json").write_text(json.dumps(hugging_face_config(model)))
        os.replace(part, folder)  # nobody sees a part of it


def hugging_face_config(model: ModelConfig) -> dict[str, Any]:
    """`config.json` of a plain Llama model."""
    return {
        "architectures": [_ARCHITECTURE],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_query_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope.theta},
        "tie_word_embeddings": model.tie_word_embeddings,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": model.bos_token_id,
        "eos_token_id": list(model.eos_token_ids) or None,
    }
