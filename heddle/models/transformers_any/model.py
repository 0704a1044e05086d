"""A causal model of the transformers library as a `Model` of ours.

    forward     our lookup -> the library's decoder over `[1, M, E]` -> hidden rows
    logits      the library's own head over given rows: its decoder is replaced by one that returns
                what it is given, so that factors and caps of logits are the library's

Legend: `M` rows, `R` rows that need logits, `E` hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from heddle.attention.base import StepOps
from heddle.errors import UnsupportedError
from heddle.models.base import RowInputs
from heddle.models.layers.embedding import VocabularyShard
from heddle.models.layers.shard import Shard
from heddle.models.transformers_any.port import StepPort


class TransformersModel:
    """A `Model`: the library's modules with our lookup, attention, sums and gathers.

    Args:
        model: the causal model, filled; its decoder is taken out of it.
        port: of its attention layers.
        embedding: the lookup.
        factor: on looked-up rows.
    """

    def __init__(
        self, model: Any, port: StepPort, embedding: VocabularyShard, factor: float
    ) -> None:
        self._decoder = model.base_model
        self._head = model
        self._port = port
        self._embedding = embedding
        self._factor = factor
        setattr(model, model.base_model_prefix, _GivenHidden())

    def forward(
        self, rows: RowInputs, ops: StepOps, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One pass over the step's rows; see `Model.forward`."""
        assert hidden is None, "pipeline stages are refused by the layout's rules"
        inputs = self._embed(rows)[None]
        self._port.ops = ops
        try:
            result = self._decoder(
                inputs_embeds=inputs, position_ids=rows.positions[None], use_cache=False
            )
        finally:
            self._port.ops = None
        last: torch.Tensor = result[0]
        return last[0]

    def _embed(self, rows: RowInputs) -> torch.Tensor:
        inputs = self._embedding.embed(rows.token_ids)
        if self._factor != 1.0:
            inputs = inputs * torch.tensor(self._factor, dtype=inputs.dtype)
        if rows.given is not None:
            inputs[rows.given.rows] = rows.given.values.to(inputs.dtype)
        return inputs

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of every token; see `Model.logits`."""
        scores: torch.Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits
        return scores[0]


class _GivenHidden(nn.Module):
    """Stands for the decoder while logits are computed."""

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _GivenOutput:
        """`[1, R, E]` -> the same, as the library's decoders return it."""
        return _GivenOutput(inputs_embeds)

    @property
    def decoder(self) -> _GivenHidden:
        """Some models keep their decoder one level deeper."""
        return self


class _GivenOutput:
    """What a decoder returns: hidden rows, and None for all that was not asked for."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class LogitsModule(nn.Module):
    """The output matrix, cut over the vocabulary.

    Args:
        output: this rank's ids.
        bias: `[vocab_size]` of all ids; None: there is none.
    """

    def __init__(self, output: VocabularyShard, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._output = output
        self._bias = bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[1, R, E]` -> `[1, R, vocab_size]`."""
        scores = self._output.logits(hidden[0])
        return (scores if self._bias is None else scores + self._bias)[None]


class RowCutLinear(nn.Module):
    """A product whose inputs are cut over ranks.

    Args:
        linear: holds this rank's columns, and the whole bias.
        shard: whose sum is taken.
    """

    def __init__(self, linear: nn.Linear, shard: Shard) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._shard = shard

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[1, M, in of this rank]` -> `[1, M, out]`."""
        total = self._shard.sum(functional.linear(x[0], self.weight))
        return (total if self.bias is None else total + self.bias)[None]


class SummedModule(nn.Module):
    """A module whose result is this rank's part of a sum.

    Args:
        inner: the module.
        shard: whose sum is taken.
    """

    def __init__(self, inner: nn.Module, shard: Shard) -> None:
        super().__init__()
        self._inner = inner
        self._shard = shard

    def forward(self, *args: Any, **options: Any) -> torch.Tensor:
        """The inner module's result `[M, E]`, same on all ranks."""
        return self._shard.sum(self._inner(*args, **options))


def lookup_factor(embedding: nn.Module) -> float:
    """What the library's lookup multiplies rows by.

    Raises:
        UnsupportedError: the lookup is of an unknown kind.
    """
    if type(embedding) is nn.Embedding:
        return 1.0
    scale = getattr(embedding, "scalar_embed_scale", None)
    if scale is None:
        raise UnsupportedError(f"its lookup, {type(embedding).__name__}, is not known here")
    return float(scale)


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put another module in the place called `name`."""
    parent, _, key = name.rpartition(".")
    setattr(model.get_submodule(parent), key, module)
