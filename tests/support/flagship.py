"""Runs one mixed workload over any layout and holds it against one rank.

The golden run is one rank, no cache reuse, each prompt whole in one step. Every other run is fed
golden's tokens, so both stay on one path and each step's logits can be compared. The audit of the
caches uses its own copy of the placement formula.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from heddle.attention.storage import KVStore, SlotWrite
from heddle.config import (
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    ResolvedConfig,
    SamplingParams,
    SchedulerConfig,
)
from heddle.config.engine import ModelImpl
from heddle.config.link_costs import LinkCosts
from heddle.config.model import LayerKind
from heddle.config.speculative import SpeculativeConfig
from heddle.config.visibility import FULL, Visibility
from heddle.engine.driver import Driver
from heddle.engine.executors.create import create_executor
from heddle.engine.inputs import PromptInput
from heddle.engine.outputs import RequestOutput
from heddle.layout.cache_groups import CacheGroup, create_cache_groups
from heddle.layout.cache_need import blocks_needed
from heddle.layout.resolve import resolve
from heddle.models.config_json import load_model_config
from heddle.runner.worker import RankWorker
from heddle.scheduler.request import Request
from heddle.scheduler.scheduler import Scheduler

NUM_TOKENS = 7
PRICES = {
    "free": LinkCosts(alpha=0.0, beta=1e18, request=0.0),
    "dear": LinkCosts(alpha=1.0, beta=1.0),
    # About what gloo costs beside a layer of 50 million weights, scaled down to a tiny one.
    "usual": LinkCosts(alpha=2e-8, beta=1e12, request=0.0),
}
"""Tiny layers would never pay a real price, so every row would be copied."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layout and one way to run the workload on it."""

    sizes: tuple[int, int, int] = (1, 1, 1)
    """(tp, pcp, dcp)."""
    interleave: int | str = 1
    """A number, or `block`."""
    block_size: int = 4
    exchange: str = "auto"
    context: str = "auto"
    workspace: int = 8
    chunk: int = 512
    """Rows of one step."""
    has_prefix: bool = False
    """A second wave of prompts shares prefixes with the first, some within a block."""
    is_preempted: bool = False
    """The pool is smaller than what runs at once needs."""
    executor: str = "threads"
    dtype: str = "float32"
    kv_dtype: str = "auto"
    backend: str = "auto"
    stages: int = 1
    """Pipeline stages."""
    replicas: int = 1
    """Data-parallel replicas."""
    prices: str = "free"
    """What calls cost in the eyes of the planner: `free` deals every row out, `dear` none, `usual`
    in between.
    """
    decodes: str = "auto"
    """Decode rows under PCP: `copy`, `whole` or `auto`."""
    rotates: bool = False
    """Block chains start on the rank that stores least."""
    has_experts: bool = False
    """Whole experts are dealt out."""
    has_drafts: bool = False
    """Several tokens of a sequence are checked in one step."""
    num_first: int = 0
    """Above 0: every layer sees a short window and so many first tokens, whatever the model."""
    lanes: int | None = None
    replicates_queries: bool = False
    model_impl: ModelImpl = "auto"
    """Whose layers run."""

    @property
    def name(self) -> str:
        """Test id."""
        tp, pcp, dcp = self.sizes
        flags = "".join(
            word
            for word, on in (
                (" prefix", self.has_prefix),
                (" preempted", self.is_preempted),
                (" rotates", self.rotates),
                (" ep", self.has_experts),
                (" drafts", self.has_drafts),
                (" wq", self.replicates_queries),
                (f" first{self.num_first}", self.num_first),
                (f" lanes{self.lanes}", self.lanes),
                (f" {self.kv_dtype}", self.kv_dtype != "auto"),
                (f" pp{self.stages}", self.stages > 1),
                (f" dp{self.replicas}", self.replicas > 1),
            )
            if on
        )
        return (
            f"tp{tp} pcp{pcp} dcp{dcp} i{self.interleave} b{self.block_size} {self.exchange} "
            f"{self.context} chunk{self.chunk} {self.prices} {self.decodes}{flags}"
        )


@dataclass
class GoldenAnswer:
    """One prompt on one rank."""

    token_ids: tuple[int, ...]
    logits: torch.Tensor
    """`[NUM_TOKENS, vocabulary]`."""
    kv: dict[int, torch.Tensor] = field(default_factory=dict)
    """Per attention layer `[positions, K, W]`."""


