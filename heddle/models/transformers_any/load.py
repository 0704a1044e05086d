"""Fill a rank's part of a model of transformers, and put it behind `Model`.

Each parameter is filled once, from the spans that this rank holds; a tensor that belongs to none is
an error, as for every family.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from heddle.config.model import ForeignConfig
from heddle.errors import ModelFileError, UnsupportedError
from heddle.models.base import BuildContext
from heddle.models.layers.embedding import load_vocabulary
from heddle.models.transformers_any.build import create_config, create_shapes, fill_constants
from heddle.models.transformers_any.cuts import ParameterCut, plan_cuts, slice_query_range
from heddle.models.transformers_any.model import (
    LogitsModule,
    RowCutLinear,
    SummedModule,
    TransformersModel,
    lookup_factor,
    replace_module,
)
from heddle.models.transformers_any.names import Conversion, map_names
from heddle.models.transformers_any.port import StepPort, connect
from heddle.models.weights.loader import Piece
from heddle.models.weights.memory import sliced
from heddle.models.weights.source import WeightSource

_HEAD_COUNTS = ("num_heads", "num_attention_heads")
_KV_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads")
_SPAN_NAMES = ("rows", "cols", "depth")
"""Of a `Piece`, by dimension."""


def load_transformers(context: BuildContext, source: WeightSource) -> TransformersModel:
    """Build one rank's part and load its weights.

    Args:
        context: model, place and loader.
        source: the loader's.

    Raises:
        UnsupportedError: the model cannot be cut, or stores its parameters in an unknown way.
        ModelFileError: weights are missing, damaged, or of another model.
    """
    foreign = context.config.foreign
    assert isinstance(foreign, ForeignConfig), "set by the config reader"
    if context.replicates_queries or context.stage[1] > 1:
        raise UnsupportedError("stages and replicated queries are refused by the layout's rules")
    model = create_shapes(create_config(foreign.config_json))
    return _Loading(model, context, source).run()


class _Loading:
    """Carries what the parts of loading share."""

    def __init__(self, model: Any, context: BuildContext, source: WeightSource) -> None:
        self.model = model
        self.context = context
        self.source = source
        self.names = map_names(model, source.names())
        by_module = {module: name for name, module in model.named_modules()}
        self.embedding: nn.Embedding = model.get_input_embeddings()
        self.output: nn.Linear = model.get_output_embeddings()
        self.embedding_name = by_module[self.embedding]
        self.output_name = by_module[self.output]
        self.is_tied = self.output.weight is self.embedding.weight
        ends = frozenset({self.embedding_name, self.output_name})
        self.cuts = plan_cuts(model, context, ends)

    def run(self) -> TransformersModel:
        """See `load_transformers`."""
        fill_constants(self.model, self.context.loader.device)
        embedding = self._vocabulary(self.embedding_name)
        output = embedding if self.is_tied else self._vocabulary(self.output_name)
        bias = None
        if self.output.bias is not None:
            bias = self._filled(f"{self.output_name}.bias", self.output.bias)
        self._fill_parameters()
        self._leave_duplicates()
        self.context.loader.finish()
        factor = lookup_factor(self.embedding)
        replace_module(self.model, self.embedding_name, nn.Identity())
        replace_module(self.model, self.output_name, LogitsModule(output, bias))
        self._apply_cuts()
        port = StepPort(self.context.heads.lanes, self._own_heads())
        connect(self.model.base_model, port)
        return TransformersModel(self.model, port, embedding, factor)

    def _vocabulary(self, name: str) -> Any:
        config, loader = self.context.config, self.context.loader
        stored = self._stored_name(f"{name}.weight").removesuffix(".weight")
        return load_vocabulary(
            loader, self.context.shard, stored, config.vocab_size, config.hidden_size
        )

    def _stored_name(self, parameter: str) -> str:
        """The tensor that holds a parameter; the parameter's own name where there is none."""
        stored = self.names.renamed.get(parameter)
        if stored is None and self.is_tied and parameter.startswith(f"{self.embedding_name}."):
            stored = self.names.renamed.get(f"{self.output_name}.weight")
        return stored or parameter

    def _fill_parameters(self) -> None:
        """All but the ends; parameters that are one object are filled once."""
        converted: set[str] = set()
        for target, conversion in self.names.converted.items():
            converted |= self._convert(target, conversion)
        tied = self.model.all_tied_weights_keys
        ends = {id(self.embedding.weight), id(self.output.weight), id(self.output.bias)}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) not in ends and name not in tied and name not in converted:
                self._put(name, self._filled(name, tensor))
        for name, source in tied.items():
            if name != f"{self.output_name}.weight":
                self._put(name, self.model.get_parameter(source))

    def _filled(self, name: str, shape_of: torch.Tensor) -> torch.Tensor:
        """This rank's part of a parameter that one tensor holds."""
        loader, stored = self.context.loader, self._stored_name(name)
        shape = tuple(shape_of.shape)
        loader.check(stored, shape)
        cut = self.cuts.parameters.get(name)
        target = self._empty(name, shape_of, cut)
        loader.fill_pieces(stored, shape, _pieces(target, cut))
        return target

    def _empty(self, name: str, shape_of: torch.Tensor, cut: ParameterCut | None) -> torch.Tensor:
        shape = list(shape_of.shape)
        if cut is not None:
            shape[cut.dim] = cut.size
        dtype = self.context.loader.dtype if shape_of.is_floating_point() else shape_of.dtype
        if _keeps_float32(self.model, name):
            dtype = torch.promote_types(dtype, torch.float32)
        return torch.empty(shape, dtype=dtype, device=self.context.loader.device)

    def _convert(self, target: str, conversion: Conversion) -> set[str]:
        """Parameters that the library makes of several tensors, or several of one; their names."""
        loader, converter = self.context.loader, conversion.converter
        for stored, pattern in conversion.sources:
            whole = loader.load(stored, self.source.shape(stored))
            converter.add_tensor(target, stored, pattern, _given(whole))
        made = converter.convert(target, model=self.model, config=self.model.config)
        state = self.model.state_dict(keep_vars=True)
        for name, value in made.items():
            tensor = value[0] if isinstance(value, list) else value
            if name not in state or tensor.shape != state[name].shape:
                raise ModelFileError(
                    f"{self.source.location(conversion.sources[0][0])}: {name} becomes of shape "
                    f"{tuple(tensor.shape)}, which is not that of the configured model"
                )
            target_tensor = self._empty(name, state[name], self.cuts.parameters.get(name))
            for piece in _pieces(target_tensor, self.cuts.parameters.get(name)):
                piece.target.copy_(sliced(tensor, piece.rows, piece.cols, piece.depth))
            self._put(name, target_tensor)
        return set(made)

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        parent, _, key = name.rpartition(".")
        module = self.model.get_submodule(parent)
        if key in module._parameters:
            module._parameters[key] = nn.Parameter(tensor, requires_grad=False)
        else:
            module._buffers[key] = tensor

    def _leave_duplicates(self) -> None:
        """Second copies of tied parameters, and what the library says may be left alone."""
        names = list(self.names.ignored)
        for target in self.model.all_tied_weights_keys:
            if target in self.names.renamed:
                names.append(self.names.renamed[target])
        self.context.loader.leave_tensors(names)

    def _apply_cuts(self) -> None:
        for name in self.cuts.row_cut:
            linear = self.model.get_submodule(name)
            replace_module(self.model, name, RowCutLinear(linear, self.context.shard))
        for name in self.cuts.summed:
            experts = self.model.get_submodule(name)
            replace_module(self.model, name, SummedModule(experts, self.context.shard))
        first, last = self._projected_heads()
        first_kv, last_kv = self.context.kv_range
        for name in self.cuts.attention_modules:
            module = self.model.get_submodule(name)
            _set_counts(module, _HEAD_COUNTS, last - first)
            _set_counts(module, _KV_HEAD_COUNTS, last_kv - first_kv)

    def _projected_heads(self) -> tuple[int, int]:
        context = self.context
        return slice_query_range(context) if self.cuts.has_fused_heads else context.query_range

    def _own_heads(self) -> tuple[int, int]:
        """Own heads among those projected."""
        (first, last), (start, _) = self.context.query_range, self._projected_heads()
        return first - start, last - start


def _given(tensor: torch.Tensor) -> Any:
    return lambda: tensor


def _set_counts(module: nn.Module, names: Sequence[str], count: int) -> None:
    for name in names:
        if hasattr(module, name):
            setattr(module, name, count)


def _pieces(target: torch.Tensor, cut: ParameterCut | None) -> list[Piece]:
    if cut is None:
        return [Piece(target)]
    pieces, start = [], 0
    for span in cut.spans:
        part = target.narrow(cut.dim, start, span[1] - span[0])
        pieces.append(Piece(part, **{_SPAN_NAMES[cut.dim]: span}))
        start += span[1] - span[0]
    return pieces


def _keeps_float32(model: Any, name: str) -> bool:
    """The library keeps some parameters in float32, whatever the model's dtype."""
    return any(part in name for part in model._keep_in_fp32_modules_strict)
