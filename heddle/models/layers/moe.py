"""A mixture of experts: each row visits a few feed-forward blocks, chosen by a router.

Every rank holds a slice of *every* expert's inner dimension, so all ranks compute the same routing
on the same rows and one sum over ranks closes the layer, exactly as for a dense block. Shared
experts see every row and add to the same sum.

Legend: `M` rows, `E` hidden size, `X` experts, `k` experts per row.

Source: DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437), and their model code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from heddle.config.model import MoEConfig
from heddle.models.layers.mlp import MLP, gated, load_mlp
from heddle.models.layers.shard import Shard
from heddle.models.weights.loader import WeightLoader


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses experts and their weights, in float32 or wider."""

    config: MoEConfig
    weight: torch.Tensor  # [X, E] float32 or float64
    correction: torch.Tensor | None  # [X], added for the choice alone (noaux_tc)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[M, E]` -> expert ids `[M, k]` and weights `[M, k]`."""
        config = self.config
        logits = functional.linear(x.to(self.weight.dtype), self.weight)
        scores = logits.sigmoid() if config.scoring == "sigmoid" else logits.softmax(dim=-1)
        preference = scores if self.correction is None else scores + self.correction
        if config.top_k_method != "greedy":
            preference = self._within_best_groups(preference)
        experts = preference.topk(config.num_experts_per_token, dim=-1).indices
        weights = scores.gather(1, experts)
        if config.normalize_top_k:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return experts, weights * config.routed_scaling_factor

    def _within_best_groups(self, preference: torch.Tensor) -> torch.Tensor:
        """Rule out experts outside the best groups: V2 rates a group by its best one, V3 by two."""
        config = self.config
        size = config.num_experts // config.num_groups
        groups = preference.view(
            len(preference), config.num_groups, size
        )  # [M, groups, X / groups]
        num_best = 2 if config.top_k_method == "noaux_tc" else 1
        num_best = min(num_best, groups.shape[2])
        rating = groups.topk(num_best, dim=-1).values.sum(dim=-1)
        chosen = rating.topk(config.top_k_groups, dim=-1).indices
        is_out = torch.ones_like(rating, dtype=torch.bool).scatter_(1, chosen, False)
        return groups.masked_fill(is_out[..., None], float("-inf")).flatten(1)


@dataclass(frozen=True, slots=True)
class MoE:
    """Routed and shared experts, this rank's share of each."""

    router: Router
    gate_up: torch.Tensor  # [X, 2i, E]
    down: torch.Tensor  # [X, E, i]
    shared: MLP | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[M, E]` -> this rank's part of the sum, `[M, E]`."""
        out = torch.zeros_like(x) if self.shared is None else self.shared(x)
        experts, weights = self.router(x)
        # Visits sorted by expert: each expert multiplies all its rows at once.
        order = experts.flatten().argsort(stable=True)
        rows = order // experts.shape[1]
        row_weights = weights.flatten()[order].to(x.dtype)[:, None]
        counts = experts.flatten().bincount(minlength=self.gate_up.shape[0]).tolist()
        start = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            visits = slice(start, start + count)
            inner = gated(functional.linear(x[rows[visits]], self.gate_up[expert]))
            result = functional.linear(inner, self.down[expert])
            out.index_add_(0, rows[visits], result.mul_(row_weights[visits]))
            start += count
        return out


def load_moe(
    loader: WeightLoader, shard: Shard, name: str, hidden_size: int, config: MoEConfig
) -> MoE:
    """Load a rank's share of the block called `name`."""
    inner = config.expert_intermediate_size
    start, end = shard.cut(inner)
    width = end - start
    gate_up = loader.zeros(config.num_experts, 2 * width, hidden_size)
    down = loader.zeros(config.num_experts, hidden_size, width)
    for expert in range(config.num_experts):
        prefix = f"{name}.experts.{expert}"
        into, out_of = (inner, hidden_size), (hidden_size, inner)
        loader.fill(gate_up[expert, :width], f"{prefix}.gate_proj.weight", into, (start, end))
        loader.fill(gate_up[expert, width:], f"{prefix}.up_proj.weight", into, (start, end))
        loader.fill(down[expert], f"{prefix}.down_proj.weight", out_of, cols=(start, end))
    shared = None
    if config.num_shared_experts:
        shared_size = config.num_shared_experts * inner
        shared = load_mlp(loader, shard, f"{name}.shared_experts", hidden_size, shared_size)
    return MoE(_load_router(loader, name, hidden_size, config), gate_up, down, shared)


def _load_router(loader: WeightLoader, name: str, hidden_size: int, config: MoEConfig) -> Router:
    # A choice between experts flips on the rounding of a 16-bit score, so scores are never narrower
    # than float32.
    wide = torch.promote_types(loader.dtype, torch.float32)
    weight = loader.load(f"{name}.gate.weight", (config.num_experts, hidden_size), dtype=wide)
    correction = None
    if config.top_k_method == "noaux_tc":
        shape = (config.num_experts,)
        correction = loader.load(f"{name}.gate.e_score_correction_bias", shape, dtype=wide)
    return Router(config, weight, correction)
