"""A model's shapes and constants, read from its files as plain data.

Known families only: a configuration of another architecture is refused by name, and code that a
repository ships is never run. Nothing here imports torch or transformers, so planning and `show`
start at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from heddle.config.model import ModelConfig
from heddle.errors import ModelFileError, UnsupportedError
from heddle.models.config_dense import read_dense_config
from heddle.models.config_experts import read_mixtral_config, read_qwen_moe_config
from heddle.models.config_fields import Fields, read_json_object
from heddle.models.config_gemma import read_gemma2_config, read_gemma3_config
from heddle.models.config_gguf import read_gguf_config
from heddle.models.config_gpt_oss import read_gpt_oss_config
from heddle.models.config_latent import read_latent_config
from heddle.models.config_llama4 import read_llama4_config
from heddle.models.config_recurrent import (
    read_bamba_config,
    read_minimax_config,
    read_qwen3_next_config,
)

Reader = Callable[[Fields, str, tuple[int, ...]], ModelConfig]
"""Called with (top level of `config.json`, architecture, ids that end a text)."""

DENSE_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
QWEN_MOE_ARCHITECTURES = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
GEMMA_ARCHITECTURES = ("Gemma2ForCausalLM", "Gemma3ForCausalLM")
LATENT_ARCHITECTURES = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
)

READERS: dict[str, Reader] = {
    **dict.fromkeys(DENSE_ARCHITECTURES, read_dense_config),
    "MixtralForCausalLM": read_mixtral_config,
    **dict.fromkeys(QWEN_MOE_ARCHITECTURES, read_qwen_moe_config),
    "Gemma2ForCausalLM": read_gemma2_config,
    "Gemma3ForCausalLM": read_gemma3_config,
    "GptOssForCausalLM": read_gpt_oss_config,
    "Llama4ForCausalLM": read_llama4_config,
    **dict.fromkeys(LATENT_ARCHITECTURES, read_latent_config),
    "Qwen3NextForCausalLM": read_qwen3_next_config,
    "BambaForCausalLM": read_bamba_config,
    "MiniMaxForCausalLM": read_minimax_config,
}
ARCHITECTURES = tuple(READERS)

_log = logging.getLogger(__name__)


def load_model_config(path: str | Path) -> ModelConfig:
    """Read what a model is.

    Args:
        path: a folder with `config.json`, or a `.gguf` file.

    Returns:
        The configuration, with token ids of `generation_config.json` where that file exists.

    Raises:
        ModelFileError: a file is missing or a value is malformed; names file, key and value.
        UnsupportedError: the architecture or a setting of it is not built here.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        return read_gguf_config(path)
    config_path = path / "config.json"
    if not config_path.is_file():
        raise ModelFileError(
            f"{path}: no config.json; a folder with config.json and *.safetensors, or a .gguf "
            "file, was expected"
        )
    fields = Fields(config_path, read_json_object(config_path))
    architecture = _architecture(fields)
    if "quantization_config" in fields:
        raise fields.unsupported(
            "quantization_config", "convert the weights to 16 or 32 bit, or use a .gguf file"
        )
    return READERS[architecture](fields, architecture, _eos_token_ids(path, fields))


def _architecture(fields: Fields) -> str:
    names = fields.strings("architectures")
    known = [name for name in names if name in ARCHITECTURES]
    if not known:
        reason = " (its own code, auto_map, is never run)" if "auto_map" in fields else ""
        raise UnsupportedError(
            f"{fields.path}: architectures={list(names)} is not supported{reason}; "
            f"known: {', '.join(ARCHITECTURES)}"
        )
    if "auto_map" in fields:
        _log.info("%s: auto_map is ignored; %s is built in", fields.path, known[0])
    return known[0]


def _eos_token_ids(folder: Path, fields: Fields) -> tuple[int, ...]:
    """Ids that end a text: those of `generation_config.json` first, then those of `config.json`."""
    ids: tuple[int, ...] = ()
    generation = folder / "generation_config.json"
    if generation.is_file():
        ids = Fields(generation, read_json_object(generation)).token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids + fields.token_ids("eos_token_id")))
