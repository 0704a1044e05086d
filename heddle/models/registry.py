"""Architecture name -> the family that builds it. A family is imported only when it is chosen."""

from __future__ import annotations

from collections.abc import Callable

import torch

from heddle.comm.base import Communicator
from heddle.config.model import ModelConfig
from heddle.errors import UnsupportedError
from heddle.kernels.registry import Kernels
from heddle.layout.heads import HeadLayout
from heddle.models.adapters.slots import AdapterSlots
from heddle.models.base import BuildContext, Model
from heddle.models.config_json import (
    DENSE_ARCHITECTURES,
    GEMMA_ARCHITECTURES,
    GLM4_ARCHITECTURES,
    QWEN_MOE_ARCHITECTURES,
)
from heddle.models.config_latent import LATENT_ARCHITECTURES
from heddle.models.layers.expert_group import ExpertGroup
from heddle.models.layers.shard import Shard
from heddle.models.weights.forms import QuantizationName
from heddle.models.weights.loader import Progress, WeightLoader
from heddle.models.weights.source import WeightSource

Creator = Callable[[BuildContext], Model]


def _create_llama(context: BuildContext) -> Model:
    from heddle.models.llama import load_llama  # loaded only when chosen

    return load_llama(context)


def _create_deepseek(context: BuildContext) -> Model:
    from heddle.models.deepseek import load_deepseek  # loaded only when chosen

    return load_deepseek(context)


def _create_mixtral(context: BuildContext) -> Model:
    from heddle.models.llama import load_mixtral  # loaded only when chosen

    return load_mixtral(context)


def _create_gpt_oss(context: BuildContext) -> Model:
    from heddle.models.llama import load_gpt_oss  # loaded only when chosen

    return load_gpt_oss(context)


def _create_gemma(context: BuildContext) -> Model:
    from heddle.models.gemma import load_gemma  # loaded only when chosen

    return load_gemma(context)


def _create_phi3(context: BuildContext) -> Model:
    from heddle.models.phi3 import load_phi3  # loaded only when chosen

    return load_phi3(context)


def _create_olmo2(context: BuildContext) -> Model:
    from heddle.models.olmo2 import load_olmo2  # loaded only when chosen

    return load_olmo2(context)


def _create_exaone4(context: BuildContext) -> Model:
    from heddle.models.olmo2 import load_exaone4  # loaded only when chosen

    return load_exaone4(context)


def _create_glm4(context: BuildContext) -> Model:
    from heddle.models.glm4 import load_glm4  # loaded only when chosen

    return load_glm4(context)


def _create_llama4(context: BuildContext) -> Model:
    from heddle.models.llama4 import load_llama4  # loaded only when chosen

    return load_llama4(context)


def _create_qwen3_next(context: BuildContext) -> Model:
    from heddle.models.qwen3_next import load_qwen3_next  # loaded only when chosen

    return load_qwen3_next(context)


def _create_bamba(context: BuildContext) -> Model:
    from heddle.models.bamba import load_bamba  # loaded only when chosen

    return load_bamba(context)


def _create_minimax(context: BuildContext) -> Model:
    from heddle.models.minimax import load_minimax  # loaded only when chosen

    return load_minimax(context)


def _create_glm_moe(context: BuildContext) -> Model:
    from heddle.models.llama import load_glm_moe  # loaded only when chosen

    return load_glm_moe(context)


def _create_minimax_m2(context: BuildContext) -> Model:
    from heddle.models.llama import load_minimax_m2  # loaded only when chosen

    return load_minimax_m2(context)


