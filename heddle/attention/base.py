"""What a model asks of a step: one call per layer, whatever the layout.

Legend: `M` this rank's rows in the step (padded), `h` query-head lanes of this rank (ceil(H/tp)),
`Ks` kv heads that this rank's slice stores, `D` head width, `n` rows sent to experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from heddle.attention.adapter_rows import AdapterRows
from heddle.attention.recurrent.terms import RecurrentInputs
from heddle.step.timeline import Part


@dataclass(frozen=True, slots=True, eq=False)
class IndexRows:
    """What the indexer of a sparse layer makes of this rank's rows; whole on every TP rank.

    A query scores a key by `sum_j weight_j * max(0, query_j . key)` over `Hi` heads of width `Di`.
    """

    index_query: torch.Tensor
    """`[M, Hi, Di]`, rotary applied."""
    index_key: torch.Tensor
    """`[M, Di]`, normalised, rotary applied; stored beside the latent."""
    weights: torch.Tensor
    """`[M, Hi]`, float32 or wider, every constant included."""


@dataclass(frozen=True, slots=True, eq=False)
class DealtRows:
    """The rows that this rank sends to their experts; each row of a step is sent by one rank."""

    rows: torch.Tensor
    """`[n]` int64, ascending: places among the `M` rows; never pads."""
    num_copy: int
    """Leading rows that lie on every PCP rank, and are sent by any of them."""


class StepOps(Protocol):
    """One step on one rank: writes new KV, exchanges, attends, merges."""

    @property
    def adapters(self) -> AdapterRows | None:
        """The rows that go through adapters; None: there are none."""
        ...

    @property
    def dealt_rows(self) -> DealtRows:
        """For layers whose experts are dealt out whole."""
        ...

    def enter(self, part: Part) -> None:
        """The model goes on to another part of a layer; said for timelines."""
        ...

    def repeated(
        self, inputs: Sequence[torch.Tensor], compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """What `compute` returns, launched again without its Python where a step of the same
        looks has computed it before.

        Args:
            inputs: every tensor of the step that it reads, besides what these operations give.
            compute: a pass over layers that do the same to any rows of equal shapes.

        Returns:
            A tensor that a later step may overwrite.
        """
        ...

    def gqa(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Grouped-query attention; scale, soft cap and visible keys are the model's.

        Args:
            layer: index of the layer.
            query: `[M, h, D]`, rotary applied; lanes beyond this rank's own heads are ignored.
                `[M, k * h, D]` where queries are replicated: lanes of all `k` ranks of its slice.
            key: `[M, Ks, D]`, rotary applied, all kv heads of this rank's slice.
            value: `[M, Ks, D]`.
            sinks: `[h]`: a learned logit per lane that joins the softmax and carries no value.
        Returns:
            `[M, h, D]`; pad rows and pad lanes hold zeros.
        """
        ...

    def recurrent(self, layer: int, inputs: RecurrentInputs) -> torch.Tensor:
        """A recurrent layer: the state of each sequence is read and taken forward.

        Args:
            layer: index of the layer.
            inputs: this rank's rows, whose heads and channels are those of its TP rank.
        Returns:
            `[M, heads, V]` in float32 or wider; pad rows hold zeros.
        """
        ...

    def mla(
        self,
        layer: int,
        query_nope: torch.Tensor,
        query_rope: torch.Tensor,
        latent: torch.Tensor,
        key_up: torch.Tensor,
        value_up: torch.Tensor,
        scale: float,
        index: IndexRows | None = None,
    ) -> torch.Tensor:
        """Multi-head latent attention.

        Args:
            layer: index of the layer.
            query_nope: `[M, h, nope]`; where queries are replicated `[M, k * h, nope]`, and so with
                `query_rope` and `key_up`.
            query_rope: `[M, h, rope]`, rotary applied.
            latent: `[M, lat + rope]`: normalised latent, then the rotary key shared by all heads.
            key_up: `[h, nope, lat]`, key up-projection of this rank's heads.
            value_up: `[h, lat, v]`, value up-projection of this rank's heads.
            scale: softmax scale, any rotary factor included.
            index: of a sparse layer: each row attends to its best `SparseConfig.top_k` keys.
        Returns:
            `[M, h, v]`; pad rows and pad lanes hold zeros.
        """
        ...
