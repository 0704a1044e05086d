"""A pass over several ranks equals one rank's, and says and reads what it must, no more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from heddle.comm.base import Communicator
from heddle.comm.solo import SoloCommunicator
from heddle.errors import ModelFileError
from heddle.models.base import RowInputs
from heddle.models.config_json import load_model_config
from heddle.models.registry import create_model
from heddle.models.weights.open import open_weights
from tests.support.checkpoints import CPU, CountingSource, head_layout, run_tp, solo_model
from tests.support.comparison import NUM_ROWS, POSITIONS, TOKEN_IDS, tolerance
from tests.support.rank_attention import HeadMapAttention, Recorder
from tests.support.tiny import DenseAttention

Checkpoint = Callable[[str], Path]

TP_MODELS = (
    "llama-8-2",
    "llama-9-3",
    "llama-6-2",
    "llama-bias",
    "qwen2",
    "qwen3",
    "deepseek-v2",
    "deepseek-v2-lora",
    "deepseek-v3",
    "deepseek-v3-direct",
    "granite",
    "phi3",
    "olmo2",
    "glm4",
    "gemma2",
    "gemma3",
    "gpt-oss",
    "glm4-moe",
    "olmoe",
    "minimax-m2",
    "glm4-moe-lite",
    "llama4",
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
)


@pytest.mark.parametrize("tp_size", [2, 3, 4])
@pytest.mark.parametrize("name", TP_MODELS)
def test_tensor_parallel_equals_one_rank(checkpoint: Checkpoint, name: str, tp_size: int) -> None:
    path = checkpoint(name)
    model, config = solo_model(path, torch.float64)
    heads = head_layout(config, tp_size)
    with torch.inference_mode():
        hidden = model.forward(RowInputs(TOKEN_IDS, POSITIONS), DenseAttention(config))
        expected = model.logits(hidden)

    def body(rank: int, tp: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        part = create_model(config, heads, rank, open_weights(path), torch.float64, CPU, tp)
        attention = HeadMapAttention(config, heads, rank)
        rows = part.forward(RowInputs(TOKEN_IDS, POSITIONS), attention)
        return rows, part.logits(rows)

    results = run_tp(tp_size, body)
    assert len(results) == tp_size
    for rows, logits in results:
        assert (rows - hidden).abs().max() <= 1e-10 * hidden.abs().max()
        assert logits.shape == expected.shape
        assert (logits - expected).abs().max() <= 1e-10 * expected.abs().max()
        assert torch.equal(logits, results[0][1])  # one answer on all ranks, bit for bit


@pytest.mark.parametrize(
    "name", ["llama-9-3", "qwen3", "deepseek-v3", "gemma2", "gpt-oss", "llama4", "olmo2"]
)
def test_float64_stays_float64_and_is_close_to_float32(checkpoint: Checkpoint, name: str) -> None:
    narrow, config = solo_model(checkpoint(name))
    wide, _ = solo_model(checkpoint(name), torch.float64)
    recorded = Recorder(config)
    with torch.inference_mode():
        expected = narrow.logits(
            narrow.forward(RowInputs(TOKEN_IDS, POSITIONS), DenseAttention(config))
        )
        found = wide.logits(wide.forward(RowInputs(TOKEN_IDS, POSITIONS), recorded))
    assert found.dtype == torch.float64
    assert recorded.dtypes == {torch.float64}
    assert (found - expected).abs().max() <= tolerance(expected)


class CallLog:
    """A group whose calls are noted; results have the right shape and are otherwise of one rank."""

    def __init__(self, world_size: int) -> None:
        self.rank, self.world_size = 0, world_size
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls.append(("all_reduce", tuple(tensor.shape)))
        return tensor.clone()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls.append(("all_gather", tuple(tensor.shape)))
        return tensor.expand(self.world_size, *tensor.shape)


@pytest.mark.parametrize(
    ("name", "num_layers"), [("llama-9-3", 2), ("deepseek-v3", 3), ("llama4", 4)]
)
def test_collectives_are_one_lookup_two_per_layer_one_gather(
    checkpoint: Checkpoint, name: str, num_layers: int
) -> None:
    path = checkpoint(name)
    config = load_model_config(path)
    heads = head_layout(config, 2)
    log = CallLog(2)
    model = create_model(config, heads, 0, open_weights(path), torch.float32, CPU, log)  # type: ignore[arg-type]
    with torch.inference_mode():
        hidden = model.forward(RowInputs(TOKEN_IDS, POSITIONS), HeadMapAttention(config, heads, 0))
        model.logits(hidden[-3:])
    width = config.hidden_size
    expected = [("all_reduce", (NUM_ROWS, width))] * (1 + 2 * num_layers)
    assert log.calls == [*expected, ("all_gather", (3, 66))]  # ceil(131 / 2)


def test_a_group_of_one_says_nothing(checkpoint: Checkpoint) -> None:
    path = checkpoint("llama-9-3")
    config = load_model_config(path)
    log = CallLog(1)
    model = create_model(
        config,
        head_layout(config),
        0,
        open_weights(path),
        torch.float32,
        CPU,
        log,  # type: ignore[arg-type]
    )
    with torch.inference_mode():
        model.logits(model.forward(RowInputs(TOKEN_IDS, POSITIONS), DenseAttention()))
    assert log.calls == []


READERS = [
    ("llama-9-3", 3),
    ("deepseek-v3", 4),
    ("gpt-oss", 2),
    ("llama4", 2),
    ("mixtral", 2),
    ("qwen2-moe", 2),
]


@pytest.mark.parametrize(("name", "tp_size"), READERS)
def test_a_rank_reads_its_slices_alone(checkpoint: Checkpoint, name: str, tp_size: int) -> None:
    """Cut tensors are read once over all ranks together; the rest once per rank."""
    path = checkpoint(name)
    config = load_model_config(path)

    def body(rank: int, tp: Communicator) -> dict[str, int]:
        source = CountingSource(open_weights(path))
        heads = head_layout(config, tp_size)
        create_model(config, heads, rank, source, torch.float32, CPU, tp)
        return source.elements_read

    counts = run_tp(tp_size, body)
    source = open_weights(path)
    whole_everywhere = (
        "norm",
        ".gate.",
        ".router.",
        ".o_proj.bias",
        ".shared_expert_gate.",
        "down_proj_bias",
        "kv_a_proj",
        "q_a_proj",
    )
    assert len(source.names()) > 10
    for tensor in source.names():
        size = torch.Size(source.shape(tensor)).numel()
        is_whole = any(part in tensor for part in whole_everywhere)
        total = sum(count[tensor] for count in counts)
        assert total == size * (tp_size if is_whole else 1), tensor
        if not is_whole:
            assert max(count[tensor] for count in counts) <= size / tp_size * 1.5, tensor


def test_positions_are_those_given(checkpoint: Checkpoint) -> None:
    """A row is turned by its own position, wherever it stands in the step."""
    model, _ = solo_model(checkpoint("llama-8-2"), torch.float64)
    spy = Recorder()
    with torch.inference_mode():
        model.forward(RowInputs(TOKEN_IDS, POSITIONS), spy)
        model.forward(RowInputs(TOKEN_IDS, POSITIONS + 5), spy)
        model.forward(RowInputs(TOKEN_IDS.flip(0), POSITIONS.flip(0)), spy)
    first, moved, flipped = spy.keys[0::2]
    assert (first - moved).abs().max() > 0.1
    assert (flipped.flip(0) - first).abs().max() <= 1e-12 * first.abs().max()


STAGED_MODELS = (
    ("llama-9-3", 2),
    ("llama-bias", 2),
    ("qwen2-moe", 3),
    ("llama4", 3),
    ("llama4", 5),
    ("gemma2", 2),
    ("deepseek-v3", 2),
)


@pytest.mark.parametrize(("name", "num_stages"), STAGED_MODELS)
def test_stages_one_after_another_equal_the_whole(
    checkpoint: Checkpoint, name: str, num_stages: int
) -> None:
    """Every stage reads its own layers alone, and tokens matter on the first stage alone."""
    path = checkpoint(name)
    whole, config = solo_model(path, torch.float64)
    hidden: torch.Tensor | None = None
    counts: list[dict[str, int]] = []
    with torch.inference_mode():
        expected = whole.forward(RowInputs(TOKEN_IDS, POSITIONS), DenseAttention(config))
        for rank in range(num_stages):
            source = CountingSource(open_weights(path))
            stage = create_model(
                config,
                head_layout(config),
                0,
                source,
                torch.float64,
                CPU,
                SoloCommunicator(),
                stage=(rank, num_stages),
            )
            tokens = TOKEN_IDS if rank == 0 else torch.zeros_like(TOKEN_IDS)
            hidden = stage.forward(RowInputs(tokens, POSITIONS), DenseAttention(config), hidden)
            counts.append(source.elements_read)
        assert hidden is not None
        assert torch.equal(hidden, expected)
        assert torch.equal(stage.logits(hidden), whole.logits(expected))
    for tensor in open_weights(path).names():
        readers = [rank for rank, count in enumerate(counts) if tensor in count]
        match tensor.split("."):
            case ["model", "layers", layer, *_]:
                # Stage r holds the layers from floor(L * r / P).
                expected_readers = [
                    rank
                    for rank in range(num_stages)
                    if config.num_layers * rank // num_stages
                    <= int(layer)
                    < config.num_layers * (rank + 1) // num_stages
                ]
            case ["model", "embed_tokens", _]:
                expected_readers = [0, num_stages - 1] if config.tie_word_embeddings else [0]
            case _:
                expected_readers = [num_stages - 1]
        assert readers == expected_readers, tensor


def test_a_stage_still_refuses_what_no_stage_knows(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = checkpoint("llama-9-3")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.ones(4, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    config = load_model_config(path)
    with pytest.raises(ModelFileError, match=r"model\.layers\.2\.mlp\.up_proj\.weight is not part"):
        create_model(
            config,
            head_layout(config),
            0,
            open_weights(tmp_path),
            torch.float32,
            CPU,
            SoloCommunicator(),
            stage=(0, 2),
        )


def test_a_stage_counts_its_own_tensors(checkpoint: Checkpoint) -> None:
    path = checkpoint("llama-6-2")
    config = load_model_config(path)
    seen: list[tuple[int, int]] = []
    create_model(
        config,
        head_layout(config),
        0,
        open_weights(path),
        torch.float32,
        CPU,
        SoloCommunicator(),
        lambda count, total: seen.append((count, total)),
        stage=(1, 2),
    )
    assert seen == [(count, 11) for count in range(1, 12)]  # 9 of a layer, norm, output
