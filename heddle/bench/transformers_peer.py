"""The peer that needs no environment of its own: the transformers library, with sdpa attention.

    python -m heddle.bench.transformers_peer FOLDER --threads N

It knows one batch with one length, so streams of a throughput run have equal lengths.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from heddle.bench.lines import Clock, serve


class TransformersEngine:
    """A checkpoint in float32."""

    dtype = "float32"

    def __init__(self, folder: str, num_threads: int) -> None:
        """Load.

        Args:
            folder: with `config.json`.
            num_threads: of torch.
        """
        import transformers  # seconds

        torch.set_num_threads(num_threads)
        self.version: str = transformers.__version__
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()

    def run(self, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
        """Answer prompts of one length."""
        with torch.inference_mode():
            return self._run(prompts, num_tokens)

    def _run(self, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
        clock = Clock()
        found = self._model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        columns = [found.logits[:, -1].argmax(-1, keepdim=True)]  # [B, 1]
        clock.first()
        name = "cache" if hasattr(found, "cache") else "past_key_values"  # it was renamed in 5.3x
        for _ in range(num_tokens - 1):
            found = self._model(columns[-1], use_cache=True, **{name: getattr(found, name)})
            columns.append(found.logits[:, -1].argmax(-1, keepdim=True))
        return clock.answer(torch.cat(columns, dim=1).tolist())


def create(arguments: argparse.Namespace) -> TransformersEngine:
    """From the command line of a peer."""
    return TransformersEngine(arguments.model, arguments.threads)


if __name__ == "__main__":
    serve("transformers", create)
