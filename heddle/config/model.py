"""What a checkpoint is, read from its `config.json` or GGUF header as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding. Field names are those of the Hugging Face `rope_parameters`."""

    theta: float = 10000.0
    rope_type: Literal["default", "linear", "yarn", "llama3"] = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    interleaved: bool = False
    """Pairs are (0,1)(2,3)... instead of (0,D/2)(1,D/2+1)..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention widths (DeepSeek-V2/V3)."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Mixture of experts as DeepSeek-V2/V3 define it."""

    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    expert_intermediate_size: int
    first_dense_layers: int
    """Layers below this index use a dense MLP."""
    scoring: Literal["softmax", "sigmoid"]
    normalize_top_k: bool
    routed_scaling_factor: float
    num_groups: int = 1
    top_k_groups: int = 1
    top_k_method: Literal["greedy", "group_limited_greedy", "noaux_tc"] = "greedy"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and constants of one decoder model; heads are global, before any split."""

    architecture: str
    """Hugging Face class name, for example `LlamaForCausalLM`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    """1 for MLA: all heads share one latent row."""
    head_dim: int
    """Width of a query head before any absorption (MLA: nope + rope)."""
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qk_norm: bool = False
    """RMS norm over each query and key head (Qwen3)."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    checkpoint_dtype: str = "float32"

    @property
    def is_mla(self) -> bool:
        """True when the cache holds latent rows."""
        return self.mla is not None

    @property
    def stored_key_width(self) -> int:
        """`Dq`: key elements per stored row and kv head; also the width of a query that travels."""
        return (
            self.head_dim if self.mla is None else self.mla.kv_lora_rank + self.mla.qk_rope_head_dim
        )

    @property
    def partial_width(self) -> int:
        """`Do`: width of a partial output against stored rows (MLA: the latent)."""
        return self.head_dim if self.mla is None else self.mla.kv_lora_rank

    @property
    def stored_row_width(self) -> int:
        """Elements of one stored row and kv head: key and value for GQA, the latent row for MLA."""
        return 2 * self.head_dim if self.mla is None else self.stored_key_width

    @property
    def output_head_dim(self) -> int:
        """Width of a head as it enters the output projection."""
        return self.head_dim if self.mla is None else self.mla.v_head_dim
