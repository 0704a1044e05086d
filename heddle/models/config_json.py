"""A model's shapes and constants, read from its files as plain data.

A configuration of a known family is read here; one of another architecture is left to the
transformers library, where that knows it, and else refused by name. Code that a repository ships is
never run. Nothing imports torch or transformers for a known family, so planning and `show` start at
once.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable
from pathlib import Path

from heddle.config.engine import ModelImpl
from heddle.config.model import ModelConfig
from heddle.config.overrides import merge_overrides, override_keys
from heddle.errors import ConfigError, ModelFileError, UnsupportedError
from heddle.models.config_any import knows_model_type, read_any_config
from heddle.models.config_dense import read_dense_config
from heddle.models.config_exaone4 import read_exaone4_config
from heddle.models.config_experts import (
    read_mixtral_config,
    read_olmoe_config,
    read_qwen_moe_config,
)
from heddle.models.config_fields import Fields, read_json_object
from heddle.models.config_gemma import read_gemma2_config, read_gemma3_config
from heddle.models.config_gguf import read_gguf_config
from heddle.models.config_glm4 import read_glm4_config
from heddle.models.config_glm_moe import read_glm_moe_config
from heddle.models.config_gpt_oss import read_gpt_oss_config
from heddle.models.config_granite import read_granite_config
from heddle.models.config_latent import LATENT_ARCHITECTURES, read_latent_config
from heddle.models.config_llama4 import read_llama4_config
from heddle.models.config_minimax_m2 import read_minimax_m2_config
from heddle.models.config_modalities import refuse_other_modalities
from heddle.models.config_olmo2 import read_olmo2_config
from heddle.models.config_olmo3 import read_olmo3_config
from heddle.models.config_phi3 import read_phi3_config
from heddle.models.config_quantization import read_quantization
from heddle.models.config_recurrent import (
    read_bamba_config,
    read_minimax_config,
    read_qwen3_next_config,
)
from heddle.models.config_rope import settle_rope
from heddle.models.config_smollm3 import read_smollm3_config
from heddle.models.config_unbuilt import unbuilt_reason

Reader = Callable[[Fields, str, tuple[int, ...]], ModelConfig]
"""Called with (top level of `config.json`, architecture, ids that end a text)."""

DENSE_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
QWEN_MOE_ARCHITECTURES = ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")
GLM4_ARCHITECTURES = ("GlmForCausalLM", "Glm4ForCausalLM")
GEMMA_ARCHITECTURES = ("Gemma2ForCausalLM", "Gemma3ForCausalLM")

READERS: dict[str, Reader] = {
    **dict.fromkeys(DENSE_ARCHITECTURES, read_dense_config),
    "GraniteForCausalLM": read_granite_config,
    "SmolLM3ForCausalLM": read_smollm3_config,
    "Phi3ForCausalLM": read_phi3_config,
    "Olmo2ForCausalLM": read_olmo2_config,
    "Olmo3ForCausalLM": read_olmo3_config,
    "Exaone4ForCausalLM": read_exaone4_config,
    **dict.fromkeys(GLM4_ARCHITECTURES, read_glm4_config),
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
    "Glm4MoeForCausalLM": read_glm_moe_config,
    "OlmoeForCausalLM": read_olmoe_config,
    "MiniMaxM2ForCausalLM": read_minimax_m2_config,
}
ARCHITECTURES = tuple(READERS)

_log = logging.getLogger(__name__)


def load_model_config(
    path: str | Path, overrides: str = "", model_impl: ModelImpl = "auto"
) -> ModelConfig:
    """Read what a model is.

    Args:
        path: a folder with `config.json`, or a `.gguf` file.
        overrides: replaces values of `config.json`; of `overrides_text`.
        model_impl: whose layers run; `auto` is native where the architecture is known here.

    Returns:
        The configuration, with token ids of `generation_config.json` where that file exists.

    Raises:
        ModelFileError: a file is missing or a value is malformed; names file, key and value.
        UnsupportedError: the architecture or a setting of it is not built here.
        ConfigError: an override that this model has no use for.
    """
    path = Path(path)
    if overrides and path.suffix == ".gguf":
        raise ConfigError(
            f"hf_overrides={overrides} is not legal; overrides change a config.json, "
            f"and {path} has none"
        )
    if path.suffix == ".gguf":
        if model_impl == "transformers":
            raise ConfigError(
                f"model_impl=transformers is not legal; {path} has no config.json, and its tensors "
                "have the names of families built here (nearest: auto)"
            )
        return read_gguf_config(path)
    config_path = path / "config.json"
    if not config_path.is_file():
        raise ModelFileError(
            f"{path}: no config.json; a folder with config.json and *.safetensors, or a .gguf "
            "file, was expected"
        )
    data = merge_overrides(read_json_object(config_path), overrides)
    place = Path(f"{config_path} with hf_overrides") if overrides else config_path
    fields = Fields(place, data)
    read_quantization(fields)  # refuses what the readers of weights cannot open
    eos = _eos_token_ids(path, fields)
    model = _read_foreign(fields, eos, model_impl)
    if model is None:
        architecture = _architecture(fields)
        model = settle_rope(fields, READERS[architecture](fields, architecture, eos))
    _check_overrides(fields, overrides)
    return model


def _read_foreign(
    fields: Fields, eos: tuple[int, ...], model_impl: ModelImpl
) -> ModelConfig | None:
    """A model that the transformers library runs; None where it is to be native."""
    names = fields.strings("architectures") if "architectures" in fields else ()
    is_known = not set(names).isdisjoint(ARCHITECTURES)
    if not is_known:
        refuse_other_modalities(fields)
    if model_impl == "transformers":
        return read_any_config(fields, eos)
    if model_impl == "native" or is_known or not names or not knows_model_type(fields):
        return None
    try:
        return read_any_config(fields, eos)
    except UnsupportedError as error:
        raise UnsupportedError(f"{_unknown(fields)}; {error}") from error


def _check_overrides(fields: Fields, overrides: str) -> None:
    """Refuse values that nobody read: a misspelt one would change nothing, and say nothing."""
    for key in override_keys(overrides):
        if key not in fields.asked:
            nearest = difflib.get_close_matches(key, sorted(fields.asked), n=1)
            hint = f" (nearest: {nearest[0]})" if nearest else ""
            raise ConfigError(f"hf_overrides: {key} is not read for this model{hint}")


def _architecture(fields: Fields) -> str:
    names = fields.strings("architectures")
    known = [name for name in names if name in ARCHITECTURES]
    if not known:
        raise UnsupportedError(_unknown(fields))
    if "auto_map" in fields:
        _log.info("%s: auto_map is ignored; %s is built in", fields.path, known[0])
    return known[0]


def _unknown(fields: Fields) -> str:
    """That no architecture of a file is built here."""
    names = fields.strings("architectures")
    reason = " (its own code, auto_map, is never run)" if "auto_map" in fields else ""
    reason += f", because {why}" if (why := unbuilt_reason(names)) else ""
    return (
        f"{fields.path}: architectures={list(names)} is not supported{reason}; "
        f"known: {', '.join(ARCHITECTURES)}"
    )


def _eos_token_ids(folder: Path, fields: Fields) -> tuple[int, ...]:
    """Ids that end a text: those of `generation_config.json` first, then those of `config.json`."""
    ids: tuple[int, ...] = ()
    generation = folder / "generation_config.json"
    if generation.is_file():
        ids = Fields(generation, read_json_object(generation)).token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids + fields.token_ids("eos_token_id")))
