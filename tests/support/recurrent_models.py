"""Recurrent layers and models on one rank, on several, and in pieces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from heddle.attention.recurrent.step_recurrence import RankRecurrence
from heddle.attention.recurrent.store import StateStore
from heddle.attention.recurrent.terms import RecurrentInputs
from heddle.comm.base import Communicator
from heddle.comm.solo import SoloCommunicator
from heddle.config.model import ModelConfig
from heddle.layout.recurrent_heads import RecurrentLayout
from heddle.layout.rows import RowClass, RowRequest, create_row_layout
from heddle.models.base import BuildContext, RowInputs
from heddle.models.config_json import load_model_config
from heddle.models.decoder import AttentionBlock
from heddle.models.layers.rotary import NoRotation
from heddle.models.layers.shard import Shard
from heddle.models.registry import create_model
from heddle.models.weights.loader import WeightLoader
from heddle.models.weights.memory import MemorySource
from heddle.models.weights.open import open_weights
from heddle.step.batch import StateUse
from heddle.step.recurrent import create_recurrent_step
from tests.support.checkpoints import CPU, head_layout, run_tp, solo_model
from tests.support.comparison import NUM_ROWS, POSITIONS, TOKEN_IDS
from tests.support.models import model_config
from tests.support.rank_attention import HeadMapAttention
from tests.support.tiny import DenseAttention

LoadLayer = Callable[[BuildContext, RecurrentLayout, int, str], AttentionBlock]


def check_layer_over_ranks(
    load: LoadLayer, config: ModelConfig, shapes: dict[str, tuple[int, ...]], tp_size: int
) -> None:
    """What ranks make of a layer adds up to what one rank makes of it; all tensors are read."""
    generator = torch.Generator().manual_seed(7)
    tensors = {
        f"mixer.{name}": torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }
    x = torch.randn(9, config.hidden_size, generator=generator, dtype=torch.float64)
    assert config.recurrent is not None

    def part(rank: int, tp: Communicator) -> torch.Tensor:
        loader = WeightLoader(MemorySource(tensors), torch.float64, CPU)
        heads = head_layout(config, tp.world_size)
        context = BuildContext(config, heads, Shard(rank, tp.world_size, tp), loader)
        layout = RecurrentLayout(config.recurrent, tp.world_size)
        block = load(context, layout, 1, "mixer")
        loader.finish()
        return block(x, NoRotation(torch.arange(9)), DenseAttention())

    whole = part(0, SoloCommunicator())
    parts = torch.stack(run_tp(tp_size, part))
    assert whole.abs().max() > 0.1
    assert (parts.sum(0) - whole).abs().max() <= 1e-11 * whole.abs().max()


def layer_config(**recurrent: object) -> ModelConfig:
    """A model of 10 channels, 3 layers, and a recurrence."""
    from heddle.config.model import RecurrentConfig

    return model_config(
        hidden_size=10,
        num_query_heads=6,
        num_kv_heads=2,
        num_layers=3,
        recurrent=RecurrentConfig(**recurrent),  # type: ignore[arg-type]
    )


def check_model_over_ranks(path: Path, tp_size: int) -> None:
    """Rows and logits of a cut model equal those of one rank, on every rank."""
    model, config = solo_model(path, torch.float64)
    heads = head_layout(config, tp_size)
    with torch.inference_mode():
        hidden = model.forward(RowInputs(TOKEN_IDS, POSITIONS), DenseAttention(config))
        expected = model.logits(hidden)

    def body(rank: int, tp: Communicator) -> torch.Tensor:
        part = create_model(config, heads, rank, open_weights(path), torch.float64, CPU, tp)
        attention = HeadMapAttention(config, heads, rank)
        return part.logits(part.forward(RowInputs(TOKEN_IDS, POSITIONS), attention))

    for logits in run_tp(tp_size, body):
        assert (logits - expected).abs().max() <= 1e-10 * expected.abs().max()


class PieceOps(DenseAttention):
    """A prompt in pieces on one rank: keys are kept, states are kept in a store."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        assert config.recurrent is not None
        layers = [i for i in range(config.num_layers) if config.kind_of(i).mixer == "recurrent"]
        self._store = StateStore(
            RecurrentLayout(config.recurrent, 1),
            0,
            layers=layers,
            num_slots=3,
            dtype=torch.float64,
            device=CPU,
        )
        self._chunk_size = config.recurrent.chunk_size
        self._kept: dict[int, list[torch.Tensor]] = {}
        self._slot = 0

    def begin(self, num_rows: int) -> None:
        """The next rows of the prompt; states go back and forth between two slots."""
        rows = create_row_layout([RowRequest(num_rows, RowClass.SPLIT)], 1)
        use = StateUse(source=self._slot, targets=(2 if self._slot == 1 else 1,))
        self._slot = use.targets[0]
        step = create_recurrent_step(rows, [use], 0)
        self._step = RankRecurrence(step, self._store, SoloCommunicator(), self._chunk_size)

    def recurrent(self, layer: int, inputs: RecurrentInputs) -> torch.Tensor:
        return self._step.run(layer, inputs)

    def gqa(self, layer, query, key, value, sinks=None):  # type: ignore[no-untyped-def]
        kept = self._kept.setdefault(layer, [query[:0], key[:0], value[:0]])
        kept[:] = [torch.cat(pair) for pair in zip(kept, (query, key, value), strict=True)]
        return super().gqa(layer, *kept, sinks)[-len(query) :]


def check_model_in_pieces(path: Path, cuts: tuple[int, ...]) -> None:
    """Rows of a prompt given piece by piece equal those of the whole prompt."""
    model, config = solo_model(path, torch.float64)
    ops = PieceOps(load_model_config(path))
    with torch.inference_mode():
        expected = model.forward(RowInputs(TOKEN_IDS, POSITIONS), DenseAttention(config))
        found = []
        for start, end in zip((0, *cuts), (*cuts, NUM_ROWS), strict=True):
            ops.begin(end - start)
            found.append(model.forward(RowInputs(TOKEN_IDS[start:end], POSITIONS[start:end]), ops))
    assert (torch.cat(found) - expected).abs().max() <= 1e-10 * expected.abs().max()
