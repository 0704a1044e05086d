"""A mixture of experts: each row visits a few feed-forward blocks, chosen by a router.

Either every rank holds a slice of *every* expert's inner dimension: all ranks compute the same
routing on the same rows and one sum over TP closes the layer, exactly as for a dense block. Or
whole experts are dealt to the ranks of a stage, and rows travel to them (`dispatch`): a row is sent
by one of the ranks that hold it, the others have zeros there, and the same sum over TP closes the
layer. A shared block sees every row and adds to that sum.

Legend: `M` rows, `E` hidden size, `X` experts, `k` experts per row, `n` visits of one expert.

Source: DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437); the model code of Mixtral, Qwen,
gpt-oss and Llama 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from heddle.attention.base import StepOps
from heddle.config.model import MoEConfig
from heddle.models.layers.dispatch import Dispatch
from heddle.models.layers.expert_group import ExpertGroup, ExpertLoad
from heddle.models.layers.experts import (
    GATE_UP_DOWN,
    ExpertStorage,
    ExpertWeights,
    load_experts,
)
from heddle.models.layers.mlp import MLP, load_mlp
from heddle.models.layers.router import Router, load_router
from heddle.models.layers.shard import Shard
from heddle.models.weights.loader import WeightLoader


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The block that every row visits, perhaps behind a gate of one number per row."""

    block: MLP
    gate: torch.Tensor | None = None  # [1, E]

    def __call__(self, x: torch.Tensor, ops: StepOps | None) -> torch.Tensor:
        """`[M, E]` -> this rank's part of the sum, `[M, E]`, a fresh tensor."""
        out = self.block(x, ops)
        return out if self.gate is None else out.mul_(functional.linear(x, self.gate).sigmoid_())


@dataclass(frozen=True, slots=True)
class MoE:
    """Routed and shared experts, this rank's share of each."""

    router: Router
    experts: ExpertWeights
    shared: SharedExpert | None

    def __call__(self, x: torch.Tensor, ops: StepOps | None = None) -> torch.Tensor:
        """`[M, E]` -> this rank's part of the sum, `[M, E]`."""
        out = torch.zeros_like(x) if self.shared is None else self.shared(x, ops)
        experts, weights = self.router(x)
        self.add_visits(out, x, experts, weights)
        return out

    def add_visits(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        load: ExpertLoad | None = None,
    ) -> None:
        """Add to `out` what the experts held here make of `x`, by ascending id.

        Args:
            out: `[M, E]`, of the dtype in which the sum is formed.
            x: `[M, E]`.
            experts: `[M, k]` ids; those of other ranks are passed over.
            weights: `[M, k]`.
            load: takes note of the rows of each expert.
        """
        scales_input = self.router.config.scales_input
        for expert, rows, row_weights in visits(experts, weights, self.router.config.num_experts):
            if not self.experts.holds(expert):
                continue
            if load is not None:
                load.add(expert, len(rows))
            weight = row_weights[:, None]
            entering = x[rows] * weight.to(x.dtype) if scales_input else x[rows]
            leaving = self.experts.run(entering, expert).to(out.dtype)
            out.index_add_(0, rows, leaving if scales_input else leaving.mul_(weight.to(out.dtype)))


@dataclass(frozen=True, slots=True)
class DealtMoE:
    """The same with whole experts, to which rows travel."""

    local: MoE
    """Router, the experts of this rank, and its share of the shared block."""
    group: ExpertGroup

    def __call__(self, x: torch.Tensor, ops: StepOps) -> torch.Tensor:
        """`[M, E]` -> this rank's part of the sum, `[M, E]`."""
        dealt, pcp = ops.dealt_rows, self.group.pcp
        routed = torch.zeros_like(x)
        routed.index_copy_(0, dealt.rows, self._visit(x.index_select(0, dealt.rows)))
        if dealt.num_copy > 0 and pcp.world_size > 1:
            # One PCP rank has the sum of a row, the others zeros: nothing is rounded here.
            routed[: dealt.num_copy] = pcp.all_reduce(routed[: dealt.num_copy])
        shared = self.local.shared
        return routed if shared is None else shared(x, ops).add_(routed)

    def _visit(self, x: torch.Tensor) -> torch.Tensor:
        """`[n, E]` rows, each sent by this rank alone -> what their experts add up to, `[n, E]`."""
        experts, weights = self.local.router(x)
        dispatch = Dispatch(self.group.ep, experts, self.local.router.config.num_experts)
        arrived = dispatch.send(x, weights)
        sums = torch.zeros_like(arrived.rows, dtype=weights.dtype)
        self.local.add_visits(sums, arrived.rows, arrived.experts, arrived.weights, self.group.load)
        return dispatch.collect(sums).to(x.dtype)


def visits(
    experts: torch.Tensor, weights: torch.Tensor, num_experts: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Visits grouped by expert, so that each expert multiplies all its rows at once.

    Args:
        experts: `[M, k]` ids below `num_experts`.
        weights: `[M, k]`.
        num_experts: `X`.

    Yields:
        Expert id, rows `[n]` int64 in ascending order, their weights `[n]`; only visited experts.
    """
    order = experts.flatten().argsort(stable=True)
    rows, sorted_weights = order // experts.shape[1], weights.flatten()[order]
    start = 0
    for expert, count in enumerate(experts.flatten().bincount(minlength=num_experts).tolist()):
        if count:
            yield expert, rows[start : start + count], sorted_weights[start : start + count]
        start += count


@dataclass(frozen=True, slots=True)
class MoENames:
    """What a checkpoint calls the parts of a mixture, and how it stores its experts."""

    router: str = "gate"
    correction: str | None = None
    """Added to scores for the choice alone; None: the router's own tensor."""
    experts: str = "experts"
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"
    storage: ExpertStorage = GATE_UP_DOWN


DEEPSEEK_NAMES = MoENames()
QWEN_NAMES = MoENames(shared="shared_expert")


def load_moe(
    loader: WeightLoader,
    shard: Shard,
    name: str,
    hidden_size: int,
    config: MoEConfig,
    names: MoENames = DEEPSEEK_NAMES,
) -> MoE | DealtMoE:
    """Load a rank's share of the block called `name`."""
    experts = load_experts(
        loader, shard, f"{name}.{names.experts}", hidden_size, config, names.storage
    )
    correction = None if names.correction is None else f"{name}.{names.correction}"
    local = MoE(
        load_router(loader, f"{name}.{names.router}", hidden_size, config, correction),
        experts,
        _load_shared(loader, shard, name, hidden_size, config, names),
    )
    return local if shard.experts is None else DealtMoE(local, shard.experts)


def _load_shared(
    loader: WeightLoader,
    shard: Shard,
    name: str,
    hidden_size: int,
    config: MoEConfig,
    names: MoENames,
) -> SharedExpert | None:
    if not config.shared_width:
        return None
    block = load_mlp(loader, shard, f"{name}.{names.shared}", hidden_size, config.shared_width)
    if not config.has_shared_gate:
        return SharedExpert(block)
    return SharedExpert(block, loader.load(f"{name}.{names.shared_gate}.weight", (1, hidden_size)))
