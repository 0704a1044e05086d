"""A PEFT folder: `adapter_config.json` and `adapter_model.safetensors`.

Nothing in the folder is executed, and no other file is read. A setting that changes what is
computed and is not known here is refused by its name: to leave it out would give other numbers than
the library that wrote the folder.

Source: the configuration class `LoraConfig` of PEFT 0.21.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from heddle.errors import ModelFileError, UnsupportedError
from heddle.models.config_fields import Fields, read_json_object
from heddle.models.weights.source import Span

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_DTYPES = ("F64", "F32", "F16", "BF16")

_HARMLESS = frozenset(
    (
        # How it was trained, and where.
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"),
        *("task_type", "lora_dropout", "megatron_core", "runtime_config", "qalora_group_size"),
        # Which modules were chosen: the tensors tell.
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        # First values of weights; those that change the model are told by init_lora_weights.
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "ensure_weight_tying"),
        # Read below.
        *("peft_type", "r", "lora_alpha", "use_rslora", "alpha_pattern", "rank_pattern", "bias"),
        "init_lora_weights",
    )
)
_REFUSED = {
    "use_dora": "DoRA scales the columns of the sum of both weights, which needs them merged",
    "modules_to_save": "it replaces whole weights; merge it into the model first",
    "trainable_token_indices": "it replaces rows of the embedding",
    "target_parameters": "adapters of bare parameters, such as fused experts, are not built",
    "alora_invocation_tokens": "adapters that begin in the middle of a prompt are not built",
    "layer_replication": "it changes the number of layers",
    "lora_bias": "biases of adapters are not built",
}
_PLAIN_STARTS = ("gaussian", "eva", "orthogonal")
"""Ways to draw first values that leave the model itself as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """One module of an adapter."""

    rank: int
    num_inputs: int
    num_outputs: int
    scale: float