CREATORS: dict[str, Creator] = {
    **dict.fromkeys(DENSE_ARCHITECTURES, _create_llama),
    **dict.fromkeys(QWEN_MOE_ARCHITECTURES, _create_llama),
    "GraniteForCausalLM": _create_llama,
    "SmolLM3ForCausalLM": _create_llama,
    "Phi3ForCausalLM": _create_phi3,
    **dict.fromkeys(("Olmo2ForCausalLM", "Olmo3ForCausalLM"), _create_olmo2),
    "Exaone4ForCausalLM": _create_exaone4,
    **dict.fromkeys(GLM4_ARCHITECTURES, _create_glm4),
    "MixtralForCausalLM": _create_mixtral,
    **dict.fromkeys(GEMMA_ARCHITECTURES, _create_gemma),
    "GptOssForCausalLM": _create_gpt_oss,
    "Llama4ForCausalLM": _create_llama4,
    **dict.fromkeys(LATENT_ARCHITECTURES, _create_deepseek),
    "Qwen3NextForCausalLM": _create_qwen3_next,
    "BambaForCausalLM": _create_bamba,
    "MiniMaxForCausalLM": _create_minimax,
    "Glm4MoeForCausalLM": _create_glm_moe,
    "OlmoeForCausalLM": _create_llama,
    "MiniMaxM2ForCausalLM": _create_minimax_m2,
}


_DRAFTING = (
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM",
)
"""Checkpoints of these may hold draft layers behind the others."""


def create_model(
    config: ModelConfig,
    heads: HeadLayout,
    tp_rank: int,
    source: WeightSource,
    dtype: torch.dtype,
    device: torch.device,
    tp: Communicator,
    progress: Progress | None = None,
    stage: tuple[int, int] = (0, 1),
    experts: ExpertGroup | None = None,
    *,
    replicates_queries: bool = False,
    adapter_slots: list[AdapterSlots] | None = None,
    kernels: Kernels | None = None,
    quantization: QuantizationName = "none",
) -> Model:
    """Build one rank's part of a model and load its weights.

    Args:
        config: the model.
        heads: the head map; this rank projects its own query heads and all kv heads of its slice.
        tp_rank: place among the tensor-parallel ranks.
        source: the checkpoint; only this rank's slices are read.
        dtype: of parameters and compute; float64 is float64 throughout.
        device: of parameters.
        tp: the tensor-parallel group.
        progress: called with (tensors loaded, tensors in all).
        stage: place among the pipeline stages, and their number; a stage holds its layers alone.
        experts: among whom whole experts are dealt; None: experts are cut over `tp`.
        replicates_queries: this rank projects the queries of its whole slice.
        adapter_slots: gets the slots of every product that takes adapters; None: none does.
        kernels: who computes; None: torch.
        quantization: of the matrices of products.

    Returns:
        A model that says, per pass, one all-reduce in the lookup (first stage) and two per layer,
        before the first of them what norms over all heads need, before the second what dealt
        experts need, and per call of `logits` (last stage) one all-gather; nothing at all in a
        group of one.

    Raises:
        UnsupportedError: the architecture is not known.
        ModelFileError: weights are missing, damaged, or of another model.
    """
    if config.architecture not in CREATORS and config.foreign is None:
        raise UnsupportedError(
            f"architecture={config.architecture} is not supported; known: {', '.join(CREATORS)}"
        )
    loader = WeightLoader(
        source,
        dtype,
        device,
        ignored=_ignored(config),
        progress=progress,
        adapter_slots=adapter_slots,
        kernels=kernels,
        quantization=quantization,
    )
    shard = Shard(tp_rank, heads.tp_size, tp, experts)
    context = BuildContext(config, heads, shard, loader, stage, replicates_queries)
    if config.foreign is not None:
        from heddle.models.transformers_any.load import load_transformers  # imports transformers

        return load_transformers(context, source)
    return CREATORS[config.architecture](context)


def _ignored(config: ModelConfig) -> tuple[str, ...]:
    """Names that a checkpoint may hold beyond the model itself."""
    names: tuple[str, ...] = ()
    if config.tie_word_embeddings:
        names += (r"lm_head\.weight",)  # a second copy of the embedding
    if config.architecture in _DRAFTING:
        # Layers past the last one draft further tokens and take no part in a plain pass.
        names += (rf"model\.layers\.(?!(?:{_numbers_below(config.num_layers)})\.)\d+\..*",)
    return names


def _numbers_below(count: int) -> str:
    return "|".join(str(number) for number in range(count))
