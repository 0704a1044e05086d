"""One simulated replica: the engine's scheduler and block accounting, and what ranks would do.

    add --> scheduler.schedule --> [under way, until a time] --> scheduler.update --> times
                  ^                                                     |
                  +-----------------------------------------------------+

It is `heddle.engine.replica` without ranks: the same scheduler, cache and pacer, made from the same
settings. The token that a row would draw is a stand-in that ends nothing, so an answer is as long
as the trace says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

from heddle.config import SamplingParams
from heddle.config.engine import ResolvedConfig
from heddle.kvcache.sequence import SequenceBlocks
from heddle.scheduler.batch import ScheduledBatch
from heddle.scheduler.pacing import StepLoad
from heddle.scheduler.request import Request
from heddle.scheduler.scheduler import Scheduler
from heddle.simulator.prices import Clock, Price, Shape
from heddle.simulator.quiet import QuietRun, QuietRuns
from heddle.simulator.tally import Tally
from heddle.simulator.tokens import RunTokens
from heddle.step.accounting import create_cache, create_pacer
from heddle.step.topology import Topology

_PARAMS = SamplingParams(temperature=0.0, ignore_eos=True)
_STARVED = 2.0
"""A step is long for its decodes if it takes more than so many times what they alone would."""

OnStep = Callable[[int, ScheduledBatch], None]
"""Told of each step when it is chosen: replica and batch."""


class Step(NamedTuple):
    """A step that was chosen."""

    batch: ScheduledBatch
    shape: Shape
    price: Price
    begin: float


class SimulatedReplica:
    """Requests, blocks and steps of one DP coordinate.

    Args:
        index: its DP coordinate.
        resolved: what would run.
        topology: constants of the engine.
        clock: what steps take.
        tally: of the whole simulation.
        on_start: told the id of each request when it leaves the queue for the first time.
        on_step: told of each step; steps that are run through at once are not told.
    """

    def __init__(
        self,
        index: int,
        resolved: ResolvedConfig,
        topology: Topology,
        clock: Clock,
        tally: Tally,
        on_start: Callable[[int], None],
        on_step: OnStep | None = None,
    ) -> None:
        self.index = index
        self.cache = create_cache(resolved, topology)
        self.pacer = create_pacer(resolved)
        self.scheduler = Scheduler(
            resolved.scheduler,
            self.cache,
            num_places=resolved.parallel.pipeline_parallel_size,
            pacer=self.pacer,
        )
        self.num_rows = 0.0
        """That each of its ranks computed."""
        self.most_stored: list[tuple[int, int]] = []
        """(tokens, start rank) of each sequence, when it held most."""
        self._most_blocks = 0
        self._clock, self._tally = clock, tally
        self._on_start, self._on_step = on_start, on_step
        self._queued: set[int] = set()
        self._has_one_chain = (
            len(self.cache.groups) == 1
            and not self.cache.has_states
            and not resolved.parallel.cp_start_rank_rotation
        )
        self._is_paced = resolved.scheduler.target_itl_ms is not None
        self._runs = QuietRuns(self.cache, clock)
        self._run: QuietRun | None = None
        self._open: dict[int, Request] = {}
        self._load = 0

    # What a router asks.

    def load_at(self, now: float) -> int:
        """Tokens of all open sequences."""
        run = self._run
        return self._load if run is None else self._load + run.num_tokens_since(now)

    def num_hit_tokens(self, tokens: RunTokens) -> int:
        """Tokens of a prompt that need no computing here, as things were counted last."""
        blocks = self.cache.new_sequence()
        self._name_blocks(blocks, tokens)
        return self.cache.lookup(blocks, _as_list(tokens)).num_tokens

    # Requests.

    def create(self, index: int, tokens: RunTokens, room: int) -> Request:
        """A request as the scheduler takes it.

        Args:
            index: its id.
            tokens: its prompt; answers are added to them.
            room: tokens of its answer.
        """
        request = Request(
            request_id=index,
            prompt_token_ids=(),
            params=_PARAMS,
            max_output_tokens=room,
            kv_layout=self.cache.layout,
        )
        # Nobody but a rank reads the ids of a prompt from here; others ask how many there are.
        request.prompt_token_ids = cast("tuple[int, ...]", range(len(tokens)))
        request.token_ids = _as_list(tokens)
        return request

    def add(self, request: Request) -> None:
        """Queue a request; no run of quiet steps is under way."""
        assert self._run is None, "it is settled first"
        self.scheduler.add(request)
        self._name_blocks(request.blocks, cast("RunTokens", cast("object", request.token_ids)))
        self._open[request.request_id] = request
        self._queued.add(request.request_id)
        self._load += request.num_tokens
        self._runs.disturb()

    # Steps.

    def begin_run(self, now: float) -> float | None:
        """Run through steps that nothing can disturb but an arrival; the time when they have ended,
        or None where the next step may differ from the last.
        """
        self._run = self._runs.begin(now)
        return None if self._run is None else self._run.end

    def catch_up(self, now: float) -> None:
        """Account for those steps of a run that have ended before a time."""
        if self._run is not None:
            self._apply(self._run, self._run.num_ended_before(now))

    def end_run(self) -> None:
        """All steps of the run have ended."""
        assert self._run is not None, "there is a run"
        self._apply(self._run, self._run.count)
        self._run = None

    def interrupt(self, now: float) -> Step | None:
        """Leave a run: what has ended is accounted for; the step under way is one like others.

        Returns:
            That step; None if one has ended just now, so that the next is yet to be chosen.
        """
        run = self._run
        assert run is not None, "there is a run"
        self._apply(run, run.num_ended(now))
        self._run = None
        return None if run.present == now else self.choose(run.present)

    def choose(self, now: float) -> Step | None:
        """The next step; None if nothing can run."""
        self._runs.look()
        batch = self.scheduler.schedule()
        if batch is None:
            return None
        if self._on_step is not None:
            self._on_step(self.index, batch)
        for part in batch.parts if self._queued else ():
            if part.request.request_id in self._queued:
                self._queued.remove(part.request.request_id)
                self._on_start(part.request.request_id)
        shape = shape_of(batch)
        price = self._clock.step(shape)
        self._note_begin(batch, shape, price)
        return Step(batch, shape, price, now)

    def finish(self, step: Step, now: float) -> list[int]:
        """A step has ended; returns the ids of requests that ended with it."""
        tokens: dict[int, tuple[int]] = {}
        for part in step.batch.parts:
            request = part.request
            if part.samples and request.max_output_tokens:
                tokens[request.request_id] = (_answer(request),)
        ended = self.scheduler.update(step.batch, tokens)
        self._load += len(tokens)
        times = self._tally.times
        for request_id in tokens:
            self._tally.note_token(times[request_id], now)
        for request in ended:
            found = times[request.request_id]
            found.end, found.num_cached = now, request.num_cached_tokens
            found.num_preemptions = request.num_preemptions
            self._load -= request.num_tokens
            del self._open[request.request_id]
        if self._is_paced:
            load = StepLoad.of(step.batch, self.pacer.attention_length)
            self.pacer.observe(load, now - step.begin)
        self._runs.note(step.batch, self.scheduler.num_running)
        self._tally.end = max(self._tally.end, now)
        return [request.request_id for request in ended]

    def note_stored(self) -> None:
        """Remember what is stored, if it is more than ever."""
        held = self.cache.num_usable_blocks - self.cache.num_available_blocks
        if held > self._most_blocks:
            self._most_blocks = held
            self.most_stored = [
                (request.num_computed_tokens, request.blocks.start_rank)
                for request in self._open.values()
                if request.num_computed_tokens
            ]

    def _name_blocks(self, blocks: SequenceBlocks, tokens: RunTokens) -> None:
        """Give the chain of a sequence the keys of its prompt, which are names: as good as digests
        of the tokens, since answers are in no other prompt, and a tenth of the work. Where a
        sequence has several chains, each computes its own.
        """
        if self._has_one_chain:
            blocks.chains[0].keys = tokens.block_names(self.cache.virtual_block_size)

    def _apply(self, run: QuietRun, upto: int) -> None:
        done = run.apply(upto)
        if not done.num_steps:
            return
        tally, num = self._tally, len(run.requests)
        tally.num_steps += done.num_steps
        tally.num_decode_steps += done.num_steps
        self.num_rows += float(done.rows.sum())
        self._load += done.num_steps * num
        tally.gaps.add_all(done.gaps, num)
        tally.longest_gap = max(tally.longest_gap, float(done.gaps.max()))
        tally.num_tokens += done.num_steps * num
        for request in run.requests:
            times = tally.times[request.request_id]
            times.last = run.present
            times.num_tokens += done.num_steps
        if self._is_paced:
            for gap in done.gaps.tolist():
                self.pacer.observe(StepLoad(num, 0, 0.0), gap)
        tally.end = max(tally.end, run.present)

    def _note_begin(self, batch: ScheduledBatch, shape: Shape, price: Price) -> None:
        tally = self._tally
        tally.num_steps += 1
        tally.preemptions += len(batch.preempted)
        self.num_rows += price.rows
        if shape.num_decodes:
            tally.num_decode_steps += 1
            if shape.num_prompt_rows:
                alone = self._clock.step(Shape(shape.num_decodes, shape.decode_keys))
                tally.num_starved_steps += price.seconds > _STARVED * alone.seconds


def shape_of(batch: ScheduledBatch) -> Shape:
    """What the price of a step depends on."""
    num_decodes = decode_keys = num_rows = pairs = 0
    for part in batch.parts:
        count, before = part.num_scheduled_tokens, part.num_computed_tokens
        if count == 1 and part.samples:
            num_decodes += 1
            decode_keys += before
        else:
            num_rows += count
            pairs += count * before
    return Shape(num_decodes, decode_keys, num_rows, pairs)


def _as_list(tokens: RunTokens) -> list[int]:
    """Stand-ins are read by slices and grow by `append`, as the scheduler's lists do."""
    return cast("list[int]", tokens)


def _answer(request: Request) -> int:
    tokens: Any = request.token_ids
    answer: int = tokens.answer
    return answer
