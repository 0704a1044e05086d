"""How ranks are arranged and how they exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CommBackend = Literal["auto", "ag_rs", "ag_ar", "a2a", "a2a_fine"]
RowSharding = Literal["auto", "copy", "whole"]
ContextExchange = Literal["auto", "gather_q", "pass_q", "gather_kv", "ring_kv"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Degrees of every axis and the choice of exchanges. Legality: `heddle.layout.rules`."""

    tensor_parallel_size: int = 1
    """Ranks over heads and hidden dimensions."""
    prefill_context_parallel_size: int = 1
    """Ranks over the query rows of a prefill; multiplies the world."""
    decode_context_parallel_size: int = 1
    """Ranks over the stored KV; a view of TP x PCP, adds no ranks."""
    pipeline_parallel_size: int = 1
    """Stages of layers; multiplies the world."""
    data_parallel_size: int = 1
    """Replicas; multiplies the world."""
    kv_interleave_size: int = 1
    """Consecutive tokens a rank owns before ownership moves on; divides the block size."""
    dcp_comm_backend: CommBackend = "auto"
    """How partial results return when queries travel."""
    cp_context_exchange: ContextExchange = "auto"
    """How prefill rows meet cached context that is sharded."""
    dcp_q_replicate: bool = False
    """Replicate the query projection inside a DCP group, saving the query gather."""
    context_workspace_tokens: int | None = None
    """Rows of gathered context held at once; None: four chunks."""
    enable_expert_parallel: bool = False
    """Deal whole experts over DP x PCP x TP instead of cutting each over TP."""
    cp_start_rank_rotation: bool = False
    """Start each block chain on the rank of its DCP group that holds least."""
    cp_lanes: int | None = None
    """Canonical lanes in which partial results merge: equal bits for every DCP that divides it."""
    decode_row_sharding: RowSharding = "auto"
    """Whether PCP ranks share the decode rows out (`whole`) or all compute them (`copy`)."""

    @property
    def world_size(self) -> int:
        """Number of ranks; DCP is a view and is absent."""
        return (
            self.data_parallel_size
            * self.pipeline_parallel_size
            * self.prefill_context_parallel_size
            * self.tensor_parallel_size
        )
