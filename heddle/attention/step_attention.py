"""The attention of one step on one rank, the same flow for every layer and kind.

    new rows --PCP gather--> every rank sees each new row once --write where owned--> cache
      COPY rows          query over the slice -> local keys, bound per row -> exchange -> own heads
      distributed rows   self part (new keys, causal)  merged with  context part (cached keys)

Which calls are made follows from the plan, never from what this rank happens to hold.

Legend: `M` local rows, `n` distributed rows, `h` lanes, `P` PCP size, `Ks` stored kv heads, `W`
stored row width.
"""

from __future__ import annotations

import torch

from heddle.attention.context import StayingContext, TravellingContext
from heddle.attention.copy_rows import CopyRows
from heddle.attention.distributed_rows import DistributedRows
from heddle.attention.kinds.base import AttentionKind
from heddle.attention.kinds.gqa import GQAKind
from heddle.attention.kinds.mla import MLAKind
from heddle.attention.resources import AttentionResources
from heddle.attention.storage import SlotWrite
from heddle.step.localize import RankStep


class RankAttention:
    """`StepAttention` of one rank for one step; index tensors are made once and serve every
    layer.
    """

    def __init__(self, step: RankStep, resources: AttentionResources) -> None:
        self.step = step
        self.resources = resources
        self.write = SlotWrite.of(step.slot_mapping)
        self.distributed_order = torch.tensor(step.distributed_order)
        self.copy_rows = CopyRows(step, resources)
        self.distributed_rows = DistributedRows(
            step,
            resources,
            TravellingContext(step, resources),
            StayingContext(step, resources),
        )

    def gqa(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """See `StepAttention.gqa`."""
        return self._run(layer, GQAKind(query, key, value))

    def mla(
        self,
        layer: int,
        query_nope: torch.Tensor,
        query_rope: torch.Tensor,
        latent: torch.Tensor,
        key_up: torch.Tensor,
        value_up: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """See `StepAttention.mla`."""
        return self._run(layer, MLAKind(query_nope, query_rope, latent, key_up, value_up, scale))

    def _run(self, layer: int, kind: AttentionKind) -> torch.Tensor:
        """`[M, h, Dv]` in the dtype of the queries."""
        new_rows = self._share_new_rows(layer, kind.rows)
        parts: list[torch.Tensor] = []
        if self.step.num_copy > 0:
            parts.append(self.copy_rows.run(layer, kind))
        if self.step.num_distributed > 0:
            parts.append(self.distributed_rows.run(layer, kind, new_rows))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.to(kind.rows.dtype)

    def _share_new_rows(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Gather the distributed rows over PCP and write what is owned here.

        Args:
            layer: index of the layer.
            rows: `[M, Ks, W]`, this rank's own new rows.
        Returns:
            `[T_distributed, Ks, W]`: all distributed rows of the step, in global order, as the
            cache will give them back: a narrow cache rounds once, for every layout alike.
        """
        resources, num_copy = self.resources, self.step.num_copy
        dtype, rows = rows.dtype, rows.to(resources.store.dtype)
        pcp = resources.groups.pcp
        if pcp.world_size == 1 or self.step.num_distributed == 0:
            resources.store.write(layer, self.write, rows)
            return rows[num_copy:].index_select(0, self.distributed_order).to(dtype)
        gathered = pcp.all_gather(rows[num_copy:].contiguous()).flatten(0, 1)  # [P*n, Ks, W]
        seen = torch.cat((rows[:num_copy], gathered)) if num_copy else gathered
        resources.store.write(layer, self.write, seen)
        return gathered.index_select(0, self.distributed_order).to(dtype)
