"""Is our way of running a model exact? A twin answers, before the model's own memory is spent.

    reference   the twin with random weights, by the library alone, one whole text
    ours        the same weights through our loader; the text in two pieces, the rows of the second
                in another order, attention by an independent dense one

Equal logits show that rows meet in attention alone, that visible keys, scale, caps and sinks are
what we think, and that names and conversions of weights are understood. The same twin cut over two
ranks shows whether the published tensor-parallel plan is one that we carry out.

Legend: `P` rows of the text, `H` query heads, `D` head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from heddle.attention.adapter_rows import AdapterRows
from heddle.attention.base import DealtRows, IndexRows
from heddle.attention.recurrent.terms import RecurrentInputs
from heddle.comm.base import Communicator
from heddle.comm.solo import SoloCommunicator
from heddle.comm.threads import ThreadGroup, ThreadWorld
from heddle.config.model import ModelConfig
from heddle.errors import HeddleError, UnsupportedError
from heddle.layout.heads import HeadLayout
from heddle.models.base import BuildContext, RowInputs
from heddle.models.layers.shard import Shard
from heddle.models.transformers_any.build import fill_constants
from heddle.models.transformers_any.load import load_transformers
from heddle.models.transformers_any.quote import quoted
from heddle.models.transformers_any.twin import VOCABULARY
from heddle.models.weights.loader import WeightLoader
from heddle.models.weights.memory import MemorySource
from heddle.step.timeline import Part

NUM_ROWS = 14
"""Well beyond the windows of a twin."""
_FIRST_PIECE = 8
_TOLERANCE = 1e-4
"""Of logits in float32, as a share of the largest."""


def probe_tokens() -> torch.Tensor:
    """`[P]` int64: a text."""
    return torch.randint(VOCABULARY, (NUM_ROWS,), generator=torch.Generator().manual_seed(3))


def fill_randomly(model: Any) -> None:
    """Give a model of `create_shapes` weights in which mistakes show."""
    generator = torch.Generator().manual_seed(5)
    fill_constants(model, torch.device("cpu"))
    drawn: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for key, old in module._parameters.items():
            if old is not None:
                new = drawn.get(id(old))
                drawn[id(old)] = new = _draw(key, old, generator) if new is None else new
                module._parameters[key] = new
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.ones_like(buffer, device="cpu")


def _draw(key: str, old: torch.Tensor, generator: torch.Generator) -> torch.nn.Parameter:
    noise = torch.randn(old.shape, generator=generator)
    if noise.ndim > 1:
        noise *= 1.2 * old.shape[-1] ** -0.5
    elif key.endswith("weight"):
        noise = 1.0 + 0.3 * noise
    else:
        noise *= 0.3
    return torch.nn.Parameter(noise, requires_grad=False)


def reference_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """`[P, vocabulary]`, by the library's own plain attention."""
    model.config._attn_implementation = "eager"
    positions = torch.arange(len(tokens))[None]
    with torch.inference_mode():
        found = model(input_ids=tokens[None], position_ids=positions, use_cache=False)
    logits: torch.Tensor = found.logits[0]
    return logits


def stored_weights(model: Any) -> MemorySource:
    """The weights of a model under the names that the library would publish."""
    from transformers.core_model_loading import revert_weight_conversion

    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name in model.all_tied_weights_keys:
        state.pop(name, None)
    return MemorySource(revert_weight_conversion(model, state), "the twin")


