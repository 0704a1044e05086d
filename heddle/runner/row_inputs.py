"""What a rank tells its model about the rows of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from heddle.config.model import ModelConfig
from heddle.config.rope import depends_on_length
from heddle.models.base import GivenRows, RowInputs
from heddle.step.batch import ScheduledRequest
from heddle.step.localize import RankStep


def create_row_inputs(step: RankStep, model: ModelConfig, dtype: torch.dtype) -> RowInputs:
    """Tokens, positions, and what else this model asks of this rank's rows.

    Args:
        step: this rank's part.
        model: shapes of the checkpoint.
        dtype: compute dtype; that of given embeddings.
    """
    requests = step.plan.batch.requests
    lengths = None
    if depends_on_length(model.rope):
        lengths = torch.tensor(step.per_row([r.rope_length for r in requests], pad=0))
    return RowInputs(
        torch.tensor(step.token_ids),
        torch.tensor(step.positions),
        lengths,
        _given_rows(step, requests, model.hidden_size, dtype),
    )


def _given_rows(
    step: RankStep, requests: Sequence[ScheduledRequest], width: int, dtype: torch.dtype
) -> GivenRows | None:
    """The rows of this rank whose embeddings came with the step."""
    row_bytes = width * dtype.itemsize
    counts = [len(request.embeddings) // row_bytes for request in requests]
    if not any(counts):
        return None  # as in almost every step
    starts = step.per_row([request.num_computed_tokens for request in requests], pad=0)
    places = np.flatnonzero(step.positions < starts + step.per_row(counts, pad=0))
    if not len(places):
        return None
    # Rows of all requests lie end to end; each local row picks its own.
    firsts = step.per_row(np.cumsum([0, *counts])[:-1].tolist(), pad=0)
    data = np.frombuffer(b"".join(request.embeddings for request in requests), np.uint8)
    picked = data.reshape(-1, row_bytes)[(firsts + step.positions - starts)[places]]
    return GivenRows(torch.from_numpy(places), torch.from_numpy(picked).view(dtype))