Prompt = tuple[int, ...]


def workload(vocab_size: int) -> tuple[list[Prompt], list[Prompt]]:
    """First and second wave: long prompts, and prompts of one to a few tokens."""

    def ids(seed: int, count: int) -> Prompt:
        return tuple((seed * 37 + i * i * 11 + i * 5) % (vocab_size - 3) + 3 for i in range(count))

    first = [ids(1, 37), ids(2, 1), ids(3, 9), ids(4, 2), ids(5, 3), ids(6, 21)]
    shared = first[0]
    second = [
        shared[:30] + ids(7, 4),
        shared[:13] + ids(8, 1),
        shared,
        first[5][:5] + ids(9, 12),
        ids(10, 1),
    ]
    return first, second


def parallel_of(case: Case) -> ParallelConfig:
    """Degrees and exchanges of a case."""
    tp, pcp, dcp = case.sizes
    interleave = case.block_size if case.interleave == "block" else int(case.interleave)
    return ParallelConfig(
        tensor_parallel_size=tp,
        prefill_context_parallel_size=pcp,
        decode_context_parallel_size=dcp,
        kv_interleave_size=interleave,
        dcp_comm_backend=case.exchange,  # type: ignore[arg-type]
        cp_context_exchange=case.context,  # type: ignore[arg-type]
        context_workspace_tokens=max(case.workspace, dcp * interleave),
        pipeline_parallel_size=case.stages,
        data_parallel_size=case.replicas,
        decode_row_sharding=case.decodes,  # type: ignore[arg-type]
        cp_start_rank_rotation=case.rotates,
        enable_expert_parallel=case.has_experts,
        cp_lanes=case.lanes,
        dcp_q_replicate=case.replicates_queries,
    )


def resolve_case(path: Path, case: Case) -> ResolvedConfig:
    """The engine configuration of a case."""
    model = load_model_config(path, model_impl=case.model_impl)
    if case.num_first:
        rule = LayerKind(visibility=Visibility("window", 9, case.num_first))
        model = dataclasses.replace(model, layer_kinds=(rule,) * model.num_layers)
    groups = create_cache_groups(model, case.sizes[2], case.block_size)
    num_blocks = 1 + _pool_blocks(case, groups)
    config = EngineConfig(
        model=str(path),
        parallel=parallel_of(case),
        cache=CacheConfig(
            block_size=case.block_size,
            num_blocks_override=num_blocks,
            kv_cache_dtype=case.kv_dtype,
            enable_prefix_caching=case.has_prefix,
        ),
        scheduler=SchedulerConfig(max_num_batched_tokens=case.chunk),
        dtype=case.dtype,
        executor=case.executor,  # type: ignore[arg-type]
        backend=case.backend,
        num_threads=1,
        step_timeout_seconds=300,
        link_costs=PRICES[case.prices],
        speculative=SpeculativeConfig(prompt_lookup_min=1) if case.has_drafts else None,
    )
    return resolve(
        config,
        model,
        free_memory_bytes=1 << 30,
        num_cores=2,
        model_path=str(path),
    )


def _pool_blocks(case: Case, groups: Sequence[CacheGroup]) -> int:
    """Room for everything, or for little more than the longest sequence."""
    longest = 37 + NUM_TOKENS - 1
    tokens = longest if case.is_preempted else 700
    needs = (
        blocks_needed(
            group.visibility if case.is_preempted else FULL,
            group.world_size * case.block_size,
            tokens,
            min(case.chunk, tokens),
        )
        for group in groups
    )
    return sum(needs) + 1


@contextmanager
def open_driver(resolved: ResolvedConfig) -> Iterator[Driver]:
    """A driver over started ranks, whose caches hold NaN."""
    executor = create_executor(resolved)
    try:
        executor.start()
        for worker in getattr(executor, "workers", ()):
            for tensor in worker.store.tensors:
                tensor.view(torch.uint8).fill_(255)  # NaN in every type
        yield Driver(resolved, executor, None)
    finally:
        executor.close()


