"""What a checkpoint is, read from its `config.json` or GGUF header as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from heddle.config.visibility import FULL, Visibility


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding. Field names are those of the Hugging Face `rope_parameters`."""

    theta: float = 10000.0
    rope_type: Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"] = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    """Window that the model was first trained for; dynamic: below it nothing is stretched."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    """longrope: one divisor per pair, for sequences within the original window."""
    long_factor: tuple[float, ...] = ()
    """The same for longer ones."""
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
    """Mixture of experts: a router sends each row to a few feed-forward blocks.

    Softmax over the chosen logits alone is softmax over all of them, normalised over the choice.
    """

    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int = 0
    """Blocks that every row visits; they are stored as one."""
    expert_intermediate_size: int
    shared_intermediate_size: int | None = None
    """Width of the shared block; None: as many expert widths as there are shared experts."""
    has_shared_gate: bool = False
    """The shared block's result is multiplied by a learned sigmoid, one number per row."""
    first_dense_layers: int = 0
    """Layers below this index use a dense MLP."""
    dense_layers: tuple[int, ...] = ()
    """Further layers that use a dense MLP."""
    scoring: Literal["softmax", "sigmoid"]
    normalize_top_k: bool
    routed_scaling_factor: float = 1.0
    num_groups: int = 1
    top_k_groups: int = 1
    top_k_method: Literal["greedy", "group_limited_greedy", "noaux_tc"] = "greedy"
    chooses_by_logits: bool = False
    """Experts are ranked before the scoring function, which flattens large logits into ties."""
    has_router_bias: bool = False
    scales_input: bool = False
    """An expert's weight multiplies the row that enters it instead of the row that leaves it."""
    has_expert_bias: bool = False
    swiglu_limit: float | None = None
    """Clamped activation: gate at most this, up within plus and minus this; None: plain SiLU."""
    swiglu_alpha: float = 1.702
    """Slope of the sigmoid in the clamped activation."""

    @property
    def shared_width(self) -> int:
        """Inner width of the shared block; 0: there is none."""
        if self.shared_intermediate_size is not None:
            return self.shared_intermediate_size
        return self.num_shared_experts * self.expert_intermediate_size

    def has_experts(self, layer: int) -> bool:
        """True when this layer is a mixture, false when it is dense."""
        return layer >= self.first_dense_layers and layer not in self.dense_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperatureConfig:
    """Queries of layers without rotation grow with their position p (Llama 4).

    The factor is `1 + scale * ln(1 + floor((p + 1) / floor))`.
    """

    floor: int
    """Tokens per step of the factor."""
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseConfig:
    """Top-k attention: an indexer scores every key, a query attends to the best (DeepSeek-V3.2)."""

    num_heads: int
    """Heads of the indexer."""
    head_dim: int
    """Width of an index key; stored beside the latent row."""
    top_k: int
    interleaved: bool = False
    """Rotary pairs of the indexer are neighbours (GLM-5), whatever those of the main attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentConfig:
    """A layer that keeps a state of fixed size instead of keys.

    The state of one head is a matrix `[key_dim, value_dim]`, updated affinely at every token; in
    front of it may stand a causal convolution over `conv_kernel` tokens.
    """

    method: Literal["gated_delta", "mamba2", "lightning"]
    num_heads: int
    """Heads that hold a state (value heads)."""
    num_key_heads: int
    """Heads of keys and queries (gated delta), or groups that share B and C (Mamba-2)."""
    key_dim: int
    value_dim: int
    conv_kernel: int = 0
    """Taps of the convolution; 0: none."""
    chunk_size: int = 64
    """Tokens that the chunked form of the recurrence takes at once."""
    norm_groups: int
    """Groups of heads, each with one mean in the norm of the output; `num_heads`: every head has
    its own.
    """
    has_conv_bias: bool = False
    has_projection_bias: bool = False
    time_step_limit: tuple[float, float] = (0.0, float("inf"))
    """Bounds of the time step (Mamba-2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Of the two sides of a residual sum."""

    residual: float = 1.0
    block: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualFactors:
    """Factors of each kind of block (MiniMax)."""

    attention: Factors = Factors()
    recurrent: Factors = Factors()
    feed_forward: Factors = Factors()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """What the mixer of one layer is."""

    mixer: Literal["attention", "recurrent"] = "attention"
    visibility: Visibility = FULL
    rope: Literal["global", "local", "none"] = "global"
    """Which rotary table the layer uses: the model's, `ModelConfig.local_rope`, or none."""


ATTENTION = LayerKind()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignConfig:
    """A model whose modules are those of the transformers library (`docs/any-model.md`)."""

    config_json: str
    """Its `config.json`, from which every rank makes the library's configuration object."""
    refused: tuple[tuple[str, str], ...]
    """Features of `heddle.layout.kinds` that it cannot have, each with the reason."""


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
    rotary_dim: int | None = None
    """Leading elements of a query or key head that are rotated; None: all."""
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Of the gate in a dense MLP."""
    embedding_scale: float = 1.0
    """Factor on looked-up embeddings."""
    qk_norm: bool = False
    """RMS norm over each query and key head before rotation (Qwen3)."""
    qk_width_norm: bool = False
    """One RMS norm over all query channels of a row and one over all key channels (OLMo-2)."""
    qk_l2_norm: bool = False
    """The same without weights, after rotation, in layers that rotate (Llama 4)."""
    temperature: TemperatureConfig | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    layer_kinds: tuple[LayerKind, ...] = ()
    """One per layer; empty: full attention everywhere. Read through `kind_of`."""
    local_rope: RopeConfig | None = None
    """Rotary table of layers whose kind says `local`."""
    attention_scale: float | None = None
    """Softmax scale; None: `head_dim ** -0.5`."""
    attention_softcap: float = 0.0
    """c > 0: scores become `c * tanh(score / c)`."""
    has_sinks: bool = False
    """Each query head has a learned logit that takes part in the softmax and carries no value."""
    final_softcap: float = 0.0
    """The same for the model's logits."""
    logits_scale: float = 1.0
    """Factor on logits, in front of the cap."""
    recurrent: RecurrentConfig | None = None
    """Of every layer whose kind says `recurrent`."""
    residual_factors: ResidualFactors = ResidualFactors()
    sparse: SparseConfig | None = None
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None
    foreign: ForeignConfig | None = None
    """Set where the transformers library runs the layers; None: they are built here."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    checkpoint_dtype: str = "float32"

    def kind_of(self, layer: int) -> LayerKind:
        """The mixer of a layer."""
        return self.layer_kinds[layer] if self.layer_kinds else ATTENTION

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
        """Elements of one stored row and kv head: key and value for GQA; the latent row for MLA,
        with the index key beside it in a sparse model.
        """
        if self.mla is None:
            return 2 * self.head_dim
        return self.stored_key_width + (0 if self.sparse is None else self.sparse.head_dim)

    @property
    def output_head_dim(self) -> int:
        """Width of a head as it enters the output projection."""
        return self.head_dim if self.mla is None else self.mla.v_head_dim
