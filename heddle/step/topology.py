"""What a plan needs to know beside the batch; constant while an engine runs."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from heddle.config.engine import ResolvedConfig
from heddle.config.link_costs import LinkCosts
from heddle.config.model import ModelConfig
from heddle.layout.cache_groups import CacheGroup, create_cache_groups
from heddle.layout.cut import cut
from heddle.layout.heads import HeadLayout
from heddle.layout.kv import KVLayout
from heddle.layout.mesh import Mesh
from heddle.layout.recurrent_heads import RecurrentLayout
from heddle.step.batch import ScheduledRequest
from heddle.step.identity import layout_id
from heddle.step.placement import Placed, place_rows

RowPolicy = Callable[[Sequence[ScheduledRequest], "Topology"], Placed]
"""(requests in order, topology) -> where the rows of each live, and why. A pure function of global
facts.
"""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Mesh, heads, ownership and the exchanges that were asked for."""

    mesh: Mesh
    heads: HeadLayout
    model: ModelConfig
    interleave_size: int
    block_size: int
    dtype: str
    kv_cache_dtype: str
    return_exchange: str = "auto"
    """How partials return: `ag_rs`, `ag_ar`, `a2a`, `a2a_fine`, or `auto`."""
    context_exchange: str = "auto"
    """How distributed rows meet cached context: `gather_q`, `pass_q`, `gather_kv`, `ring_kv`, or
    `auto`.
    """
    context_workspace_tokens: int
    """Rows of gathered context held at once."""
    replicates_queries: bool = False
    """Ranks of a slice project the queries of all of it."""
    has_expert_parallel: bool = False
    lanes: int | None = None
    """`Y`: canonical lanes of a merge; None: one per rank."""
    decode_row_sharding: str = "auto"
    costs: LinkCosts = field(default_factory=LinkCosts)
    layout_id: int = 0
    """Of everything that ranks have in common; see `heddle.step.identity`."""
    row_policy: RowPolicy = place_rows

    @classmethod
    def from_resolved(cls, resolved: ResolvedConfig) -> Topology:
        """The topology of a resolved configuration; the layout is trusted to be legal."""
        parallel = resolved.parallel
        mesh = Mesh(
            tp_size=parallel.tensor_parallel_size,
            pcp_size=parallel.prefill_context_parallel_size,
            dcp_size=parallel.decode_context_parallel_size,
            pp_size=parallel.pipeline_parallel_size,
            dp_size=parallel.data_parallel_size,
        )
        return cls(
            mesh=mesh,
            heads=HeadLayout(
                num_query_heads=resolved.model.num_query_heads,
                num_kv_heads=resolved.model.num_kv_heads,
                tp_size=mesh.tp_size,
                slice_size=mesh.slice_size,
            ),
            model=resolved.model,
            interleave_size=parallel.kv_interleave_size,
            block_size=resolved.cache.block_size,
            dtype=resolved.dtype,
            kv_cache_dtype=resolved.kv_cache_dtype,
            return_exchange=parallel.dcp_comm_backend,
            context_exchange=parallel.cp_context_exchange,
            context_workspace_tokens=resolved.context_workspace_tokens,
            replicates_queries=parallel.dcp_q_replicate,
            has_expert_parallel=parallel.enable_expert_parallel and resolved.model.moe is not None,
            lanes=parallel.cp_lanes,
            decode_row_sharding=parallel.decode_row_sharding,
            costs=resolved.link_costs,
            layout_id=layout_id(resolved),
        )

    @cached_property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The cache groups of the model."""
        return create_cache_groups(self.model, self.mesh.dcp_size, self.block_size)

    @cached_property
    def group_of_layer(self) -> dict[int, int]:
        """Index of the cache group of each attention layer."""
        return {layer: index for index, group in enumerate(self.groups) for layer in group.layers}

    @cached_property
    def _layouts(self) -> tuple[tuple[KVLayout, ...], ...]:
        return tuple(
            tuple(
                group.layout(self.interleave_size, self.block_size, start_rank)
                for start_rank in range(self.mesh.dcp_size)
            )
            for group in self.groups
        )

    def kv_layout(self, group: int = 0, start_rank: int = 0) -> KVLayout:
        """The interned layout of a group's block chains that start at `start_rank`."""
        return self._layouts[group][start_rank]

    @cached_property
    def _fingerprints(self) -> tuple[int, ...]:
        return tuple(self._hash_layouts(start_rank) for start_rank in range(self.mesh.dcp_size))

    def fingerprint(self, start_rank: int = 0) -> int:
        """Fingerprint that every object made for these layouts carries."""
        return self._fingerprints[start_rank]

    def _hash_layouts(self, start_rank: int) -> int:
        hasher = hashlib.blake2b(digest_size=8)
        for index, group in enumerate(self.groups):
            layout = self.kv_layout(index, start_rank)
            value = layout.fingerprint(self.mesh.num_slices, self.kv_cache_dtype)
            rule = group.visibility
            hasher.update(struct.pack("<Q", value))
            hasher.update(f"{rule.kind} {rule.size} {rule.num_first} {group.layers}".encode())
        return int.from_bytes(hasher.digest(), "little")

    def group_position(self, group: int, global_rank: int) -> int:
        """Place of a rank among those that share a sequence's keys in a group."""
        if self.groups[group].world_size == 1:
            return 0
        return self.dcp_position(global_rank)

    @cached_property
    def dcp_groups(self) -> tuple[tuple[int, ...], ...]:
        """`Mesh.groups("dcp")`, made once: each step asks several times."""
        return self.mesh.groups("dcp")

    @cached_property
    def _dcp_positions(self) -> dict[int, int]:
        return {rank: place for group in self.dcp_groups for place, rank in enumerate(group)}

    def dcp_position(self, global_rank: int) -> int:
        """`Mesh.position("dcp", global_rank)`."""
        return self._dcp_positions[global_rank]

    @cached_property
    def recurrent_layout(self) -> RecurrentLayout | None:
        """How recurrent layers are cut over TP; None for a model without any."""
        recurrent = self.model.recurrent
        return None if recurrent is None else RecurrentLayout(recurrent, self.mesh.tp_size)

    def recurrent_layers(self, layers: range) -> tuple[int, ...]:
        """The recurrent layers of a stage."""
        return tuple(i for i in layers if self.model.kind_of(i).mixer == "recurrent")

    def tensor_of_layer(self, layers: range) -> dict[int, int]:
        """Pool tensor of each attention layer of a stage: its place among those of its group."""
        found: dict[int, int] = {}
        for group in self.groups:
            held = [layer for layer in group.layers if layer in layers]
            found.update({layer: place for place, layer in enumerate(held)})
        return found

    def stage_layers(self, global_rank: int) -> range:
        """Layers of a rank's pipeline stage."""
        return self.layers_of_stage(self.mesh.coord_of(global_rank).pp)

    def layers_of_stage(self, stage: int) -> range:
        """Layers [floor(L * i / pp), floor(L * (i + 1) / pp))."""
        return range(*cut(self.model.num_layers, self.mesh.pp_size, stage))
