"""Parameters of one rank, to the byte, from the configuration alone.

    matrices      cut by heads, inner width, experts or vocabulary; what a row is multiplied with
    replicated    whole on every rank of a stage: norms, routers, latent down-projections, tables

A rank that is built without memory (`heddle.runner.weigh`) holds the same bytes; a test compares
them family by family. This count needs neither a checkpoint nor a tensor library, so a model of a
trillion parameters is counted in a moment.

Legend: `E` hidden size, `D` head width, `h` query lanes that a rank projects, `Ks` stored kv heads,
`X` experts, `K` inputs and `N` outputs of a product.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

from heddle.config.engine import ResolvedConfig
from heddle.config.model import MLAConfig, MoEConfig, RecurrentConfig
from heddle.errors import UnsupportedError
from heddle.layout.cache_rows import DTYPE_BYTES
from heddle.layout.cut import cut
from heddle.planner.parts import LayerWeights, Part, RankWeights
from heddle.step.topology import Topology

PANEL_WIDTH = 16
"""Outputs of a panel of compiled kernels, the last of which is kept whole."""
_LONG = 8
"""Bytes of an index."""
_FOUR_NORMS = ("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Glm4ForCausalLM")
"""A norm behind each block as well as in front of it."""
_WIDE_NORMS = (
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GptOssForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "Qwen3NextForCausalLM",
)
"""Norm weights in float32 at least."""
_GATED_ATTENTION = ("Qwen3NextForCausalLM",)


def rank_weights(resolved: ResolvedConfig, topology: Topology, global_rank: int) -> RankWeights:
    """Count the parameters of a rank.

    Args:
        resolved: what would run; weights are taken in the compute dtype.
        topology: of it.
        global_rank: which rank.
    Raises:
        UnsupportedError: layers that the transformers library builds, or packed weights.
    """
    if resolved.model.foreign is not None:
        raise UnsupportedError(
            f"{resolved.model.architecture} runs through transformers, whose parameters are known "
            "only once they are built; heddle doctor MODEL counts them"
        )
    if resolved.quantization != "none":
        raise UnsupportedError(
            f"quantization={resolved.quantization} is not planned: what stays in float32 depends "
            "on the file; heddle doctor MODEL counts it (nearest: none)"
        )
    return _Counter(resolved, topology, global_rank).run()


class _Counter:
    """Carries the place of a rank and the widths of its elements."""

    def __init__(self, resolved: ResolvedConfig, topology: Topology, global_rank: int) -> None:
        self.model, self.topology = resolved.model, topology
        self.mesh = topology.mesh
        self.coord = topology.mesh.coord_of(global_rank)
        self.global_rank = global_rank
        self.element = DTYPE_BYTES[resolved.dtype]
        self.wide = max(self.element, 4)
        self.packs = resolved.kernels == "numba" and resolved.dtype == "float32"
        heads = topology.heads
        first, last = heads.query_range(self.coord.tp)
        self.num_heads = last - first
        self.places = heads.slice_size if topology.replicates_queries else 1
        self.lanes = self.places * heads.lanes
        self.kv_heads = heads.num_stored_kv_heads(self.mesh.slice_of(self.coord.tp))

    def run(self) -> RankWeights:
        kinds: dict[tuple[object, bool], LayerWeights] = {}
        layers = []
        for layer in self.topology.stage_layers(self.global_rank):
            has_experts = self.model.moe is not None and self.model.moe.has_experts(layer)
            key = (self.model.kind_of(layer), has_experts)
            if key not in kinds:
                kinds[key] = self._layer(layer, has_experts=has_experts)
            layers.append(kinds[key])
        return RankWeights(tuple(layers), tuple(self._ends(bool(layers))))

    def _layer(self, layer: int, *, has_experts: bool) -> LayerWeights:
        if self.model.kind_of(layer).mixer == "recurrent":
            mixer = list(self._recurrent())
        elif self.model.mla is not None:
            mixer = list(self._latent(self.model.mla))
        else:
            mixer = list(self._grouped_query())
        parts = [*mixer, self._layer_norms()]
        if not has_experts:
            return LayerWeights((*parts, *self._dense(self.model.intermediate_size)))
        assert self.model.moe is not None, "it says so"
        held, _ = self._expert_share(self.model.moe)
        return LayerWeights((*parts, *self._mixture(self.model.moe)), held)

    def _matrix(
        self, name: str, outputs: int, inputs: int, bias: int = 0, *, is_replicated: bool = False
    ) -> Part:
        """A product's weight `[N, K]` and what is added behind it."""
        columns = -(-outputs // PANEL_WIDTH) * PANEL_WIDTH if self.packs else outputs
        size = (columns * inputs + bias) * self.element
        return Part(name, size, outputs * inputs, is_replicated)

    def _layer_norms(self) -> Part:
        count = 4 if self.model.architecture in _FOUR_NORMS else 2
        return self._norm(count * self.model.hidden_size)

    def _norm(self, width: int) -> Part:
        is_wide = self.model.architecture in _WIDE_NORMS
        return Part("norms", width * (self.wide if is_wide else self.element), 0, True)

    def _output(self) -> Part:
        model = self.model
        bias = model.hidden_size if model.output_bias and self.coord.tp == 0 else 0
        inputs = self.num_heads * model.output_head_dim
        return self._matrix("attention", model.hidden_size, inputs, bias)

    def _grouped_query(self) -> Iterator[Part]:
        model, width = self.model, self.model.head_dim
        gates = self.num_heads if model.architecture in _GATED_ATTENTION else 0
        outputs = (self.lanes + 2 * self.kv_heads + gates) * width
        bias = outputs if model.qkv_bias else 0
        yield self._matrix("attention", outputs, model.hidden_size, bias)
        yield self._output()
        normed = self.lanes + self.kv_heads
        if gates:
            yield self._norm(2 * width)
        elif model.qk_width_norm:
            yield Part("norms", normed * ((width + 2) * self.wide + _LONG))
        elif model.qk_norm:
            yield self._norm(normed * width)
        if model.has_sinks:
            yield Part("attention", self.topology.heads.lanes * self.element)

    def _latent(self, mla: MLAConfig) -> Iterator[Part]:
        model, rank = self.model, mla.q_lora_rank
        stored = mla.kv_lora_rank + mla.qk_rope_head_dim
        query = self.lanes * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        first = query if rank is None else rank
        bias = first + stored if model.qkv_bias else 0
        yield self._matrix(
            "attention", first + stored, model.hidden_size, bias, is_replicated=rank is not None
        )
        if rank is not None:
            yield self._norm(rank)
            yield self._matrix("attention", query, rank)
        yield self._norm(mla.kv_lora_rank)
        yield self._up_projections(mla)
        yield self._output()
        if model.sparse is not None:
            yield from self._indexer(rank or 0, model.sparse.num_heads, model.sparse.head_dim)

    def _up_projections(self, mla: MLAConfig) -> Part:
        """Of keys for the heads that are projected, of values for own ones."""
        own, rank = self.topology.heads.lanes, mla.kv_lora_rank
        keys = self.lanes * mla.qk_nope_head_dim * rank
        values = own * mla.v_head_dim * rank
        # A single lane's keys are a view of both.
        kept = keys + (values if self.lanes == 1 else 0)
        return Part("attention", (kept + values) * self.element, keys + values)

    def _indexer(self, rank: int, heads: int, width: int) -> Iterator[Part]:
        """Whole on every rank; its weights are wide."""
        hidden = self.model.hidden_size
        yield self._matrix("indexer", heads * width, rank, is_replicated=True)
        yield self._matrix("indexer", width, hidden, 2 * width, is_replicated=True)
        yield Part("indexer", heads * hidden * self.wide, heads * hidden, True)

    def _dense(self, inner: int, *, has_bias: bool | None = None) -> Iterator[Part]:
        first, last = cut(inner, self.mesh.tp_size, self.coord.tp)
        room, width = last - first, self.model.hidden_size
        is_biased = self.model.mlp_bias if has_bias is None else has_bias
        down_bias = width if is_biased and self.coord.tp == 0 else 0
        yield self._matrix("feed_forward", 2 * room, width, 2 * room if is_biased else 0)
        yield self._matrix("feed_forward", width, room, down_bias)

    def _expert_share(self, moe: MoEConfig) -> tuple[int, int]:
        """Experts held here, and the inner width of each."""
        if self.topology.has_expert_parallel:
            place = self.mesh.position("ep", self.global_rank)
            first, last = cut(moe.num_experts, self.mesh.group_size("ep"), place)
            return last - first, moe.expert_intermediate_size
        first, last = cut(moe.expert_intermediate_size, self.mesh.tp_size, self.coord.tp)
        return moe.num_experts, last - first

    def _mixture(self, moe: MoEConfig) -> Iterator[Part]:
        width, count = self.model.hidden_size, moe.num_experts
        vectors = int(moe.top_k_method == "noaux_tc") + int(moe.has_router_bias)
        size = count * (width + vectors) * self.wide
        yield Part("router", size, count * width, True)
        held, inner = self._expert_share(moe)
        biases = 0
        if moe.has_expert_bias:
            adds = self.coord.tp == 0 or self.topology.has_expert_parallel
            biases = held * (2 * inner + (width if adds else 0))
        size = (held * 3 * width * inner + biases) * self.element
        yield Part("experts", size, 3 * width * inner)
        if moe.shared_width:
            yield from self._dense(moe.shared_width, has_bias=False)
            if moe.has_shared_gate:
                yield Part("router", width * self.element, width, True)

    def _recurrent(self) -> Iterator[Part]:
        layout = self.topology.recurrent_layout
        assert layout is not None, "the model has such layers"
        config, rank = layout.config, self.coord.tp
        first, last = layout.head_range(rank)
        heads = last - first
        values, channels = heads * config.value_dim, layout.num_channels(rank)
        hidden, bias = self.model.hidden_size, 0
        if config.method == "gated_delta":
            outputs = channels + values + 2 * heads
        elif config.method == "mamba2":
            outputs = values + channels + heads
            bias = outputs if config.has_projection_bias else 0
        else:
            outputs = 4 * values
        yield self._matrix("attention", outputs, hidden, bias)
        output_bias = hidden if config.has_projection_bias and rank == 0 else 0
        yield self._matrix("attention", hidden, values, output_bias)
        yield Part("attention", self._recurrent_vectors(config, heads, channels))

    def _recurrent_vectors(self, config: RecurrentConfig, heads: int, channels: int) -> int:
        """Bytes of what is no product: convolution, decays, norm, and the maps of heads."""
        taps = config.conv_kernel + int(config.has_conv_bias) if config.conv_kernel else 0
        convolution = channels * taps * self.element
        if config.method == "gated_delta":
            return convolution + heads * _LONG + (2 * heads + config.value_dim) * self.wide
        norm = heads * (config.value_dim * self.wide + _LONG)
        if config.method == "mamba2":
            return convolution + heads * _LONG + 3 * heads * self.wide + norm
        return heads * self.wide + norm

    def _ends(self, has_layers: bool) -> Iterator[Part]:
        model, place = self.model, self.coord.pp
        is_first, is_last = place == 0, place == self.mesh.pp_size - 1
        first, last = cut(model.vocab_size, self.mesh.tp_size, self.coord.tp)
        table = self._matrix("head", last - first, model.hidden_size)
        shares = model.tie_word_embeddings and is_first
        if is_first and not (shares and is_last):
            yield Part("embedding", table.num_bytes)
        if is_last:
            yield table
            yield self._norm(model.hidden_size)
        if has_layers:
            yield Part("tables", self._table_bytes, 0, True)

    @cached_property
    def _table_bytes(self) -> int:
        """Two rotary tables of each kind that a layer of the stage turns by, and how many rows each
        expert has met.
        """
        model, layers = self.model, self.topology.stage_layers(self.global_rank)
        used = {model.kind_of(layer).rope for layer in layers} - {"none"}
        width = model.rotary_dim or model.head_dim
        if model.mla is not None:
            width = model.mla.qk_rope_head_dim
        angle = 8 if self.element == 8 else 4
        size = len(used) * 2 * -(-width // 2) * angle
        if self.topology.has_expert_parallel and model.moe is not None:
            size += self._counters(model.moe, layers)
        return size

    @staticmethod
    def _counters(moe: MoEConfig, layers: Iterable[int]) -> int:
        return moe.num_experts * _LONG if any(map(moe.has_experts, layers)) else 0
