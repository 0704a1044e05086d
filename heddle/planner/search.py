"""Every layout of a number of devices: legal or refused by name, fitting or not, fast or slow.

    degrees    tp x pcp x pp ranks make a replica; what devices are left make further replicas (dp),
               except where devices are cores, of which ranks take several instead
    sizes      up to 8 devices, planes of any size; else of sizes that divide the devices
    stages     one, unless weights fit only over several
    experts    cut over TP, or dealt out whole, where the model has any
    finalists  a few steps of each layout tell who is near the front; these are priced with more
               steps, all of them with as many, and at both ends of the sheet's ranges

Legality is asked of the engine's own rules. A degree that was fixed is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from heddle.config import ParallelConfig
from heddle.errors import ConfigError, TopologyError
from heddle.layout.mesh import divisors
from heddle.layout.resolve import MAX_DEGREE
from heddle.layout.rules import validate
from heddle.planner.cost import CostModel
from heddle.planner.devices import Edge
from heddle.planner.memory import PlannedEngine, plan_engine
from heddle.planner.settings import DoesNotFit, Settings
from heddle.planner.workload import Prediction, Workload, at_all_ends, keeps, predict

_ANY_SIZE = 8
_FINALISTS = 8
"""Of each of the ways to be near the front."""
DEGREES = (
    "tensor_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
)
"""What a search chooses."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A legal layout that fits."""

    engine: PlannedEngine
    prediction: Prediction | None
    """None: not one request of the workload fits."""
    ends: Mapping[Edge, Prediction] = field(default_factory=dict)
    """Of a finalist: predictions at the ends of the sheet's ranges and in the middle."""

    @property
    def parallel(self) -> ParallelConfig:
        """Its degrees."""
        return self.engine.parallel

    @property
    def num_devices(self) -> int:
        """That it uses."""
        world = self.parallel.world_size
        return world * self.engine.settings.devices_per_rank(world)


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A layout that is not legal, or does not fit."""

    parallel: ParallelConfig
    reasons: tuple[str, ...]
    nearest: tuple[str, ...] = ()
    """Flags of legal layouts near it; of one that does not fit, of the smallest that does."""
    needed_bytes: int | None = None
    """Of the rank that holds most, where that is more than a device has."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The whole answer of a search."""

    candidates: tuple[Candidate, ...]
    """Those that serve the workload first, in order of their throughput."""
    refused: tuple[Refused, ...]


