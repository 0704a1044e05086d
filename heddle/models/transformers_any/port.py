"""Between an attention layer of transformers and the step's attention.

transformers looks an attention function up by name and calls it with query, key and value of one
layer. Ours hands them to the ops of the pass under way, which it finds at a port: an object that
every module of one model instance carries. Ranks that are threads have an instance each.

Legend: `M` rows, `p` query heads that this rank projects, `h` head lanes, `Ks` kv heads of the
rank's slice, `D` head width.

Source: `transformers.AttentionInterface`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface

from heddle.attention.base import StepOps

ATTENTION_NAME = "heddle"
"""The name by which a configuration asks for our function."""
_PORT = "heddle_port"


class Port(Protocol):
    """What an attention layer reaches through its module."""

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """`[1, p, M, D]`, `[1, Ks, M, D]` twice -> `[1, M, own heads, D]`."""
        ...


class StepPort:
    """The port of a model that is served.

    Args:
        num_lanes: `h`, pads included.
        own_heads: this rank's heads among those it projects, half-open.
    """

    def __init__(self, num_lanes: int, own_heads: tuple[int, int]) -> None:
        self.ops: StepOps | None = None
        """Of the pass under way."""
        self._num_lanes = num_lanes
        self._own = slice(*own_heads)

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """See `Port.attend`."""
        assert self.ops is not None, "layers are called within a pass"
        own = query[0, self._own]  # [own heads, M, D]
        num_pads = self._num_lanes - len(own)
        lanes = functional.pad(own, (0, 0, 0, 0, 0, num_pads)).transpose(0, 1)
        sinks = options.get("s_aux")
        if sinks is not None:
            sinks = functional.pad(sinks, (0, num_pads))
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        key_rows, value_rows = key[0].transpose(0, 1), value[0].transpose(0, 1)
        mixed = self.ops.gqa(layer, lanes, key_rows, value_rows, sinks)
        return mixed[None, :, : len(own)]


def connect(model: nn.Module, port: Port) -> None:
    """Give a port to every module of a model."""
    for module in model.modules():
        setattr(module, _PORT, port)


def register_attention() -> None:
    """Make our function known to the library by its name; to do so again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, _attend)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Masks are not read: which keys are visible is the step's to know."""
    del attention_mask
    port: Port = getattr(module, _PORT)
    return port.attend(module, query, key, value, options), None
