"""Sparse attention in a model: one rank equals transformers, every layout equals a dense mask."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from heddle.layout.mesh import legal_dcp_sizes
from heddle.models.base import RowInputs
from tests.support.checkpoints import solo_model
from tests.support.comparison import tolerance
from tests.support.model_steps import model_topology, run_steps, step_batches
from tests.support.rank_attention import IndexRecorder
from tests.support.tiny import VOCAB_SIZE, DenseAttention, tiny_model

NAME = "deepseek-v32"
NUM_ROWS = 60
TOKEN_IDS = torch.arange(NUM_ROWS) * 29 % VOCAB_SIZE
Checkpoint = Callable[[str], Path]


def test_a_prompt_longer_than_the_choice_equals_transformers(checkpoint: Checkpoint) -> None:
    model, config = solo_model(checkpoint(NAME))
    assert config.sparse is not None
    assert config.sparse.top_k * 4 < NUM_ROWS
    with torch.inference_mode():
        expected = tiny_model(NAME)(TOKEN_IDS[None]).logits[0]
        rows = model.forward(RowInputs(TOKEN_IDS, torch.arange(NUM_ROWS)), DenseAttention(config))
        found = model.logits(rows)
    assert (found - expected).abs().max() <= tolerance(expected)


def test_the_choice_matters(checkpoint: Checkpoint) -> None:
    """With another choice of keys the logits of late rows are far off: the test above can fail."""
    model, config = solo_model(checkpoint(NAME))
    assert config.sparse is not None
    other = dataclasses.replace(config, sparse=dataclasses.replace(config.sparse, top_k=9))
    positions = torch.arange(NUM_ROWS)
    with torch.inference_mode():
        right = model.logits(model.forward(RowInputs(TOKEN_IDS, positions), DenseAttention(config)))
        wrong = model.logits(model.forward(RowInputs(TOKEN_IDS, positions), DenseAttention(other)))
    torch.testing.assert_close(right[:8], wrong[:8])
    assert (right[20:] - wrong[20:]).abs().amax(dim=1).min() > 100 * tolerance(right)


PROMPTS = [TOKEN_IDS.tolist(), (TOKEN_IDS[:41] * 31 % VOCAB_SIZE).tolist()]
CUTS = [(23, 0), (43, 30), (44, 31), (45, 40), (60, 41)]
"""Chunks with and without context, decodes of a few steps, both beside each other."""
SIZES = [
    (tp, pcp, dcp)
    for tp in (1, 2, 3, 4)
    for pcp in (1, 2, 3, 4)
    if tp * pcp <= 4
    for dcp in legal_dcp_sizes(tp, pcp)
]


def test_chunks_on_one_rank_equal_transformers(checkpoint: Checkpoint) -> None:
    model, config = solo_model(checkpoint(NAME))
    topology = model_topology(config, (1, 1, 1), "float32")
    (found,) = run_steps(checkpoint(NAME), topology, step_batches(topology, PROMPTS, CUTS))
    assert len(found) == sum(map(len, PROMPTS))
    reference = tiny_model(NAME)
    for request, prompt in enumerate(PROMPTS):
        rows = torch.stack([found[request, position] for position in range(len(prompt))])
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0]
            logits = model.logits(rows)
        assert (logits - expected).abs().max() <= tolerance(expected)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_layout_equals_dense_attention_with_a_mask(
    checkpoint: Checkpoint, sizes: tuple[int, int, int]
) -> None:
    model, config = solo_model(checkpoint(NAME), torch.float64)
    topology = model_topology(config, sizes, "float64")
    results = run_steps(checkpoint(NAME), topology, step_batches(topology, PROMPTS, CUTS))
    met = set()
    for request, prompt in enumerate(PROMPTS):
        with torch.inference_mode():
            positions = torch.arange(len(prompt))
            dense = DenseAttention(config)
            expected = model.forward(RowInputs(torch.tensor(prompt), positions), dense)
        for found in results:
            for position in range(len(prompt)):
                if (request, position) in found:
                    row = found[request, position]
                    assert (row - expected[position]).abs().max() <= 1e-10 * expected.abs().max()
                    met.add((request, position))
    assert len(met) == sum(map(len, PROMPTS))


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 4), (1, 2, 2)], ids=str)
def test_models_of_16_bits_choose_by_float32_scores(
    checkpoint: Checkpoint, sizes: tuple[int, int, int]
) -> None:
    """Rows that see few keys attend to all of them, so rounding is all that sets them apart."""
    model, config = solo_model(checkpoint(NAME), torch.bfloat16)
    topology = model_topology(config, sizes, "bfloat16")
    results = run_steps(checkpoint(NAME), topology, step_batches(topology, PROMPTS, CUTS))
    prompt, positions = torch.tensor(PROMPTS[0]), torch.arange(NUM_ROWS)
    attention = IndexRecorder(config)
    with torch.inference_mode():
        expected = model.forward(RowInputs(prompt, positions), attention)
    assert {index.weights.dtype for index in attention.index} == {torch.float32}
    assert {index.index_key.dtype for index in attention.index} == {torch.bfloat16}
    for found in results:
        assert all(row.isfinite().all() for row in found.values())
        for position in range(config.sparse.top_k):
            if (0, position) in found:
                difference = (found[0, position] - expected[position]).abs().max()
                assert difference <= 0.1 * expected.abs().max()
