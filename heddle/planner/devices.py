"""Sheets of devices: what a rank has of memory, arithmetic and links, each figure with its source.

Peaks come from data sheets or from a measurement; what software reaches of a peak is an efficiency
with a range. A prediction is made three times, with the middle of all ranges and with both ends,
so that it carries a band. A file of the same form, or one that `heddle doctor --calibrate` wrote,
takes the place of a sheet.

    seconds of a collective = alpha + received bytes / beta

A group that crosses hosts pays the latency between hosts, and each of its hosts brings as many
network cards as it has members there, at most what the links inside a host carry.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from heddle.config.link_costs import LinkCosts
from heddle.errors import ConfigError

FOLDER = Path(__file__).parent / "devices"
_MAX_BYTES = 1 << 16
Edge = Literal["low", "mid", "high"]
"""Which end of the ranges: `low` is the slow one."""
EDGES: tuple[Edge, ...] = ("low", "mid", "high")


class Figure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A number, its range, and where it comes from."""

    value: float
    low: float | None = None
    high: float | None = None
    source: str

    def at(self, edge: Edge) -> float:
        """An end of the range; the value where there is none."""
        found = {"low": self.low, "mid": None, "high": self.high}[edge]
        return self.value if found is None else found


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank sees of its peers."""

    alpha: Figure
    """Seconds of an empty call; its low end is the fast one, as a number is."""
    beta: Figure
    """Bytes a rank receives a second."""

    def at(self, edge: Edge) -> LinkRates:
        """The slow end has a high latency and a low rate."""
        opposite: dict[Edge, Edge] = {"low": "high", "mid": "mid", "high": "low"}
        return LinkRates(self.alpha.at(opposite[edge]), self.beta.at(edge))


class Team(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank of several cores: what it gets done beside as many ranks of one core, as shares; and
    what a layer and a step take it.
    """

    cores: int
    """With which it was measured; between one and so many, shares fall evenly."""
    matrix: Figure
    attention: Figure
    memory: Figure
    cache: Figure
    layer_seconds: Figure
    step_seconds: Figure

    def __post_init__(self) -> None:
        if self.cores < 2:
            raise ValueError("a team has at least two cores")

    def share(self, figure: Figure, cores: int, edge: Edge) -> float:
        """Of a rate, for a rank of so many cores."""
        return float(figure.at(edge) ** (min(cores - 1, self.cores - 1) / (self.cores - 1)))


