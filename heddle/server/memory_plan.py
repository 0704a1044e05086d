"""What each rank was planned to hold, by part: the sheet of `heddle doctor MODEL`, for metrics."""

from __future__ import annotations

from pathlib import Path

from heddle.config.engine import ResolvedConfig


def predicted_bytes(resolved: ResolvedConfig) -> dict[int, dict[str, int]]:
    """Bytes of each part of a rank's memory, by rank; interpreter and libraries are not among them.

    Ranks are built without memory (`heddle.runner.weigh`), one of each kind; takes as long as
    reading the headers of the checkpoint, so a server asks a helper thread.

    Raises:
        ModelFileError: the checkpoint has changed since it was loaded.
    """
    from heddle.models.weights.open import open_weights
    from heddle.runner.weigh import distinct_ranks, weigh_rank

    source = open_weights(Path(resolved.model_path))
    found: dict[int, dict[str, int]] = {}
    for first, ranks in distinct_ranks(resolved).items():
        held = weigh_rank(resolved, first, source)
        parts = {
            "weights": held.weights,
            "kv_pool": held.cache,
            "states": held.states,
            "exchange": held.exchange,
            "activations": held.activations,
        }
        found |= dict.fromkeys(ranks, parts)
    return dict(sorted(found.items()))
