"""A mixture of experts: its weights, and what it must give for one row."""

from __future__ import annotations

from dataclasses import replace

import torch

from heddle.config.model import MoEConfig

EXPERTS, WIDTH, INNER = 6, 8, 5
V2 = MoEConfig(
    num_experts=EXPERTS,
    num_experts_per_token=2,
    num_shared_experts=1,
    expert_intermediate_size=INNER,
    first_dense_layers=0,
    scoring="softmax",
    normalize_top_k=False,
    routed_scaling_factor=1.5,
)
V3 = replace(
    V2,
    scoring="sigmoid",
    normalize_top_k=True,
    top_k_method="noaux_tc",
    num_groups=3,
    top_k_groups=2,
)


def random_tensors(config: MoEConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = {"m.gate.weight": (EXPERTS, WIDTH)}
    if config.top_k_method == "noaux_tc":
        shapes["m.gate.e_score_correction_bias"] = (EXPERTS,)  # type: ignore[assignment]
    blocks = [f"m.experts.{expert}" for expert in range(EXPERTS)] + ["m.shared_experts"]
    for block in blocks:
        shapes |= {
            f"{block}.gate_proj.weight": (INNER, WIDTH),
            f"{block}.up_proj.weight": (INNER, WIDTH),
            f"{block}.down_proj.weight": (WIDTH, INNER),
        }
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


def feed_forward(tensors: dict[str, torch.Tensor], block: str, x: torch.Tensor) -> torch.Tensor:
    gate, up, down = (tensors[f"{block}.{side}_proj.weight"] for side in ("gate", "up", "down"))
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def mixture_row(
    tensors: dict[str, torch.Tensor], x: torch.Tensor, experts: list[int], weights: torch.Tensor
) -> torch.Tensor:
    """`[E]` -> `[E]`: the shared block, then the experts of the row, one by one."""
    out = feed_forward(tensors, "m.shared_experts", x)
    for expert, weight in zip(experts, weights, strict=True):
        out = out + weight * feed_forward(tensors, f"m.experts.{expert}", x)
    return out