def drain(
    driver: Driver,
    prompts: list[Prompt],
    teachers: list[tuple[int, ...]],
    after_step: Callable[[dict[int, int]], None],
    before_step: Callable[[], None],
) -> list[RequestOutput]:
    """Run prompts to their end; `after_step` gets {sequence id: prompt index}."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs: dict[str, RequestOutput] = {}
    order = []
    sequences: dict[int, int] = {}
    for index, (prompt, teacher) in enumerate(zip(prompts, teachers, strict=True)):
        request_id = driver.add(
            PromptInput(token_ids=prompt), params, teacher=teacher, return_logits=True
        )
        order.append(request_id)
        state = driver._states[request_id]
        sequences[state.sequences[0].request_id] = index
    while driver.has_work:
        before_step()
        for output in driver.step():
            outputs[output.request_id] = output
        after_step(sequences)
        driver.audit()
    return [outputs[request_id] for request_id in order]


def logits_of(output: RequestOutput, dtype: str) -> torch.Tensor:
    rows = output.outputs[0].logits
    assert rows is not None
    return torch.stack(
        [torch.frombuffer(bytearray(row), dtype=getattr(torch, dtype)) for row in rows]
    )


def golden_run(
    path: Path, dtype: str = "float32", num_first: int = 0, kv_dtype: str = "auto"
) -> dict[Prompt, GoldenAnswer]:
    """Every prompt of the workload on one rank, alone in the batch."""
    case = Case(
        executor="inline", dtype=dtype, kv_dtype=kv_dtype, block_size=16, num_first=num_first
    )
    # Layer by layer in Python, since what is written is noted on the way.
    resolved = dataclasses.replace(resolve_case(path, case), enforce_eager=True)
    answers: dict[Prompt, GoldenAnswer] = {}
    first, second = workload(resolved.model.vocab_size)
    for prompt in dict.fromkeys(first + second):
        with open_driver(resolved) as driver:
            store = driver._executor.workers[0].store  # type: ignore[attr-defined]
            kv = capture_writes(store)
            (output,) = drain(driver, [prompt], [()], lambda _: None, lambda: None)
            answers[prompt] = GoldenAnswer(
                output.outputs[0].token_ids,
                logits_of(output, dtype),
                {layer: decoded(store, torch.cat(rows)) for layer, rows in kv.items()},
            )
    return answers


def decoded(store: KVStore, rows: torch.Tensor) -> torch.Tensor:
    """Stored rows as numbers; plain ones as they are."""
    return rows if rows.is_floating_point() else store.codec.decode(rows, torch.float64)


def capture_writes(store: KVStore) -> dict[int, list[torch.Tensor]]:
    """What is written for each layer from now on; one sequence on one rank writes in order."""
    written: dict[int, list[torch.Tensor]] = {}
    write = store.write

    def noted(layer: int, where: SlotWrite, rows: torch.Tensor) -> None:
        written.setdefault(layer, []).append(rows.clone())
        write(layer, where, rows)

    store.write = noted  # type: ignore[method-assign]
    return written


def tolerance_of(golden: dict[Prompt, GoldenAnswer], dtype: str = "float32") -> float:
    """Largest difference of logits that rounding explains: grows with the largest of them."""
    largest = max(float(answer.logits.abs().max()) for answer in golden.values())
    return (1e-10 if dtype == "float64" else 1e-5) * max(1.0, largest)


def rounding_error(golden: dict[Prompt, GoldenAnswer], exact: dict[Prompt, GoldenAnswer]) -> float:
    """Largest difference between one rank in float32 and one rank in float64.

    Tokens are compared as long as they agree, for only then both saw the same context.
    """
    worst = 0.0
    for prompt, answer in golden.items():
        pairs = zip(answer.token_ids, exact[prompt].token_ids, strict=True)
        agreed = 1 + sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        rows = slice(0, agreed)
        difference = answer.logits[rows].double() - exact[prompt].logits[rows]
        worst = max(worst, float(difference.abs().max()))
    return worst


def row_error(golden: dict[Prompt, GoldenAnswer], exact: dict[Prompt, GoldenAnswer]) -> float:
    """The same for cached rows of the prompts, as a share of the largest element of a layer."""
    return max(
        float((rows[: len(prompt)].double() - exact[prompt].kv[layer][: len(prompt)]).abs().max())
        / max(1.0, float(rows.abs().max()))
        for prompt, answer in golden.items()
        for layer, rows in answer.kv.items()
    )


def near_tie_share(golden: dict[Prompt, GoldenAnswer], tolerance: float) -> float:
    """Share of golden's steps whose two best tokens are too close to tell apart."""
    rows = torch.cat([answer.logits for answer in golden.values()])
    best, second = rows.topk(2, dim=-1).values.unbind(-1)
    return float((best - second <= 100 * tolerance).float().mean())


