"""What a plan needs to know beside the batch; constant while an engine runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from heddle.config.engine import ResolvedConfig
from heddle.config.model import ModelConfig
from heddle.layout.heads import HeadLayout
from heddle.layout.kv import KVLayout
from heddle.layout.mesh import Mesh
from heddle.layout.rows import RowRequest, classify

RowPolicy = Callable[[int, int, int], RowRequest]
"""(index in the batch, new rows q, pcp_size) -> where the rows live. A pure function of global
facts.
"""


def default_row_policy(index: int, num_rows: int, pcp_size: int) -> RowRequest:
    """Decode rows and prompts too short to cut are copied, everything else is split."""
    del index
    return RowRequest(num_rows=num_rows, row_class=classify(num_rows, pcp_size))


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Mesh, heads, ownership and the chosen exchanges."""

    mesh: Mesh
    heads: HeadLayout
    model: ModelConfig
    interleave_size: int
    block_size: int
    dtype: str
    kv_cache_dtype: str
    copy_exchange: str
    """How partials of COPY rows return: `local`, `ag_rs`, `ag_ar` or `a2a`."""
    context_exchange: str
    """How distributed rows meet cached context: `local`, `gather_q` or `gather_kv`."""
    merge_exchange: str
    """How partials return under `gather_q`."""
    context_workspace_tokens: int
    """Rows of gathered context held at once."""
    row_policy: RowPolicy = field(default=default_row_policy)

    @classmethod
    def from_resolved(cls, resolved: ResolvedConfig) -> Topology:
        """The topology of a resolved configuration; the layout is trusted to be legal."""
        parallel = resolved.parallel
        mesh = Mesh(
            tp_size=parallel.tensor_parallel_size,
            pcp_size=parallel.prefill_context_parallel_size,
            dcp_size=parallel.decode_context_parallel_size,
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
            copy_exchange=select_copy_exchange(parallel.dcp_comm_backend, mesh),
            context_exchange=select_context_exchange(parallel.cp_context_exchange, mesh),
            merge_exchange="ag_rs"
            if parallel.dcp_comm_backend == "auto"
            else parallel.dcp_comm_backend,
            context_workspace_tokens=resolved.context_workspace_tokens,
        )

    @cached_property
    def _layouts(self) -> tuple[KVLayout, ...]:
        return tuple(
            KVLayout(self.mesh.dcp_size, self.interleave_size, self.block_size, start_rank)
            for start_rank in range(self.mesh.dcp_size)
        )

    def kv_layout(self, start_rank: int = 0) -> KVLayout:
        """The interned layout of a block chain that starts at `start_rank`."""
        return self._layouts[start_rank]

    @cached_property
    def _fingerprints(self) -> tuple[int, ...]:
        slices = self.mesh.num_slices
        return tuple(layout.fingerprint(slices, self.kv_cache_dtype) for layout in self._layouts)

    def fingerprint(self, start_rank: int = 0) -> int:
        """Fingerprint that every object made for this layout carries."""
        return self._fingerprints[start_rank]


def select_copy_exchange(asked: str, mesh: Mesh) -> str:
    """The way back for COPY rows: as asked; else `ag_ar` where PCP replicas need the result,
    `ag_rs` elsewhere.
    """
    if mesh.dcp_size == 1:
        return "local"
    if asked != "auto":
        return asked
    return "ag_ar" if mesh.num_replicas > 1 else "ag_rs"


def select_context_exchange(asked: str, mesh: Mesh) -> str:
    """How prefill rows meet cached context: as asked; `gather_kv` unless told otherwise."""
    if mesh.dcp_size == 1:
        return "local"
    return "gather_kv" if asked == "auto" else asked
