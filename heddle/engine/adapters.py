"""The adapters that requests may name, and the slots in which ranks hold them.

Everything is checked here, against the headers of the model and of the adapter, so that no rank has
a reason to fail. Ranks learn of a change in the next step: all of them make it before they compute
the first row that goes through it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from heddle.config.adapters import AdapterConfig
from heddle.config.engine import ResolvedConfig
from heddle.engine.recovery.loaded_files import Marks, marks_of, what_changed
from heddle.errors import ConfigError, ModelFileError, RequestError, counted, quoted
from heddle.step.batch import AdapterChange

if TYPE_CHECKING:
    from heddle.models.adapters.slots import AdapterSite

MAX_NAME = 128
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdapter:
    """An adapter that requests may name."""

    name: str
    slot: int
    path: str
    serial: int
    """How many were loaded before it."""
    files: Marks
    """As they were when it was checked."""

    @property
    def cache_name(self) -> str:
        """Never given twice, so that KV computed with an adapter ends with it."""
        return f"{self.serial} {self.name}"

    @property
    def change(self) -> AdapterChange:
        """For ranks that do not hold it."""
        return AdapterChange(slot=self.slot, path=self.path)


class AdapterTable:
    """Names, slots, and what may still be loaded.

    Args:
        resolved: what runs.
        find: called once, with nothing, for the matrices that take adapters; None: the model tells.
    Raises:
        ConfigError, ModelFileError, UnsupportedError: an adapter named at start cannot be loaded,
            or the model takes none.
    """

    def __init__(
        self,
        resolved: ResolvedConfig,
        find: Callable[[], Mapping[str, AdapterSite]] | None = None,
    ) -> None:
        self._resolved = resolved
        self._find = find
        self._loaded: dict[str, LoadedAdapter] = {}
        self._num_loaded = 0
        for name, path in self._config.lora_modules:
            self._add(name, path)

    @property
    def loaded(self) -> tuple[LoadedAdapter, ...]:
        """Those that requests may name, in order of loading."""
        return tuple(self._loaded.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Adapters that requests may name, in order of loading."""
        return tuple(self._loaded)

    def get(self, name: str) -> LoadedAdapter:
        """The adapter of this name.

        Raises:
            RequestError: there is none.
        """
        found = self._loaded.get(name) if isinstance(name, str) else None
        if found is None:
            known = ", ".join(self.names) or "none"
            raise RequestError(
                f"no adapter is called {quoted(name)}; loaded: {known}", "adapter_not_found"
            )
        return found

    def load(self, name: str, path: str) -> AdapterChange:
        """Check an adapter and give it a slot.

        Args:
            name: for requests.
            path: in the folder from which adapters may be loaded; absolute, or relative to it.
        Raises:
            ConfigError: adapters are off, the name is in use, the path lies outside, or all slots
                are taken.
            ModelFileError, UnsupportedError: the adapter is damaged, does not fit, or is of a kind
                that is not built.
        """
        return self._add(name, self._allowed(path))

    def unload(self, name: str, num_requests: int) -> AdapterChange:
        """Forget an adapter.

        Args:
            name: of the adapter.
            num_requests: open requests that use it.
        Raises:
            RequestError: there is none of this name, or it is in use.
        """
        self.get(name)
        if num_requests:
            raise RequestError(
                f"adapter {quoted(name)} is in use by {counted(num_requests, 'request')}; wait for "
                "them, or abort them first",
                "adapter_in_use",
            )
        return self.drop(name)

    def drop(self, name: str) -> AdapterChange:
        """Forget an adapter of this name, whoever uses it."""
        return AdapterChange(slot=self._loaded.pop(name).slot, path=None)

    def changed_files(self) -> dict[str, str]:
        """What is not as it was when it was checked, by name of the adapter."""
        found = {
            adapter.name: what_changed(adapter.files, _marks(Path(adapter.path)))
            for adapter in self._loaded.values()
        }
        return {name: change for name, change in found.items() if change}

    @property
    def _config(self) -> AdapterConfig:
        return self._resolved.adapters

    def _allowed(self, path: str) -> Path:
        """Where a path leads, which must be inside the one folder."""
        if self._config.lora_dir is None:
            raise ConfigError("adapters cannot be loaded while running; lora_dir names no folder")
        folder = _resolve(self._config.lora_dir)
        found = _resolve(path, folder)
        # The files of an adapter may be links, too.
        for part in (found, *(_resolve(name, found) for name in ADAPTER_FILES)):
            if part == folder or not part.is_relative_to(folder):
                raise ConfigError(f"{path!r} is not inside the folder of adapters, {folder}")
        return found

    def _add(self, name: str, path: str | Path) -> AdapterChange:
        self._check_new(name)
        path = _resolve(path)
        if not path.is_dir():
            raise ModelFileError(f"{path}: is not a folder; an adapter is one")
        # Tensors are a library of their own, which nobody needs who has no adapters.
        from heddle.models.adapters.folder import AdapterFolder
        from heddle.models.adapters.targets import check_targets

        files = _marks(path)
        with AdapterFolder(path) as adapter:
            check_targets(adapter, self._sites, self._config.max_lora_rank)
            adapter.check_numbers()
        used = {other.slot for other in self._loaded.values()}
        slot = next(slot for slot in range(self._config.max_loras) if slot not in used)
        self._loaded[name] = LoadedAdapter(
            name=name, slot=slot, path=str(path), serial=self._num_loaded, files=files
        )
        self._num_loaded += 1
        return self._loaded[name].change

    def _check_new(self, name: str) -> None:
        if not self._config.enable_lora:
            raise ConfigError("adapters are off; set enable_lora")
        if not (isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable()):
            raise ConfigError(
                f"{quoted(name)} is no name of an adapter; it is printable text of 1 to {MAX_NAME} "
                "characters"
            )
        if name in self._loaded:
            raise ConfigError(f"adapter {quoted(name)} is loaded already; unload it first")
        if len(self._loaded) == self._config.max_loras:
            raise ConfigError(
                f"max_loras={self._config.max_loras} adapters are loaded; unload one first: "
                f"{', '.join(self.names)}"
            )

    @cached_property
    def _sites(self) -> Mapping[str, AdapterSite]:
        if self._find is not None:
            return self._find()
        from heddle.models.adapters.targets import find_sites
        from heddle.models.weights.memory import HeaderSource
        from heddle.models.weights.open import open_weights

        return find_sites(
            self._resolved.model, HeaderSource(open_weights(self._resolved.model_path))
        )


def _marks(folder: Path) -> Marks:
    return marks_of(folder / name for name in ADAPTER_FILES)


def _resolve(path: str | Path, folder: Path | None = None) -> Path:
    """Where a path leads, through all links.

    Raises:
        ConfigError: nowhere, or it is no path at all.
    """
    try:
        found = (Path(path) if folder is None else folder / path).resolve()
        found.exists()  # a name may be longer than any can be
        return found
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"{path!r} is not a path of an adapter ({error})") from error
