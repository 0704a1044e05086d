"""The page of families: what each model family runs under, told by what the engine goes by.

A *specimen* is a small `config.json` of a family. Its reader makes a `ModelConfig` of it, whose
kinds of layers and facts the rules of layouts judge, so no cell is written by hand. A family whose
settings choose between kinds has a specimen with each.

`docs/families.md` is the output of `render_families_page`; a test compares them. Anew:

    python -c "from heddle.models.families import *
    open('docs/families.md', 'w').write(render_families_page())"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from heddle.config.model import ModelConfig
from heddle.layout.choice import LayoutChoice, ModelFacts
from heddle.layout.kinds import AXES, kinds_of
from heddle.layout.rules import RULES
from heddle.layout.support import example_of, markdown_table, unsupported_reason
from heddle.models.config_fields import Fields
from heddle.models.config_json import READERS
from heddle.models.config_unbuilt import UNBUILT

_SHARED: dict[str, object] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}
_EXPERTS: dict[str, object] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_ROUTED: dict[str, object] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT: dict[str, object] = {
    **_ROUTED,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
_INDEXED: dict[str, object] = {
    **_LATENT,
    "index_n_heads": 4,
    "index_head_dim": 8,
    "index_topk": 16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row of the page."""

    name: str
    """Models that people know it by."""
    architecture: str
    """Class name in `architectures`."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Of the specimen, beyond those that all have."""

    @property
    def specimen(self) -> ModelConfig:
        """The model that stands for the family."""
        path = Path(f"the specimen of {self.architecture}")
        fields = Fields(path, {**_SHARED, **self.settings})
        return READERS[self.architecture](fields, self.architecture, ())


def _family(architecture: str, name: str, **settings: object) -> Family:
    return Family(name=name, architecture=f"{architecture}ForCausalLM", settings=settings)


