"""The indexer equals that of transformers on the same rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from heddle.models.base import RowInputs
from tests.support.checkpoints import solo_model
from tests.support.rank_attention import IndexRecorder
from tests.support.tiny import VOCAB_SIZE, tiny_model

NAME = "deepseek-v32"
NUM_ROWS = 60
TOKEN_IDS = torch.arange(NUM_ROWS) * 29 % VOCAB_SIZE

Checkpoint = Callable[[str], Path]


def test_keys_rank_as_the_published_indexer_ranks_them(checkpoint: Checkpoint) -> None:
    """The module of transformers, asked for all keys, gives them in its order of score."""
    model, config = solo_model(checkpoint(NAME))
    attention = IndexRecorder(config)
    reference = tiny_model(NAME).model
    layer = reference.layers[0]
    part = layer.self_attn
    part.indexer.index_topk = NUM_ROWS
    later = torch.full((NUM_ROWS, NUM_ROWS), float("-inf")).triu(1)
    with torch.inference_mode():
        model.forward(RowInputs(TOKEN_IDS, torch.arange(NUM_ROWS)), attention)
        hidden = reference.embed_tokens(TOKEN_IDS[None])
        x = layer.input_layernorm(hidden)
        latent = part.q_a_layernorm(part.q_a_proj(x))
        angles = reference.rotary_emb(hidden, position_ids=torch.arange(NUM_ROWS)[None])
        order = part.indexer(x, latent, angles, later[None], None)[0].long()
    index = attention.index[0]
    products = torch.einsum("qhd,kd->qkh", index.index_query, index.index_key).relu()
    scores = torch.einsum("qkh,qh->qk", products, index.weights)
    ranked = scores.gather(1, order)
    for row in range(NUM_ROWS):
        assert (ranked[row, :row].diff() <= 1e-5).all()
    assert ranked.std() > 0.1
