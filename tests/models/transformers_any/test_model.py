"""The library's decoder and head behind our lookup and sums."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from heddle.comm.solo import SoloCommunicator
from heddle.comm.threads import ThreadGroup
from heddle.errors import UnsupportedError
from heddle.layout.cut import cut
from heddle.models.base import GivenRows, RowInputs
from heddle.models.config_json import load_model_config
from heddle.models.layers.shard import Shard
from heddle.models.registry import create_model
from heddle.models.transformers_any.model import RowCutLinear, lookup_factor
from heddle.models.weights.open import open_weights
from tests.support.checkpoints import CPU, head_layout, solo_model
from tests.support.foreign import foreign_config, write_foreign
from tests.support.tiny import DenseAttention, build_tiny

TOKENS = torch.tensor([5, 9, 2, 7, 30])


def test_given_rows_enter_in_place_of_tokens(tmp_path: Path) -> None:
    model = write_foreign(tmp_path, foreign_config("arcee"))
    ours, config = solo_model(tmp_path)
    values = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    rows = GivenRows(torch.tensor([1, 3]), values)
    with torch.inference_mode():
        inputs = model.get_input_embeddings()(TOKENS)
        inputs[[1, 3]] = values
        expected = model(inputs_embeds=inputs[None]).logits[0]
        hidden = ours.forward(
            RowInputs(TOKENS, torch.arange(5), given=rows), DenseAttention(config)
        )
        found = ours.logits(hidden)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_library_s_factor_on_lookups_and_cap_of_logits_are_kept(tmp_path: Path) -> None:
    path = build_tiny(tmp_path, "gemma2")
    native, config = solo_model(path)
    described = load_model_config(path, model_impl="transformers")
    tp, dtype = SoloCommunicator(), torch.float32
    foreign = create_model(described, head_layout(described), 0, open_weights(path), dtype, CPU, tp)
    rows = RowInputs(TOKENS, torch.arange(5))
    with torch.inference_mode():
        logits = [m.logits(m.forward(rows, DenseAttention(config))) for m in (native, foreign)]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    assert logits[1].abs().max() < 60.0  # the cap


def test_a_lookup_of_an_unknown_kind_is_refused() -> None:
    class Other(nn.Embedding):
        pass

    assert lookup_factor(nn.Embedding(3, 2)) == 1.0
    with pytest.raises(UnsupportedError, match="its lookup, Other, is not known"):
        lookup_factor(Other(3, 2))


def test_a_bias_is_added_once_behind_the_sum() -> None:
    whole = nn.Linear(7, 3)
    x = torch.randn(1, 4, 7)

    def rank(world):  # type: ignore[no-untyped-def]
        first, last = cut(7, 2, world.global_rank)
        part = nn.Linear(last - first, 3)
        part.weight = nn.Parameter(whole.weight[:, first:last])
        part.bias = whole.bias
        shard = Shard(world.global_rank, 2, world.group("tp", [[0, 1]]))
        return RowCutLinear(part, shard)(x[..., first:last])

    for found in ThreadGroup(2).run(rank):
        torch.testing.assert_close(found, whole(x))