@dataclass
class Report:
    """What a run showed, beside having passed."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_drafts: int = 0
    num_cached_tokens: int = 0
    num_near_ties: int = 0
    num_tokens: int = 0
    num_audited_rows: int = 0
    worst_difference: float = 0.0
    tolerance: float = 0.0
    row_tolerance: float = 1e-5


def run_case(
    path: Path,
    golden: dict[Prompt, GoldenAnswer],
    case: Case,
    tolerance: float,
    row_tolerance: float = 1e-5,
) -> Report:
    """Run the workload and compare every step's logits, tokens and, on threads, cached rows.

    Args:
        path: checkpoint.
        golden: of this checkpoint.
        case: what runs.
        tolerance: largest difference of logits.
        row_tolerance: largest difference of cached rows, as a share of a layer's largest element.
    """
    resolved = resolve_case(path, case)
    first, second = workload(resolved.model.vocab_size)
    report = Report(tolerance=tolerance, row_tolerance=row_tolerance)
    with open_driver(resolved) as driver:
        for wave in (first, second):
            auditor = Auditor(driver, resolved, golden, wave, report)
            teachers = [golden[prompt].token_ids for prompt in wave]
            outputs = drain(driver, wave, teachers, auditor.after_step, auditor.before_step)
            for prompt, output in zip(wave, outputs, strict=True):
                compare(golden[prompt], output, report, case)
        totals = driver.counters.totals()
        report.num_steps = totals["steps"]
        report.num_preemptions = totals["preemptions"]
        report.num_drafts = totals["drafts"]
        assert driver.num_running == driver.num_waiting == 0
    return report


def compare(golden: GoldenAnswer, output: RequestOutput, report: Report, case: Case) -> None:
    """Oracles on logits and on tokens, aware of near ties."""
    assert output.error is None
    found = logits_of(output, case.dtype)
    assert found.shape == golden.logits.shape
    report.num_cached_tokens += output.num_cached_tokens
    difference = float((found - golden.logits).abs().max())
    report.worst_difference = max(report.worst_difference, difference)
    assert difference <= report.tolerance
    for row, expected in zip(found, golden.logits, strict=True):
        best, second = expected.topk(2).values
        report.num_tokens += 1
        if best - second > 100 * report.tolerance:
            assert int(row.argmax()) == int(expected.argmax())
        else:
            report.num_near_ties += 1
            assert best - expected[int(row.argmax())] <= 100 * report.tolerance


class Auditor:
    """After each step: every cached row is right and where it belongs; nothing else was touched."""

    def __init__(
        self,
        driver: Driver,
        resolved: ResolvedConfig,
        golden: dict[Prompt, GoldenAnswer],
        prompts: list[Prompt],
        report: Report,
    ) -> None:
        self.driver = driver
        self.workers = getattr(driver._executor, "workers", ())
        self.parallel = resolved.parallel
        self.sharing = (
            [group.world_size for group in self.workers[0].topology.groups] if self.workers else []
        )
        self.block_size = resolved.cache.block_size
        self.golden = golden
        self.prompts = prompts
        self.report = report
        self.has_drafts = resolved.speculative is not None
        self.before: list[torch.Tensor | None] = []

    def before_step(self) -> None:
        self.before = [
            worker.store.tensors[0].clone() if worker.store.tensors else None
            for worker in self.workers
        ]

    def owner_and_slot(
        self, group: int, start: int, table: list[int], position: int
    ) -> tuple[int, int]:
        ranks, run = self.sharing[group], self.parallel.kv_interleave_size
        index = position // (ranks * run) * run + position % run
        block = table[index // self.block_size]
        owner = (position // run + (start if ranks > 1 else 0)) % ranks
        return owner, block * self.block_size + index % self.block_size

    def place_of(self, rank: int) -> int:
        """DCP position of a rank of a replica's stage: PCP first, then TP."""
        tp, pcp = self.parallel.tensor_parallel_size, self.parallel.prefill_context_parallel_size
        return (rank % tp * pcp + rank // tp % pcp) % self.parallel.decode_context_parallel_size

    def after_step(self, sequences: dict[int, int]) -> None:
        for rank, worker in enumerate(self.workers):
            self.check_rank(rank, worker, sequences)

    def scheduler(self, rank: int) -> Scheduler:
        """That of a rank's replica."""
        per_replica = len(self.workers) // self.parallel.data_parallel_size
        return self.driver.replicas[rank // per_replica].scheduler

    def running(self, rank: int) -> list[Request]:
        """Sequences that hold blocks on a rank."""
        return list(self.scheduler(rank)._queues.running)

    def check_rank(self, rank: int, worker: RankWorker, sequences: dict[int, int]) -> None:
        heads = worker.topology.heads
        kv = slice(*heads.kv_range(rank % heads.tp_size // heads.slice_size))
        owned: set[int] = set()
        for request in self.running(rank):
            if request.request_id not in sequences:
                continue
            is_under_way = request in self.scheduler(rank)._flight
            if is_under_way or self.has_drafts:
                # Rows of the next step, or of drafts that were not accepted, lie beyond its length.
                held = {block for table in request.block_tables for block in table if block}
                owned |= {b * self.block_size + i for b in held for i in range(self.block_size)}
            if is_under_way:
                continue  # its next step may be at work here, or still has a prefix to copy
            answer = self.golden[self.prompts[sequences[request.request_id]]]
            for group, table in enumerate(request.block_tables):
                owned |= self.check_rows(worker, rank, request, group, table, answer, kv)
        if not worker.store.tensors:
            return
        before = self.before[rank]
        changed = (worker.store.tensors[0] != before) & ~(
            worker.store.tensors[0].isnan() & before.isnan()
        )
        touched = set(changed.flatten(1).any(dim=1).nonzero().flatten().tolist())
        strays = {slot for slot in touched if slot not in owned and not self.is_free(rank, slot)}
        assert not strays, f"rank {rank} wrote slots {sorted(strays)} that nobody owns"

    def check_rows(
        self,
        worker: RankWorker,
        rank: int,
        request: Request,
        group: int,
        table: list[int],
        answer: GoldenAnswer,
        kv: slice,
    ) -> set[int]:
        """Rows of one sequence in one cache group equal golden's; their slots on this rank."""
        start, length = request.blocks.start_rank, request.num_computed_tokens
        ranks, run = self.sharing[group], self.parallel.kv_interleave_size
        place = self.place_of(rank) if ranks > 1 else 0
        virtual = self.block_size * ranks
        kept = [t for t in range(length) if table[t // virtual] != 0]
        rule = worker.topology.groups[group].visibility
        assert set(range(rule.needed_from(length), length)) <= set(kept), "a visible row is gone"
        places = [(t, *self.owner_and_slot(group, start, table, t)) for t in kept]
        mine = [(t, slot) for t, owner, slot in places if owner == place]
        assert len(mine) <= -(-length // (ranks * run)) * run
        positions, slots = [t for t, _ in mine], [slot for _, slot in mine]
        for layer in worker.topology.groups[group].layers:
            if layer not in worker.topology.stage_layers(rank):
                continue
            expected = answer.kv[layer][positions][:, kv]
            scale = max(1.0, float(answer.kv[layer].abs().max()))
            torch.testing.assert_close(
                decoded(worker.store, worker.store.layer(layer)[slots]),
                expected,
                rtol=0,
                atol=self.report.row_tolerance * scale,
                equal_nan=False,
            )
            self.report.num_audited_rows += len(slots)
        return set(slots)

    def is_free(self, rank: int, slot: int) -> bool:
        """Blocks that were given back within this step may have been written in it."""
        running = {
            block
            for request in self.running(rank)
            for table in request.block_tables
            for block in table
        }
        return slot // self.block_size not in running and slot >= self.block_size


def layouts(max_ranks: int) -> list[tuple[int, int, int]]:
    """Every legal (tp, pcp, dcp) of up to `max_ranks` ranks, from the written rule."""
    found = []
    for tp in range(1, max_ranks + 1):
        for pcp in range(1, max_ranks // tp + 1):
            for dcp in range(1, tp * pcp + 1):
                if pcp % dcp == 0 or (dcp % pcp == 0 and tp % (dcp // pcp) == 0):
                    found.append((tp, pcp, dcp))
    return found


def with_sizes(case: Case, sizes: tuple[int, int, int]) -> Case:
    """The case on another layout; exchanges that need DCP become `auto` at dcp 1."""
    if sizes[2] == 1:
        return dataclasses.replace(case, sizes=sizes, exchange="auto", context="auto")
    return dataclasses.replace(case, sizes=sizes)
