"""Chooses the experts that each row visits, and their weights.

Legend: `M` rows, `E` hidden size, `X` experts, `k` experts per row.

Source: DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437); the model code of Mixtral, Qwen,
gpt-oss and Llama 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from heddle.config.model import MoEConfig
from heddle.models.weights.loader import WeightLoader


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses experts and their weights, in float32 or wider."""

    config: MoEConfig
    weight: torch.Tensor  # [X, E] float32 or float64
    correction: torch.Tensor | None  # [X], added for the choice alone (noaux_tc)
    bias: torch.Tensor | None = None  # [X], of the logits

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[M, E]` -> expert ids `[M, k]` and weights `[M, k]`."""
        config = self.config
        logits = functional.linear(x.to(self.weight.dtype), self.weight, self.bias)
        scores = logits.sigmoid() if config.scoring == "sigmoid" else logits.softmax(dim=-1)
        preference = logits if config.chooses_by_logits else scores
        if self.correction is not None:
            preference = preference + self.correction
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


def load_router(
    loader: WeightLoader,
    name: str,
    hidden_size: int,
    config: MoEConfig,
    correction: str | None = None,
) -> Router:
    """Load a router, the same on every rank.

    Args:
        loader: of the checkpoint.
        name: of the router's tensors.
        hidden_size: `E`.
        config: of the mixture.
        correction: name of the correction, where a mixture has one; None: it is the router's.
    """
    # A choice between experts flips on the rounding of a 16-bit score, so scores are never narrower
    # than float32.
    wide = torch.promote_types(loader.dtype, torch.float32)

    def vector(tensor: str) -> torch.Tensor:
        return loader.load(tensor, (config.num_experts,), dtype=wide)

    weight = loader.load(f"{name}.weight", (config.num_experts, hidden_size), dtype=wide)
    has_correction = config.top_k_method == "noaux_tc"
    correction = correction or f"{name}.e_score_correction_bias"
    return Router(
        config,
        weight,
        correction=vector(correction) if has_correction else None,
        bias=vector(f"{name}.bias") if config.has_router_bias else None,
    )
