"""What a rank holds while it runs the largest step, beside weights and pools.

    rows       of one layer at a time, counted where most of its tensors are alive at once
    logits     of every sequence, when the layers are over; prompt logprobs come on top
    exchange   boxes in shared memory, each rank's own and those of its peers that it maps

Widths are read off the blocks: a mixer holds what it projects, what it turns, three attention
states (context, new rows, both merged) and what leaves; a feed-forward holds gate, up and their
product. The residual stream and its norm are alive through both.

Legend: `M` rows of a rank, `T` rows of the step, `N` DCP ranks, `L` query lanes, `Ks` stored kv
heads, `E` hidden size. Sums are elements of one row unless bytes are said.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from heddle.comm.shared_memory.geometry import BOX_BYTES, PIECE_BYTES, SEND_PIECES, SHIFT_PIECES
from heddle.config.engine import ResolvedConfig
from heddle.layout.cache_rows import DTYPE_BYTES, row_format
from heddle.layout.mesh import GROUP_KINDS, GroupKind
from heddle.step.topology import Topology

_STATES = 3
"""Context, new rows, and what they merge to."""
_COPIES = 3
"""Partials of queries that travelled: as they were computed, as they are sent, as they arrive."""
_SHIFTING = ("auto", "pass_q", "ring_kv")
"""Choices of the context exchange under which blocks may go round a DCP group."""


@dataclass(frozen=True)
class StepMemory:
    """The largest step of one rank."""

    resolved: ResolvedConfig
    topology: Topology
    global_rank: int

    @property
    def activation_bytes(self) -> int:
        """Rows inside the widest layer, or logits."""
        layers = self.topology.stage_layers(self.global_rank)
        widest = max((self._layer_bytes(layer) for layer in layers), default=0)
        return self._stream_bytes + max(widest, self._logits_bytes)

    @property
    def exchange_bytes(self) -> tuple[int, int]:
        """Shared memory that this rank maps once messages have filled it, and its own part of it;
        (0, 0) where ranks do not share any.
        """
        if self.resolved.cpu_comm_backend != "shm":
            return 0, 0
        mapped = own = 0
        for kind in GROUP_KINDS:
            num_ranks = self._members(kind)
            if num_ranks > 1:
                own += self._slot_bytes(kind)
                mapped += num_ranks * self._slot_bytes(kind)
        return mapped, own

    @cached_property
    def num_rows(self) -> int:
        """`M`: a share of a chunk, or the decode rows, which may lie on every rank."""
        scheduler, mesh = self.resolved.scheduler, self.topology.mesh
        shared = -(-scheduler.max_num_batched_tokens // mesh.pcp_size)
        return max(shared, min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens))

    def _members(self, kind: GroupKind) -> int:
        if kind == "ep" and not self.topology.has_expert_parallel:
            return 1
        return self.topology.mesh.group_size(kind)

    def _slot_bytes(self, kind: GroupKind) -> int:
        """What messages of a kind of group reach in one slot: stages hand rows on through a lane,
        all else begins in the two boxes.
        """
        if kind == "pp":
            return SEND_PIECES * PIECE_BYTES
        shifts = kind == "dcp" and self.topology.context_exchange in _SHIFTING
        return 2 * BOX_BYTES + (SHIFT_PIECES * PIECE_BYTES if shifts else 0)

    @property
    def _element(self) -> int:
        return DTYPE_BYTES[self.resolved.dtype]

    @property
    def _stream_bytes(self) -> int:
        """The residual stream and its norm, `[M, E]` each."""
        return 2 * self.num_rows * self.resolved.model.hidden_size * self._element

    @property
    def _logits_bytes(self) -> int:
        """`[sequences, vocabulary]`; over TP the gathered shares as well."""
        if not self.topology.mesh.is_last_stage(self.global_rank):
            return 0
        copies = 1 if self.topology.mesh.tp_size == 1 else 2
        drafts = self.resolved.speculative
        each = 1 if drafts is None else 1 + drafts.num_speculative_tokens
        rows = self.resolved.scheduler.max_num_seqs * each
        return copies * rows * self.resolved.model.vocab_size * self._element

    def _layer_bytes(self, layer: int) -> int:
        kind = self.resolved.model.kind_of(layer)
        mixer = self._recurrent_bytes if kind.mixer == "recurrent" else self._attention_bytes
        return max(mixer, max(self._feed_forwards(layer)) * self.num_rows * self._element)

    def _feed_forwards(self, layer: int) -> Iterator[int]:
        """Of a dense block, or of a mixture and its shared block, which run in turn."""
        model, tp_size = self.resolved.model, self.topology.mesh.tp_size
        width, moe = model.hidden_size, model.moe
        if moe is None or not moe.has_experts(layer):
            yield 3 * -(-model.intermediate_size // tp_size) + width
            return
        dealt = self.topology.has_expert_parallel
        inner = (
            moe.expert_intermediate_size if dealt else -(-moe.expert_intermediate_size // tp_size)
        )
        # All rows may meet in one expert: what enters, gate, up, product, what leaves, the sum.
        visits = 3 * moe.num_experts_per_token * width if dealt else 0
        yield 3 * inner + 3 * width + visits
        yield 3 * -(-moe.shared_width // tp_size) + 2 * width

    @cached_property
    def _attention_bytes(self) -> int:
        model, heads = self.resolved.model, self.topology.heads
        tp_rank = self.topology.mesh.coord_of(self.global_rank).tp
        stored = heads.num_stored_kv_heads(self.topology.mesh.slice_of(tp_rank))
        slices = self.topology.mesh.slice_size if self.topology.replicates_queries else 1
        lanes, row = heads.lanes, stored * model.stored_row_width
        projected = slices * lanes * model.head_dim + row
        turned = slices * lanes * model.stored_key_width + row
        leaving = lanes * model.output_head_dim + model.hidden_size
        own = self.num_rows * (projected + turned + leaving) * self._element
        states = _STATES * self.num_rows * lanes * model.partial_width * max(self._element, 4)
        return own + states + self._new_rows_bytes(stored) + self._context_bytes(stored)

    def _new_rows_bytes(self, stored: int) -> int:
        """Rows of the step as they are kept, gathered and put in order; then decoded, and expanded
        where rows are latent.
        """
        seen = self.resolved.scheduler.max_num_batched_tokens
        kept = row_format(self.resolved.model, self.resolved.kv_cache_dtype).row_bytes
        copies = 2 if self.topology.mesh.pcp_size > 1 else 1
        return seen * (copies * stored * kept + self._met_bytes(stored))

    def _context_bytes(self, stored: int) -> int:
        """Keys that come to queries, or queries that go to keys and their partials; whichever is
        more, since a step may choose. Nothing where all keys are here and are met as they lie.
        """
        model, mesh = self.resolved.model, self.topology.mesh
        if mesh.dcp_size == 1 and model.mla is None:
            return 0
        kept = row_format(model, self.resolved.kv_cache_dtype).row_bytes
        come = self.topology.context_workspace_tokens * (stored * kept + self._met_bytes(stored))
        if mesh.dcp_size == 1:
            return come
        lanes = mesh.dcp_size * self.num_rows * self.topology.heads.lanes
        partial = (model.partial_width + 1) * max(self._element, 4)
        return max(come, lanes * (model.stored_key_width * self._element + _COPIES * partial))

    def _met_bytes(self, stored: int) -> int:
        """A key and value as a query meets them."""
        model = self.resolved.model
        if model.mla is None:
            return stored * model.stored_row_width * self._element
        expanded = self.topology.heads.lanes * (model.head_dim + model.output_head_dim)
        return (model.stored_row_width + expanded) * self._element

    @cached_property
    def _recurrent_bytes(self) -> int:
        """Channels before and behind the convolution, gate, values and what leaves."""
        layout = self.topology.recurrent_layout
        assert layout is not None, "the model has such layers"
        tp_rank = self.topology.mesh.coord_of(self.global_rank).tp
        first, last = layout.head_range(tp_rank)
        values = (last - first) * layout.config.value_dim
        row = 2 * layout.num_channels(tp_rank) + 3 * values + self.resolved.model.hidden_size
        return self.num_rows * row * max(self._element, 4)
