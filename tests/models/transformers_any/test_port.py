"""Heads become lanes and come back, whatever the library's layout of them."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import nn

from heddle.models.transformers_any.port import StepPort, connect

REGISTRATION = """
from transformers import AttentionInterface
from heddle.models.transformers_any import port
assert port.ATTENTION_NAME not in AttentionInterface().valid_keys()
port.register_attention()
first = AttentionInterface()[port.ATTENTION_NAME]
port.register_attention()
assert AttentionInterface()[port.ATTENTION_NAME] is first
"""


def test_an_import_registers_nothing() -> None:
    """In a process of its own: a model that was built before has registered our function."""
    assert subprocess.run([sys.executable, "-c", REGISTRATION], check=False).returncode == 0


class Echo:
    """Gives back the queries, and keeps what it was given."""

    def gqa(self, layer, query, key, value, sinks=None):  # type: ignore[no-untyped-def]
        self.given = layer, query, key, value, sinks
        return query


def attend(
    port: StepPort, heads: int, options: dict[str, torch.Tensor]
) -> tuple[Echo, torch.Tensor]:
    module = nn.Module()
    module.layer_idx = 3
    connect(module, port)
    ops = Echo()
    port.ops = ops  # type: ignore[assignment]
    query = torch.arange(heads * 5 * 2.0).view(1, heads, 5, 2)
    key = torch.randn(1, 2, 5, 2)
    return ops, module.heddle_port.attend(module, query, key, key + 1, options)


def test_pad_lanes_are_zero_and_never_come_back() -> None:
    sinks = torch.tensor([1.0, 2.0])
    ops, out = attend(StepPort(3, (0, 2)), 2, {"s_aux": sinks})
    layer, query, key, value, given_sinks = ops.given
    assert layer == 3
    assert query.shape == (5, 3, 2)
    assert not query[:, 2].any()
    assert query[4, 1].tolist() == [18.0, 19.0]  # head 1, row 4
    assert torch.equal(value, key + 1)
    assert given_sinks.tolist() == [1.0, 2.0, 0.0]
    assert out.shape == (1, 5, 2, 2)
    assert torch.equal(out[0], query[:, :2])


def test_own_heads_are_taken_from_those_of_the_slice() -> None:
    ops, out = attend(StepPort(2, (2, 4)), 4, {})
    assert ops.given[1][0, 0].tolist() == [20.0, 21.0]  # head 2, row 0
    assert ops.given[4] is None
    assert out.shape == (1, 5, 2, 2)
