"""A rank that projects the queries of its whole slice makes what each of its ranks would make."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from heddle.comm.base import Communicator
from heddle.models.base import RowInputs
from heddle.models.config_json import load_model_config
from heddle.models.registry import create_model
from heddle.models.weights.open import open_weights
from tests.support.checkpoints import CPU, head_layout, run_tp
from tests.support.comparison import POSITIONS, TOKEN_IDS
from tests.support.rank_attention import HeadMapAttention, SliceAttention

Checkpoint = Callable[[str], Path]
MODELS = ("llama-9-3", "gpt-oss", "phi3", "olmo2", "deepseek-v2", "deepseek-v3")


@pytest.mark.parametrize("sizes", [(2, 2), (4, 2)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_the_same_and_slices_agree(
    checkpoint: Checkpoint, name: str, sizes: tuple[int, int]
) -> None:
    path = checkpoint(name)
    config = load_model_config(path)
    heads = head_layout(config, *sizes)

    def body(rank: int, tp: Communicator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        def build(*, replicates: bool):  # type: ignore[no-untyped-def]
            source = open_weights(path)
            return create_model(
                config, heads, rank, source, torch.float64, CPU, tp, replicates_queries=replicates
            )

        plain = build(replicates=False).forward(
            RowInputs(TOKEN_IDS, POSITIONS), HeadMapAttention(config, heads, rank)
        )
        ops = SliceAttention(config, heads, rank)
        found = build(replicates=True).forward(RowInputs(TOKEN_IDS, POSITIONS), ops)
        assert ops.projected is not None
        return plain, found, ops.projected

    results = run_tp(sizes[0], body)
    for plain, found, _ in results:
        assert (found - plain).abs().max() <= 1e-11 * plain.abs().max()
    for rank, (_, _, projected) in enumerate(results):
        first = results[rank // sizes[1] * sizes[1]][2]
        assert (projected - first).abs().max() <= 1e-12 * first.abs().max()