class Sheet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of device."""

    name: str
    kind: Literal["cpu", "cuda", "rocm"]
    dtype: Literal["float32", "bfloat16"]
    """In which models are computed unless one says otherwise."""
    devices_per_host: int
    memory_bytes: Figure
    reserve_bytes: Figure
    """Of a process that holds no model yet: context, libraries, buffers of collectives."""
    memory_bandwidth: Figure
    """Bytes a second, peak."""
    flops: dict[str, Figure]
    """By dtype: dense multiply and add operations a second, peak."""
    memory_efficiency: Figure
    matrix_efficiency: Figure
    attention_efficiency: Figure
    inside: Link
    """Between ranks of a host."""
    between: Link
    """Between hosts, for one member of each."""
    step_seconds: Figure
    """Of a step that computes nothing: scheduling, messages, sampling."""
    layer_seconds: Figure
    """Of a layer that computes nothing: launches and small operations."""
    cache_efficiency: Figure | None = None
    """Of reading keys and values; None: as of reading weights."""
    team: Team | None = None
    """None: cores of a rank add up."""
    serial_share: Figure | None = None
    """Of the shorter of reading and arithmetic in a product: what comes on top of the longer. None:
    all of it hides.
    """
    is_measured: bool = False
    """Every rate was measured on the machine that is planned for."""

    def __post_init__(self) -> None:
        figures = [getattr(self, name) for name in _POSITIVE]
        figures += [] if self.cache_efficiency is None else [self.cache_efficiency]
        figures += [] if self.serial_share is None else [self.serial_share]
        figures += [] if self.team is None else [getattr(self.team, name) for name in _OF_TEAM]
        figures += [*self.flops.values()]
        figures += [figure for link in (self.inside, self.between) for figure in _of(link)]
        for figure in figures:
            ends = (figure.at("low"), figure.value, figure.at("high"))
            if not (0 < ends[0] <= ends[1] <= ends[2] < float("inf")):
                raise ValueError(f"{ends} must be above 0, finite and in order")
        if self.devices_per_host < 1 or not self.flops:
            raise ValueError("a host has at least one device, and a device a dtype")

    @property
    def shares_host(self) -> bool:
        """Devices are cores of one host, of which a rank takes several where ranks are few."""
        return self.kind == "cpu"

    def rates(self, dtype: str, edge: Edge = "mid", devices_per_rank: int = 1) -> Rates:
        """What a rank gets done.

        Args:
            dtype: of the computation.
            edge: which end of the ranges.
            devices_per_rank: cores of a rank; 1 on other devices.
        Raises:
            ConfigError: a dtype that the sheet says nothing of.
        """
        if dtype not in self.flops:
            raise ConfigError(
                f"dtype={dtype} is not on the sheet of {self.name}; legal here: "
                f"{', '.join(self.flops)} (nearest: {self.dtype})"
            )
        team = self.team if devices_per_rank > 1 else None
        slow = _OPPOSITE[edge]

        def of_rank(rate: float, name: str) -> float:
            share = 1.0 if team is None else team.share(getattr(team, name), devices_per_rank, edge)
            return rate * devices_per_rank * share

        peak, read = self.flops[dtype].at(edge), self.memory_bandwidth.at(edge)
        cache = self.cache_efficiency or self.memory_efficiency
        overheads = self if team is None else team
        return Rates(
            flops=of_rank(peak * self.matrix_efficiency.at(edge), "matrix"),
            attention_flops=of_rank(peak * self.attention_efficiency.at(edge), "attention"),
            memory=of_rank(read * self.memory_efficiency.at(edge), "memory"),
            cache=of_rank(read * cache.at(edge), "cache"),
            serial_share=0.0 if self.serial_share is None else self.serial_share.at(slow),
            inside=self.inside.at(edge),
            between=self.between.at(edge),
            step_seconds=overheads.step_seconds.at(slow),
            layer_seconds=overheads.layer_seconds.at(slow),
            devices_per_host=self.devices_per_host,
        )


_OF_TEAM = ("matrix", "attention", "memory", "cache", "layer_seconds", "step_seconds")
_POSITIVE = (
    "memory_bytes",
    "reserve_bytes",
    "memory_bandwidth",
    "memory_efficiency",
    "matrix_efficiency",
    "attention_efficiency",
    "step_seconds",
    "layer_seconds",
)
_OPPOSITE: dict[Edge, Edge] = {"low": "high", "mid": "mid", "high": "low"}


def _of(link: Link) -> tuple[Figure, Figure]:
    return link.alpha, link.beta


@dataclass(frozen=True, slots=True)
class LinkRates:
    """One link, as plain numbers."""

    alpha: float
    beta: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What one rank gets done, efficiencies applied."""

    flops: float
    """Of dense layers, a second."""
    attention_flops: float
    memory: float
    """Bytes of weights read a second."""
    cache: float
    """Bytes of keys, values and states read a second."""
    serial_share: float
    """Of the shorter of reading and arithmetic, that does not hide under the longer."""
    inside: LinkRates
    between: LinkRates
    step_seconds: float
    layer_seconds: float
    devices_per_host: int

    def link(self, members: Sequence[int]) -> LinkRates:
        """What the members of a group see of each other.

        Args:
            members: global ranks; consecutive ranks share a host.
        Source: our derivation; rings of a collective use all network cards of a host.
        """
        hosts = [rank // self.devices_per_host for rank in members]
        fewest = min(hosts.count(host) for host in set(hosts))
        if fewest == len(hosts):
            return self.inside
        beta = min(self.inside.beta, self.between.beta * fewest)
        return LinkRates(self.between.alpha, beta)

    def link_costs(self, members: Sequence[int]) -> LinkCosts:
        """The constants with which an engine there would choose exchanges."""
        link = self.link(members)
        return LinkCosts(alpha=link.alpha, beta=link.beta, flops=self.flops, memory=self.memory)


def sheet_names() -> list[str]:
    """Names of the sheets that come with the package, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_sheet(name: str) -> Sheet:
    """The sheet of a device.

    Args:
        name: of a sheet, in any case; or a path of a file of this form.
    Raises:
        ConfigError: there is none, or the file is no sheet.
    """
    known = {stem.lower(): FOLDER / f"{stem}.json" for stem in sheet_names()}
    path = known.get(name.lower(), Path(name).expanduser())
    if not path.is_file():
        near = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f" (nearest: {known[near[0]].stem})" if near else ""
        raise ConfigError(
            f"device={name!r} is not known; legal: {', '.join(sheet_names())}, or a file of the "
            f"same form, as heddle doctor --calibrate writes it{hint}"
        )
    return _decode(_read(path, name), f"device={name!r}: {path}")


def replace_figures(sheet: Sheet, path: Path) -> Sheet:
    """A sheet with some of its figures replaced.

    Args:
        sheet: the whole one.
        path: of a JSON object with fields of a sheet; nested objects are merged.
    Raises:
        ConfigError: the file cannot be read, or the result is no sheet.
    """
    name = f"device_file={str(path)!r}"
    try:
        changes = msgspec.json.decode(_read(path, name))
        if not isinstance(changes, dict):
            raise ValueError("it is not a JSON object")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not legal: {error}") from error
    merged = _merged(msgspec.to_builtins(sheet), changes)
    return _decode(msgspec.json.encode(merged), name)


def write_sheet(sheet: Sheet, path: Path) -> None:
    """Write a sheet as `load_sheet` reads it.

    Raises:
        OSError: the file cannot be written.
    """
    content = msgspec.json.format(msgspec.json.encode(sheet), indent=2)
    path.write_bytes(content + b"\n")


def _merged(whole: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    found = dict(whole)
    for key, value in changes.items():
        old = found.get(key)
        nested = isinstance(value, dict) and isinstance(old, dict)
        found[key] = _merged(old, value) if nested and isinstance(old, dict) else value
    return found


def _read(path: Path, name: str) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error}") from error
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{name} is not a sheet: it has more than {_MAX_BYTES} bytes")
    return content


def _decode(content: bytes, name: str) -> Sheet:
    try:
        return msgspec.json.decode(content, type=Sheet)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not a sheet: {error}") from error
