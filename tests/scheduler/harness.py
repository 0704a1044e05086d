"""A scheduler with storage and a model, in one process, with a step counter in place of a clock.

The next token is a function of all tokens before it, and what it is computed from is read through
block tables and state slots, so a wrong block, a stale row or state, or a position computed twice
or never shows at once. Every step is checked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from heddle.config import SamplingParams, SchedulerConfig
from heddle.config.scheduler import SchedulingPolicy
from heddle.config.visibility import FULL, Visibility
from heddle.kvcache.copies import CacheEdits
from heddle.kvcache.groups import GroupSpec
from heddle.kvcache.keys import CacheIdentity
from heddle.kvcache.manager import KVCacheManager
from heddle.layout.kv import KVLayout
from heddle.scheduler.batch import ScheduledBatch, ScheduledPart
from heddle.scheduler.pacing import Pacer, StepLoad
from heddle.scheduler.request import Request, RequestStatus
from heddle.scheduler.scheduler import Scheduler
from tests.kvcache.fake_rows import FakeRows, Row, rows_of

VOCABULARY = 50
EOS = 0


def next_token(tokens: Sequence[int]) -> int:
    """The model: any function of all tokens will do."""
    return _token_after(rows_of(tokens)[-1])


def _token_after(name: Row) -> int:
    return hash((7, name)) % VOCABULARY


def golden(prompt: Sequence[int], max_output: int, stop: Callable[[int], bool]) -> list[int]:
    """Outputs of a prompt that runs alone, without cache, chunks or pressure."""
    name, outputs = rows_of(prompt)[-1], []
    while len(outputs) < max_output:
        outputs.append(_token_after(name))
        name = rows_of([outputs[-1]], name)[0]
        if stop(outputs[-1]):
            break
    return outputs


class Engine:
    """What a driver and its ranks do, checked at every step.

    `windows` adds cache groups to the one of full attention (`has_full=False`: instead of it).
    """

    def __init__(
        self,
        *,
        usable_blocks: int = 100,
        ranks: int = 2,
        block_size: int = 4,
        caching: bool = True,
        windows: Sequence[tuple[Visibility, int]] = (),
        has_full: bool = True,
        num_state_slots: int = 0,
        states_per_sequence: int = 1,
        state_unit: int | None = None,
        rotates: bool = False,
        num_places: int = 1,
        max_pinned_tokens: int = 0,
        policy: SchedulingPolicy = "fcfs",
        **limits: int,
    ) -> None:
        self.config = SchedulerConfig(policy=policy, **limits)
        rules = [(FULL, ranks)] if has_full else []
        self.groups = [
            GroupSpec(rule, KVLayout(size, 1, block_size)) for rule, size in (*rules, *windows)
        ]
        self.cache = KVCacheManager(
            num_blocks=usable_blocks + 1,
            groups=self.groups,
            identity=CacheIdentity(model="m", kv_cache_dtype="f", layout_fingerprint=0),
            max_step_rows=self.config.max_num_batched_tokens,
            enable_prefix_caching=caching,
            num_state_slots=num_state_slots,
            states_per_sequence=states_per_sequence,
            state_unit=state_unit,
            rotates=rotates,
            max_pinned_tokens=max_pinned_tokens,
        )
        self.layout = self.cache.layout
        self.num_places = num_places
        self.scheduler = Scheduler(self.config, self.cache, num_places=num_places)
        self.pacer: Pacer | None = None
        self.rows = FakeRows(usable_blocks + 1, self.groups, num_state_slots)
        self.requests: dict[int, Request] = {}
        self.running: list[Request] = []
        self.computed: dict[int, int] = {}  # of running requests, by id
        self.held: dict[int, set[int]] = {}  # blocks of running requests, by id
        self.token_steps: dict[int, list[int]] = {}  # steps at which a request got a token
        self.batches: list[ScheduledBatch] = []
        self.under_way: deque[tuple[ScheduledBatch, dict[int, list[int]]]] = deque()
        self.step_number = 0
        self.num_drafts = self.num_accepted = 0

    def add(self, prompt: Sequence[int], max_tokens: int | None = 4, **fields: object) -> Request:
        """Queue a request, its room resolved as a driver does."""
        params = fields.pop("params", None) or SamplingParams()
        request = Request(
            request_id=len(self.requests),
            prompt_token_ids=tuple(prompt),
            params=params,
            max_output_tokens=self.scheduler.resolve_room(len(prompt), max_tokens),
            kv_layout=self.layout,
            **fields,
        )
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.token_steps[request.request_id] = []
        return request

    def order(self, request: Request) -> tuple[int, int]:
        """Smaller ones come first, by the written rule."""
        return (request.priority if self.config.policy == "priority" else 0, request.arrival)

    def pace(self, pacer: Pacer) -> None:
        """Bound prompt rows; a row takes a millisecond. Only before the first step."""
        assert not self.batches
        self.pacer = pacer
        self.scheduler = Scheduler(self.config, self.cache, num_places=self.num_places, pacer=pacer)

    def guess(self, count: int, num_right: int) -> None:
        """Propose drafts for all decodes: the first few are what the model will say."""
        for request in self.running:
            if not request.is_finished and request.num_uncomputed_tokens == 1:
                tokens = list(request.token_ids)
                for _ in range(count):
                    tokens.append(next_token(tokens))
                right = tokens[request.num_tokens :][:num_right]
                wrong = [VOCABULARY + at for at in range(count - num_right)]
                request.draft_token_ids = (*right, *wrong)

    def submit(self) -> ScheduledBatch | None:
        """Schedule a step and let the ranks do it; its results come with `collect`. Pins expire by
        the number of steps."""
        self.cache.expire_pins(self.step_number)
        batch = self.scheduler.schedule()
        if batch is None:
            assert self.under_way or not self.scheduler.has_work, "work waits, and nothing runs"
            return None
        self.step_number += 1
        self.batches.append(batch)
        self._check(batch)
        self.rows.edit(
            CacheEdits(
                copies=batch.copies,
                wiped_blocks=batch.wiped_blocks,
                state_copies=batch.state_copies,
            )
        )
        self.under_way.append((batch, self._compute(batch)))
        return batch

    def collect(self, failed: Sequence[int] = ()) -> list[Request]:
        """Account for the oldest step under way."""
        batch, tokens = self.under_way.popleft()
        ended = self.scheduler.update(batch, tokens, failed)
        if self.pacer is not None:
            load = StepLoad.of(batch, self.pacer.attention_length)
            self.pacer.observe(load, load.num_rows / 1000)
        for part in batch.parts:
            request = part.request
            if part.samples and request.finish_reason != "error":
                self.token_steps[request.request_id].append(self.step_number)
            if not request.is_finished:
                self.computed[request.request_id] = request.num_computed_tokens
                self.num_drafts += part.num_drafts
                self.num_accepted += max(len(tokens.get(request.request_id, [])) - 1, 0)
        self.scheduler.audit()
        return ended

    def step(self, failed: Sequence[int] = (), during: Callable[[], None] | None = None):
        """Fill the pipeline, then end its oldest step; returns the requests that ended in it, or
        None if there was nothing to run."""
        while len(self.under_way) < self.num_places:
            if self.submit() is None:
                break
        if not self.under_way:
            return None
        if during is not None:
            during()
            self.scheduler.audit()
        return self.collect(failed)

    def drain(self, limit: int = 5000) -> None:
        """Run until nothing is left; then every block must be available or pinned (leak check)."""
        for _ in range(limit):
            if self.step() is None:
                break
        assert not self.scheduler.has_work
        self.cache.audit([])
        num_free_blocks = self.cache.num_usable_blocks - self.cache.num_pinned_blocks
        assert self.cache.num_available_blocks == num_free_blocks

    def _check(self, batch: ScheduledBatch) -> None:
        """Laws of one step: budget, progress, age, contiguous rows, one writer."""
        assert 1 <= batch.num_rows <= self.config.max_num_batched_tokens
        ids = [part.request.request_id for part in batch.parts]
        assert len(set(ids)) == len(ids) <= self.config.max_num_seqs
        busy = {p.request.request_id for other, _ in self.under_way for p in other.parts}
        assert not busy & {*ids, *batch.preempted}, "a request under way was touched"
        if self.num_places == 1:
            self._check_who_runs(batch)
        if self.running:
            first = min(self.running, key=self.order)
            assert first.is_finished or first.request_id not in batch.preempted
        for request_id in batch.preempted:
            del self.computed[request_id], self.held[request_id]
        if batch.preempted:
            assert set(ids) <= set(self.computed), "a request started on what a preemption freed"
        others = [part for other, _ in self.under_way for part in other.parts]
        partial = [part for part in (*batch.parts, *others) if not part.samples]
        extra = self.config.max_model_len.bit_length()
        assert len(partial) <= self.config.max_num_partial_prefills + extra
        for part in batch.parts:
            self._check_part(part)
        ended = [r for r in self.running if r.is_finished]
        for request in ended:
            self.held.pop(request.request_id, None)
        known = {r.request_id: r for r in (*self.running, *(p.request for p in batch.parts))}
        self.running = [
            r for r in known.values() if not r.is_finished and r.request_id in self.computed
        ]

    def _check_who_runs(self, batch: ScheduledBatch) -> None:
        """Each decode has a row, and of the prompts that are part-way through the first one has."""
        served = [part.request for part in batch.parts]
        running = [r for r in self.running if r.status is RequestStatus.RUNNING]
        decodes = [r for r in running if r.num_uncomputed_tokens == 1]
        assert all(request in served for request in decodes), "a decode got no row"
        prompts = [r for r in (*running, *served) if r.num_uncomputed_tokens > 1]
        if prompts:
            assert min(prompts, key=self.order) in served, "the first prompt got no row"

    def _check_part(self, part: ScheduledPart) -> None:
        request, request_id = part.request, part.request.request_id
        start, end = part.num_computed_tokens, part.num_computed_tokens + part.num_known_tokens
        assert request.num_computed_tokens == start < end <= request.num_tokens
        assert part.samples == (end == request.num_tokens)
        assert part.token_ids == (*request.token_ids[start:end], *part.draft_token_ids)
        assert end + part.num_drafts < request.num_prompt_tokens + max(request.max_output_tokens, 1)
        held = {block for table in request.block_tables for block in table if block}
        if request_id in self.computed and request_id in self.held:
            assert self.computed[request_id] == start, "rows skipped or computed twice"
            self.rows.spoil(held - self.held[request_id])
        else:
            assert start < request.num_tokens, "the last token must be computed"
            assert (request.num_cached_tokens == 0) == bool(request.no_hit_reason)
            for spec, table in zip(self.groups, request.block_tables, strict=True):
                self.rows.spoil(filter(None, table[start // spec.unit :]))
        self.computed[request_id] = end
        self.held[request_id] = held
        for spec, table in zip(self.groups, request.block_tables, strict=True):
            assert len(table) >= -(-(end + part.num_drafts) // spec.unit)

    def _compute(self, batch: ScheduledBatch) -> dict[int, list[int]]:
        tokens: dict[int, list[int]] = {}
        written: list[int] = []
        for part in batch.parts:
            request, start = part.request, part.num_computed_tokens
            known = [*request.token_ids[:start], *part.token_ids]
            written += self.rows.write(request.blocks, known, start, len(known))
            num_kept = max(part.num_sampled_rows, 1)
            self.rows.run_state(request.blocks, known, start, len(known), num_kept)
            if part.samples and request.max_output_tokens:
                tokens[request.request_id] = self._draw(part)
        assert len(set(written)) == len(written), "two requests wrote into one block"
        assert not set(written) & {copy.source_block for copy in batch.copies}
        return tokens

    def _draw(self, part: ScheduledPart) -> list[int]:
        """The token after the last known one, and one more for each right draft."""
        known = list(part.request.token_ids)
        drawn = [next_token(known)]
        for draft in part.draft_token_ids:
            if draft != drawn[-1]:
                break
            known.append(draft)
            drawn.append(next_token(known))
        return drawn