class AdapterFolder:
    """An open adapter; a context manager that closes its file.

    Raises:
        ModelFileError: a file is missing or damaged, or a tensor is not what it must be.
        UnsupportedError: the adapter is of a kind that is not built.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        config_path = self.folder / CONFIG_NAME
        settings = read_json_object(config_path)
        self._config = Fields(config_path, settings)
        self._check_config(settings)
        self._path = self.folder / WEIGHTS_NAME
        self._file = self._open()
        try:
            self.modules: Mapping[str, LowRank] = self._read_modules()
        except BaseException:
            self._close()
            raise

    def down(self, module: str, inputs: Span) -> torch.Tensor:
        """`[r, inputs]`: some columns of A."""
        part: torch.Tensor = self._slice(module, "A")[:, slice(*inputs)]
        return part

    def up(self, module: str, outputs: Span) -> torch.Tensor:
        """`[outputs, r]`: some rows of B, without the scale."""
        part: torch.Tensor = self._slice(module, "B")[slice(*outputs)]
        return part

    def check_numbers(self) -> None:
        """Read every number once.

        Raises:
            ModelFileError: one is NaN or inf, or leaves the range of float32 when it is scaled.
        """
        for module, low_rank in self.modules.items():
            down = self.down(module, (0, low_rank.num_inputs))
            up = self.up(module, (0, low_rank.num_outputs)).to(torch.float64) * low_rank.scale
            if not (down.isfinite().all() and up.to(torch.float32).isfinite().all()):
                raise ModelFileError(
                    f"{self.location(module)} hold NaN or inf, or more than float32 can hold when "
                    f"scaled by {low_rank.scale:.3g}"
                )

    def location(self, module: str) -> str:
        """File and tensors of a module, for messages."""
        return f"{self._path}: {_PREFIX}{module}.lora_A, lora_B"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        self._file.__exit__(None, None, None)

    def _slice(self, module: str, side: str) -> Any:
        return self._file.get_slice(f"{_PREFIX}{module}.lora_{side}.weight")

    def _open(self) -> Any:
        if not self._path.is_file():
            pickle = self.folder / "adapter_model.bin"
            has_pickle = pickle.exists()
            hint = f"; {pickle.name} is never read, since it may run code" if has_pickle else ""
            raise ModelFileError(f"{self._path}: is missing; it is required{hint}")
        try:
            return safe_open(str(self._path), framework="pt", device="cpu")
        except (OSError, SafetensorError) as error:
            raise ModelFileError(
                f"{self._path}: is not a whole safetensors file ({error})"
            ) from error

    def _check_config(self, settings: Mapping[str, object]) -> None:
        config = self._config
        kind = config.text("peft_type")
        if kind != "LORA":
            raise config.unsupported("peft_type", "only LORA is built")
        for key, value in settings.items():
            if value and key not in _HARMLESS:
                raise config.unsupported(key, _REFUSED.get(key, "it is not known here"))
        if config.text("bias", "none") != "none":
            raise config.unsupported("bias", "biases of adapters are not built")
        start = settings.get("init_lora_weights")
        if isinstance(start, str) and start not in _PLAIN_STARTS:
            raise config.unsupported(
                "init_lora_weights",
                "it changes the weights of the model itself; convert the adapter with PEFT first",
            )

    def _read_modules(self) -> dict[str, LowRank]:
        sides: dict[str, dict[str, tuple[int, ...]]] = {}
        for name in self._file.keys():  # noqa: SIM118 - not a mapping
            found = _TENSOR.fullmatch(name)
            if found is None or not name.startswith(_PREFIX):
                raise UnsupportedError(
                    f"{self._path}: {name} is not lora_A or lora_B of a linear module under "
                    f"{_PREFIX}; other tensors of adapters are not built"
                )
            part = self._file.get_slice(name)
            if part.get_dtype() not in _DTYPES:
                raise UnsupportedError(
                    f"{self._path}: {name} is stored as {part.get_dtype()}; known: "
                    f"{', '.join(_DTYPES)}"
                )
            module = found["module"].removeprefix(_PREFIX)
            sides.setdefault(module, {})[found["side"]] = tuple(part.get_shape())
        if not sides:
            raise ModelFileError(f"{self._path}: holds no tensor")
        return {module: self._module(module, shapes) for module, shapes in sorted(sides.items())}

    def _module(self, module: str, shapes: Mapping[str, tuple[int, ...]]) -> LowRank:
        down, up = shapes.get("A"), shapes.get("B")
        if down is None or up is None or len(down) != 2 or len(up) != 2 or down[0] != up[1]:
            raise ModelFileError(
                f"{self.location(module)} have shapes {down} and {up}; [r, in] and [out, r] were "
                "expected"
            )
        if 0 in (*down, *up):
            raise ModelFileError(f"{self.location(module)} have shapes {down} and {up}; none is 0")
        expected = self._rank(module)
        if down[0] != expected:
            raise ModelFileError(
                f"{self.location(module)} have rank {down[0]}; {CONFIG_NAME} says {expected}"
            )
        return LowRank(
            rank=down[0],
            num_inputs=down[1],
            num_outputs=up[0],
            scale=self._alpha(module) / (math.sqrt(down[0]) if self._is_stable else down[0]),
        )

    @property
    def _is_stable(self) -> bool:
        return self._config.boolean("use_rslora", False)

    def _alpha(self, module: str) -> float:
        found = self._pattern("alpha_pattern", module)
        return self._config.number("lora_alpha") if found is None else found[0].number(found[1])

    def _rank(self, module: str) -> int:
        found = self._pattern("rank_pattern", module)
        return self._config.integer("r") if found is None else found[0].integer(found[1])

    def _pattern(self, name: str, module: str) -> tuple[Fields, str] | None:
        """The patterns, and the first key of them that matches the name of a module or its end."""
        patterns = self._config.section(name)
        for key in patterns or ():
            if not re.fullmatch(r"[A-Za-z0-9_.]+", key):
                raise self._config.unsupported(name, "only plain names are built")
            if re.fullmatch(rf"(.*\.)?{key}", module):
                assert patterns is not None
                return patterns, key
        return None