@dataclass
class Search:
    """One question: which layouts are there for these devices?"""

    settings: Settings
    load: Workload
    base: ParallelConfig = field(default_factory=ParallelConfig)
    """Settings other than degrees, and degrees that are fixed."""
    fixed: frozenset[str] = frozenset()
    """Names of `DEGREES` whose value in `base` is kept."""

    def run(self) -> Found:
        """Judge, weigh and price all layouts.

        Raises:
            ConfigError: the number of devices is none that anybody has, or a setting that is no
                matter of layout is not legal.
        """
        devices = self.settings.num_devices
        if not 1 <= devices <= MAX_DEGREE:
            raise ConfigError(
                f"devices={devices} is not legal; it is at least 1 and at most {MAX_DEGREE:,} "
                f"(nearest: {min(max(devices, 1), MAX_DEGREE)})"
            )
        engines, refused = self._judged([1])
        if not engines and "pipeline_parallel_size" not in self.fixed:
            stages = [size for size in divisors(devices) if 1 < size <= self._most_stages]
            engines, more = self._judged(stages)
            refused += more
        priced = self._refined([self._priced(engine) for engine in engines])
        priced.sort(key=_order)
        return Found(candidates=tuple(priced), refused=tuple(_with_fitting(refused, engines)))

    @property
    def _most_stages(self) -> int:
        return self.settings.model.num_layers

    def _judged(self, stages: list[int]) -> tuple[list[PlannedEngine], list[Refused]]:
        engines: list[PlannedEngine] = []
        refused: list[Refused] = []
        illegal: set[ParallelConfig] = set()
        for parallel in self._layouts(stages):
            plain = replace(parallel, enable_expert_parallel=False)
            if plain in illegal:
                continue  # dealing experts out mends nothing
            verdict = validate(
                parallel,
                block_size=self.settings.cache.block_size,
                model=self.settings.model,
                max_model_len=self.settings.max_model_len,
            )
            if not verdict.legal:
                illegal.add(plain)
                nearest = tuple(near.flags for near in verdict.nearest)
                refused.append(Refused(parallel=parallel, reasons=verdict.reasons, nearest=nearest))
                continue
            try:
                engines.append(plan_engine(self.settings, parallel))
            except TopologyError as error:  # more ranks than anybody can start
                refused.append(
                    Refused(parallel=parallel, reasons=error.reasons, nearest=error.nearest)
                )
            except DoesNotFit as error:
                refused.append(
                    Refused(
                        parallel=parallel, reasons=(str(error),), needed_bytes=error.needed_bytes
                    )
                )
        return engines, refused

    def _priced(self, engine: PlannedEngine) -> Candidate:
        fits = engine.room.longest_prompt >= self.load.prompt_len
        fits = fits and engine.concurrency(self.load.num_tokens) > 0
        fits = fits and self.load.num_tokens <= engine.room.window
        prediction = predict(engine, self.load, CostModel(engine), nodes=1) if fits else None
        return Candidate(engine=engine, prediction=prediction)

    def _refined(self, priced: list[Candidate]) -> list[Candidate]:
        """Price the finalists again."""
        finalists = set(map(id, finalists_of(priced, self.load)))
        return [self._ended(each) if id(each) in finalists else each for each in priced]

    def _ended(self, candidate: Candidate) -> Candidate:
        ends = at_all_ends(self.load, CostModel(candidate.engine))
        return replace(candidate, prediction=ends["mid"], ends=ends)

    def _layouts(self, stages: list[int]) -> Iterator[ParallelConfig]:
        devices = self.settings.num_devices
        for num_stages in self._values("pipeline_parallel_size", stages):
            for plane in _plane_sizes(devices // max(num_stages, 1)):
                for tp in divisors(plane):
                    yield from self._planes(num_stages, tp, plane // tp)

    def _planes(self, num_stages: int, tp: int, pcp: int) -> Iterator[ParallelConfig]:
        if self._differs("tensor_parallel_size", tp):
            return
        if self._differs("prefill_context_parallel_size", pcp):
            return
        world = num_stages * tp * pcp
        replicas = 1 if self.settings.sheet.shares_host else self.settings.num_devices // world
        plane = tp * pcp
        sizes = list(range(1, plane + 1)) if plane <= _ANY_SIZE else list(divisors(plane))
        for dcp in self._values("decode_context_parallel_size", sizes):
            for copies in self._values("data_parallel_size", [replicas]):
                if world * copies > self.settings.num_devices:
                    continue
                chosen = replace(
                    self.base,
                    tensor_parallel_size=tp,
                    prefill_context_parallel_size=pcp,
                    decode_context_parallel_size=dcp,
                    pipeline_parallel_size=num_stages,
                    data_parallel_size=copies,
                )
                for deals in self._deals(tp * pcp * copies):
                    yield replace(chosen, enable_expert_parallel=deals)

    def _deals(self, num_ranks: int) -> list[bool]:
        """Whether whole experts are dealt out to the ranks of a stage."""
        if "enable_expert_parallel" in self.fixed:
            return [self.base.enable_expert_parallel]
        moe = self.settings.model.moe
        can = moe is not None and 1 < num_ranks <= moe.num_experts
        return [False, True] if can else [False]

    def _values(self, name: str, values: list[int]) -> list[int]:
        return [getattr(self.base, name)] if name in self.fixed else values

    def _differs(self, name: str, value: int) -> bool:
        return name in self.fixed and value != getattr(self.base, name)


def _plane_sizes(devices: int) -> list[int]:
    """Sizes of TP x PCP that are looked at."""
    if devices <= _ANY_SIZE:
        return list(range(1, devices + 1))
    return list(divisors(devices))


ORDERS: tuple[Callable[[tuple[Candidate, Prediction]], float], ...] = (
    lambda pair: -pair[1].tok_s,
    lambda pair: pair[1].ttft,
    lambda pair: pair[1].tpot,
    lambda pair: -pair[0].engine.room.tokens_total,
)
"""Ways to be near the front: by throughput, by first token, by gap and by room; small is near."""


def finalists_of(candidates: Sequence[Candidate], load: Workload) -> list[Candidate]:
    """Those that are near the front in some way, and serve as many requests at once as any.

    Args:
        candidates: priced with a few steps each.
        load: with its targets; layouts that keep them go first, where some do.
    """
    serving = [(each, each.prediction) for each in candidates if each.prediction is not None]
    most = max((found.concurrency for _, found in serving), default=0)
    whole = [pair for pair in serving if pair[1].concurrency == most]
    keeping = [pair for pair in whole if keeps(pair[1], load)] or whole
    chosen = [each for order in ORDERS for each, _ in sorted(keeping, key=order)[:_FINALISTS]]
    return list({id(each): each for each in chosen}.values())


def _order(candidate: Candidate) -> tuple[bool, float]:
    found = candidate.prediction
    return found is None, 0.0 if found is None else -found.tok_s


def _with_fitting(refused: list[Refused], engines: list[PlannedEngine]) -> Iterator[Refused]:
    """Where a layout does not fit, name the smallest that do."""
    by_size = sorted(engines, key=lambda engine: engine.parallel.world_size)
    fitting = tuple(degree_flags(engine.parallel) for engine in by_size[:2])
    for entry in refused:
        yield entry if entry.nearest else replace(entry, nearest=fitting)


def degree_flags(parallel: ParallelConfig) -> str:
    """The flags of a layout's degrees.

    Example:
        >>> degree_flags(ParallelConfig(tensor_parallel_size=2))
        '-tp 2 -pcp 1 -dcp 1'
    """
    words = [
        f"-tp {parallel.tensor_parallel_size}",
        f"-pcp {parallel.prefill_context_parallel_size}",
        f"-dcp {parallel.decode_context_parallel_size}",
    ]
    outer: Mapping[str, int] = {
        "-pp": parallel.pipeline_parallel_size,
        "-dp": parallel.data_parallel_size,
    }
    words += [f"{flag} {size}" for flag, size in outer.items() if size > 1]
    if parallel.enable_expert_parallel:
        words.append("--enable-expert-parallel")
    return " ".join(words)