FAMILIES: tuple[Family, ...] = (
    _family("Llama", "Llama 2 and 3, SmolLM2"),
    _family("Llama4", "Llama 4 text", **_EXPERTS, attention_chunk_size=64, intermediate_size_mlp=8),
    _family("Mistral", "Mistral", sliding_window=None),
    _family("Mistral", "Mistral with a window", sliding_window=64),
    _family("Mixtral", "Mixtral", **_EXPERTS, sliding_window=64),
    _family("Qwen2", "Qwen2 and 2.5"),
    _family("Qwen2Moe", "Qwen2 MoE", **_EXPERTS, use_sliding_window=True, sliding_window=64,
            max_window_layers=3),
    _family("Qwen3", "Qwen3"),
    _family("Qwen3Moe", "Qwen3 MoE", **_EXPERTS),
    _family("Qwen3Next", "Qwen3-Next", **_EXPERTS, linear_num_value_heads=4,
            linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
            linear_conv_kernel_dim=4),
    _family("Gemma2", "Gemma 2", sliding_window=64, query_pre_attn_scalar=8,
            attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
    _family("Gemma3", "Gemma 3 text", sliding_window=64, sliding_window_pattern=2,
            query_pre_attn_scalar=8),
    _family("GptOss", "gpt-oss", **_EXPERTS, sliding_window=64,
            rope_parameters={"rope_type": "default"}),
    _family("Phi3", "Phi-3 and Phi-4"),
    _family("Phi3", "Phi-3 with a window", sliding_window=64),
    _family("SmolLM3", "SmolLM3", use_sliding_window=True, sliding_window=64),
    _family("Olmo2", "OLMo-2"),
    _family("Olmo3", "OLMo-3", sliding_window=64),
    _family("Exaone4", "EXAONE 4", sliding_window=64),
    _family("Granite", "Granite"),
    _family("Glm", "GLM-4, first release"),
    _family("Glm4", "GLM-4-0414"),
    _family("DeepseekV2", "DeepSeek-V2", **_LATENT),
    _family("DeepseekV3", "DeepSeek-V3 and R1, Kimi-K2", **_LATENT),
    _family("DeepseekV32", "DeepSeek-V3.2", **_INDEXED),
    _family("Glm4Moe", "GLM-4.5 to 4.7", **_ROUTED),
    _family("Glm4MoeLite", "GLM-4.7-Flash", **_LATENT),
    _family("GlmMoeDsa", "GLM-5", **_INDEXED),
    _family("Olmoe", "OLMoE", **_EXPERTS),
    _family("MiniMaxM2", "MiniMax-M2", **_EXPERTS),
    _family("MiniMax", "MiniMax-Text-01", **_EXPERTS),
    _family("Bamba", "Bamba", attn_layer_indices=[1], mamba_n_heads=4, mamba_n_groups=2,
            mamba_d_state=4, mamba_d_head=32, mamba_d_conv=4, mamba_expand=2),
)  # fmt: skip

_FUSED_EXPERTS = {
    "GptOssForCausalLM": "experts lie in one tensor per layer, read as MXFP4 or not quantised",
    "Llama4ForCausalLM": "experts lie in one tensor per layer, read only where it is not quantised",
}
_INTRO = """\
# Families: what is built in, and what each runs under

This page is printed by the readers of `config.json` and by the rules that the engine goes by
(`heddle.models.families`); do not edit it.

`yes`: it runs, and gives what one rank gives. `no`: it is refused, with the reason below. `part`:
all but what the note says. Which kinds of layers meet which exchange is on the [page of
kinds](kinds.md). `native`: built here, equal to `transformers` at a tiny size. `lora`: adapters of
the [PEFT format](adapters.md) on matrices of the layers. `quantised`: checkpoints whose matrices
are stored in at most 8 bits, dequantised as they are read.
"""


def axis_reason(family: Family, axis: str) -> str:
    """Why a family does not run under an axis; empty where it does.

    Args:
        family: one of `FAMILIES`.
        axis: one of `heddle.layout.kinds.AXES`.
    """
    model = family.specimen
    choice = LayoutChoice(parallel=example_of(axis), model=ModelFacts.of(model))
    broken = [problem.text for rule in RULES for problem in rule.problems(choice)]
    return next(iter(broken), "") or next(
        filter(None, (unsupported_reason(kind, axis) for kind in kinds_of(model))), ""
    )


def adapter_limits(model: ModelConfig) -> str:
    """Which matrices take no adapters; empty where only the vocabulary's take none.

    Args:
        model: any.

    Example:
        >>> adapter_limits(FAMILIES[0].specimen)
        ''
    """
    parts = {
        "routers and routed experts": model.moe is not None,
        "recurrent layers": model.recurrent is not None,
        "`kv_b_proj`, which attention applies in two halves": model.is_mla,
        "the indexer": model.sparse is not None,
    }
    left_out = [part for part, has in parts.items() if has]
    return f"refused for {'; and for '.join(left_out)}" if left_out else ""


def quantised_limits(model: ModelConfig) -> str:
    """Which quantised tensors are not read; empty where all are.

    Args:
        model: any.
    """
    return _FUSED_EXPERTS.get(model.architecture, "")


def render_families_page() -> str:
    """The whole page, as Markdown."""
    notes: dict[str, int] = {}

    def cell(reason: str, word: str = "no") -> str:
        return f"{word} ({notes.setdefault(reason, len(notes) + 1)})" if reason else "yes"

    rows = [
        (
            family.name,
            f"`{family.architecture}`",
            ", ".join(kinds_of(family.specimen)),
            "yes",
            *(cell(axis_reason(family, axis)) for axis in AXES),
            cell(adapter_limits(family.specimen), "part"),
            cell(quantised_limits(family.specimen), "part"),
        )
        for family in FAMILIES
    ]
    rows += [
        ("-", f"`{name}`", "-", cell(reason), *["-"] * (len(AXES) + 2))
        for name, reason in UNBUILT.items()
    ]
    columns = ("family", "class", "kinds of layers", "native", *AXES, "lora", "quantised")
    table = markdown_table(columns, rows)
    reasons = "".join(f"{number}. {reason}.\n" for reason, number in notes.items())
    return "\n".join((_INTRO, table, f"## Reasons\n\n{reasons}"))