@dataclass
class DenseOps:
    """`StepOps` of one rank over whole texts: grouped-query attention, from the definition.

    Layers of the library make no other call.

    Args:
        config: scale, cap and visible keys.
        heads: which kv head a lane reads.
        tp_rank: this rank.
    """

    config: ModelConfig
    heads: HeadLayout
    tp_rank: int
    positions: torch.Tensor
    trace: list[str]
    seen: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Layer -> positions, keys, values of all rows so far."""

    def gqa(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `StepOps.gqa`."""
        self.trace.append(f"attention {layer}")
        new = (self.positions, key, value)
        past = self.seen.get(layer)
        where, keys, values = (
            new if past is None else tuple(map(torch.cat, zip(past, new, strict=True)))
        )
        self.seen[layer] = where, keys, values
        visible = self._visible(layer, where)
        out = torch.zeros_like(query)
        for run in self.heads.runs(self.tp_rank):
            for lane in range(run.start, run.end):
                sink = None if sinks is None else sinks[lane]
                weights = self._weights(query[:, lane], keys[:, run.kv_index], visible, sink)
                out[:, lane] = weights @ values[:, run.kv_index]
        return out

    def enter(self, part: Part) -> None:
        """See `StepOps.enter`; nobody asks."""

    def repeated(
        self,
        inputs: Sequence[torch.Tensor],  # noqa: ARG002
        compute: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """See `StepOps.repeated`; every pass is computed."""
        return compute()

    @property
    def adapters(self) -> AdapterRows | None:
        """See `StepOps.adapters`; a twin has none."""
        return None

    @property
    def dealt_rows(self) -> DealtRows:
        """See `StepOps.dealt_rows`; never asked for."""
        raise AssertionError("experts of the library are not dealt out")

    def recurrent(self, layer: int, inputs: RecurrentInputs) -> torch.Tensor:  # noqa: ARG002
        """See `StepOps.recurrent`; never called."""
        raise AssertionError(f"layer {layer} of the library keeps no state here")

    def mla(
        self,
        layer: int,
        query_nope: torch.Tensor,  # noqa: ARG002
        query_rope: torch.Tensor,  # noqa: ARG002
        latent: torch.Tensor,  # noqa: ARG002
        key_up: torch.Tensor,  # noqa: ARG002
        value_up: torch.Tensor,  # noqa: ARG002
        scale: float,  # noqa: ARG002
        index: IndexRows | None = None,  # noqa: ARG002
    ) -> torch.Tensor:
        """See `StepOps.mla`; never called."""
        raise AssertionError(f"layer {layer} of the library attends to whole keys")

    def _visible(self, layer: int, where: torch.Tensor) -> torch.Tensor:
        """`[M, rows so far]`."""
        rule = self.config.kind_of(layer).visibility
        starts = torch.tensor([rule.start(p) for p in self.positions.tolist()])
        return (where >= starts[:, None]) & (where <= self.positions[:, None])

    def _weights(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        visible: torch.Tensor,
        sink: torch.Tensor | None,
    ) -> torch.Tensor:
        assert self.config.attention_scale is not None
        scores, cap = query @ keys.T * self.config.attention_scale, self.config.attention_softcap
        scores = cap * torch.tanh(scores / cap) if cap else scores
        scores = scores.masked_fill(~visible, -torch.inf)
        if sink is None:
            return scores.softmax(dim=-1)
        scores = torch.cat([scores, sink.expand(len(scores), 1)], dim=-1)
        return scores.softmax(dim=-1)[:, :-1]


class _TracedSums:
    """A communicator that notes sums."""

    def __init__(self, inner: Communicator, trace: list[str]) -> None:
        self._inner = inner
        self._trace = trace

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator.all_reduce`."""
        self._trace.append(f"sum {tuple(tensor.shape)}")
        return self._inner.all_reduce(tensor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@dataclass(frozen=True, slots=True)
class Twin:
    """A twin with weights, and what it should give."""

    config: ModelConfig
    weights: MemorySource
    tokens: torch.Tensor
    logits: torch.Tensor
    """`[P, vocabulary]`."""


def create_twin(model: Any, config: ModelConfig) -> Twin:
    """A twin of a model that `fill_randomly` filled."""
    tokens = probe_tokens()
    return Twin(config, stored_weights(model), tokens, reference_logits(model, tokens))


def check_alone(twin: Twin) -> None:
    """See that one rank gives what the library gives.

    Raises:
        UnsupportedError: it does not, or cannot run.
    """
    heads = _heads(twin.config, 1, 1)
    _compare(twin, _run(twin, heads, 0, SoloCommunicator()), "on one rank")


def tensor_parallel_refusal(twin: Twin) -> str:
    """Why the twin cannot be cut over two ranks; empty where it can."""
    if twin.config.num_query_heads < 2:
        return ""  # the layout's rules refuse it
    try:
        for slice_size in (1, 2):
            heads = _heads(twin.config, 2, slice_size)

            def rank(world: ThreadWorld, heads: HeadLayout = heads) -> torch.Tensor:
                return _run(twin, heads, world.global_rank, world.group("tp", [[0, 1]]))

            for logits in ThreadGroup(2, timeout_seconds=20.0).run(rank):
                _compare(twin, logits, "cut over two ranks")
    except HeddleError as error:
        return " ".join(str(error).split())
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        return f"a small twin cut over two ranks fails ({quoted(error)})"
    return ""


def _heads(config: ModelConfig, tp_size: int, slice_size: int) -> HeadLayout:
    return HeadLayout(
        num_query_heads=config.num_query_heads,
        num_kv_heads=config.num_kv_heads,
        tp_size=tp_size,
        slice_size=slice_size,
    )


def _run(twin: Twin, heads: HeadLayout, rank: int, tp: Communicator) -> torch.Tensor:
    """`[P, vocabulary]` of one rank, rows in order."""
    trace: list[str] = []
    loader = WeightLoader(twin.weights, torch.float32, torch.device("cpu"))
    shard = Shard(rank, heads.tp_size, _TracedSums(tp, trace))
    context = BuildContext(twin.config, heads, shard, loader)
    order = torch.randperm(NUM_ROWS - _FIRST_PIECE, generator=torch.Generator().manual_seed(7))
    pieces = (torch.arange(_FIRST_PIECE), order + _FIRST_PIECE)
    logits = torch.empty_like(twin.logits)
    with torch.inference_mode():
        model = load_transformers(context, twin.weights)
        ops = DenseOps(twin.config, heads, rank, pieces[0], trace)
        for positions in pieces:
            trace.clear()
            ops.positions = positions
            hidden = model.forward(RowInputs(twin.tokens[positions], positions), ops)
            _check_trace(trace, twin.config, heads.tp_size, len(positions))
            logits[positions] = model.logits(hidden)
    return logits


def _check_trace(trace: list[str], config: ModelConfig, tp_size: int, num_rows: int) -> None:
    """See that a pass makes the calls of every family: one sum in the lookup, two per layer."""
    total = [f"sum {(num_rows, config.hidden_size)}"] if tp_size > 1 else []
    layers = [[f"attention {i}", *total, *total] for i in range(config.num_layers)]
    expected = total + [entry for layer in layers for entry in layer]
    if trace != expected:
        raise UnsupportedError(
            "its sums over ranks are not one in the lookup and two per layer, behind attention and "
            "behind the feed-forward"
        )


def _compare(twin: Twin, logits: torch.Tensor, how: str) -> None:
    difference = float((logits - twin.logits).abs().max())
    largest = float(twin.logits.abs().max())
    if not difference <= _TOLERANCE * largest:  # NaN is unequal, too
        raise UnsupportedError(
            f"a small twin of the model {how} differs by {difference:.3g} from transformers (its "
            f"largest logit is {largest:.3g}): rows meet outside attention, or attention is of a "
            "kind that is not known here"
        )


def with_refusals(config: ModelConfig, refused: tuple[tuple[str, str], ...]) -> ModelConfig:
    """The configuration of a model with the features that it cannot have."""
    assert config.foreign is not None
    return replace(config, foreign=replace(config.foreign, refused=refused))
