"""How much arithmetic the rows of a step are, per layer and rank: estimates for choices, not laws.

Dense layers cost two flops per weight and row, attention two per query element, value element and
key. Choices need the ratio of these to the price of a call, so an average layer is good enough.

Legend: `C` cached tokens, `E` hidden size, `H`, `K` query and kv heads, `Dq`, `Do` widths.
"""

from __future__ import annotations

from dataclasses import dataclass

from heddle.config.link_costs import LinkCosts
from heddle.config.model import ModelConfig
from heddle.layout.cache_rows import DTYPE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """The average layer of a model on one tensor-parallel rank."""

    row_flops: float
    """Dense flops of one row."""
    weight_bytes: float
    """Weights that a step reads, however few its rows."""
    key_flops: float
    """Attention flops of one row and one key."""

    @classmethod
    def of(cls, model: ModelConfig, tp_size: int, dtype: str) -> LayerWork:
        """Estimate from shapes alone."""
        attention = model.hidden_size * model.head_dim * 2 * model.num_query_heads
        attention += model.hidden_size * model.stored_row_width * model.num_kv_heads
        inner = float(model.intermediate_size)
        if model.moe is not None:
            visited = model.moe.num_experts_per_token * model.moe.expert_intermediate_size
            inner = float(visited + model.moe.shared_width)
        weights = (attention + 3 * model.hidden_size * inner) / tp_size
        heads = -(-model.num_query_heads // tp_size)
        return cls(
            row_flops=2 * weights,
            weight_bytes=weights * DTYPE_BYTES[dtype],
            key_flops=2.0 * heads * (model.head_dim + model.output_head_dim),
        )

    def dense_seconds(self, num_rows: int, costs: LinkCosts) -> float:
        """Time of the dense layers: bound by arithmetic, or by reading the weights once."""
        if num_rows == 0:
            return 0.0
        return max(num_rows * self.row_flops / costs.flops, self.weight_bytes / costs.memory)


def row_keys(cached: int, start: int, end: int) -> int:
    """Keys met by new rows [start, end) after `cached` tokens: `(b-a) C + (b(b+1) - a(a+1)) / 2`.

    Example:
        >>> row_keys(0, 0, 4), row_keys(10, 2, 4)
        (10, 27)
    """
    return (end - start) * cached + (end * (end + 1) - start * (start + 1)) // 2
