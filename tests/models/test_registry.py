"""Building a model: which family, and what is told meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from heddle.comm.solo import SoloCommunicator
from heddle.errors import ModelFileError, UnsupportedError
from heddle.models.config_json import ARCHITECTURES, load_model_config
from heddle.models.registry import CREATORS, create_model
from heddle.models.weights.open import open_weights
from tests.support.checkpoints import CPU, head_layout, solo_model

Checkpoint = Callable[[str], Path]


def test_every_readable_architecture_can_be_built() -> None:
    assert set(CREATORS) == set(ARCHITECTURES)


def test_progress_counts_every_tensor_once(checkpoint: Checkpoint) -> None:
    path = checkpoint("llama-6-2")
    config = load_model_config(path)
    seen: list[tuple[int, int]] = []
    source = open_weights(path)
    create_model(
        config,
        head_layout(config),
        0,
        source,
        torch.float32,
        CPU,
        SoloCommunicator(),
        lambda count, total: seen.append((count, total)),
    )
    total = len(source.names())
    assert seen == [(count, total) for count in range(1, total + 1)]


def test_an_unknown_architecture_is_refused_by_name(checkpoint: Checkpoint) -> None:
    path = checkpoint("llama-8-2")
    config = replace(load_model_config(path), architecture="GPT2LMHeadModel")
    with pytest.raises(UnsupportedError, match=r"GPT2LMHeadModel.*known: LlamaForCausalLM"):
        create_model(
            config,
            head_layout(config),
            0,
            open_weights(path),
            torch.float32,
            CPU,
            SoloCommunicator(),
        )


def test_a_tied_output_may_be_stored_twice_and_is_read_once(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path = checkpoint("llama-bias")
    tensors = load_file(path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = torch.full_like(tensors["model.embed_tokens.weight"], 7)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    tied, config = solo_model(tmp_path)
    original, _ = solo_model(path)
    hidden = torch.ones(1, config.hidden_size)
    assert torch.equal(tied.logits(hidden), original.logits(hidden))


def test_an_untied_output_must_be_there(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = checkpoint("llama-6-2")
    tensors = load_file(path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    with pytest.raises(ModelFileError, match=r"lm_head\.weight of shape \(131, 72\) is missing"):
        solo_model(tmp_path)
