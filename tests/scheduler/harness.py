"""A scheduler with storage and a model, in one process, with a step counter in place of a clock.

The next token is a function of all tokens before it, and it is read through the block table, so a
wrong block, a stale row or a position computed twice or never shows at once. Every step is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from heddle.config import SamplingParams, SchedulerConfig
from heddle.kvcache.keys import CacheIdentity
from heddle.kvcache.manager import KVCacheManager
from heddle.layout.kv import KVLayout
from heddle.scheduler.batch import ScheduledBatch, ScheduledPart
from heddle.scheduler.request import Request
from heddle.scheduler.scheduler import Scheduler
from tests.kvcache.fake_rows import FakeRows, rows_of

VOCABULARY = 50
EOS = 0


def next_token(tokens: Sequence[int]) -> int:
    """The model: any function of all tokens will do."""
    return hash((7, rows_of(tokens)[-1])) % VOCABULARY


def golden(prompt: Sequence[int], max_output: int, stop: Callable[[int], bool]) -> list[int]:
    """Outputs of a prompt that runs alone, without cache, chunks or pressure."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_output:
        tokens.append(next_token(tokens))
        if stop(tokens[-1]):
            break
    return tokens[len(prompt) :]


class Engine:
    """What a driver and its ranks do, checked at every step."""

    def __init__(
        self,
        *,
        usable_blocks: int = 100,
        ranks: int = 2,
        block_size: int = 4,
        caching: bool = True,
        **limits: int,
    ) -> None:
        self.layout = KVLayout(world_size=ranks, interleave_size=1, block_size=block_size)
        self.cache = KVCacheManager(
            num_blocks=usable_blocks + 1,
            layout=self.layout,
            identity=CacheIdentity(model="m", kv_cache_dtype="f", layout_fingerprint=0),
            enable_prefix_caching=caching,
        )
        self.config = SchedulerConfig(**limits)
        self.scheduler = Scheduler(self.config, self.cache)
        self.rows = FakeRows(usable_blocks + 1, ranks * block_size)
        self.requests: dict[int, Request] = {}
        self.running: list[Request] = []
        self.computed: dict[int, int] = {}  # of running requests, by id
        self.held: dict[int, int] = {}  # blocks of running requests, by id
        self.token_steps: dict[int, list[int]] = {}  # steps at which a request got a token
        self.batches: list[ScheduledBatch] = []
        self.step_number = 0

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

    def step(self, failed: Sequence[int] = (), during: Callable[[], None] | None = None):
        """One step; returns the requests that ended in it, or None if there was nothing to run."""
        self.step_number += 1
        batch = self.scheduler.schedule()
        if batch is None:
            assert not self.scheduler.has_work, "work waits, and nothing runs"
            return None
        self.batches.append(batch)
        self._check(batch)
        self.rows.edit(batch.copies, batch.wiped_blocks)
        tokens = self._compute(batch)
        if during is not None:
            during()
        ended = self.scheduler.update(batch, tokens, failed)
        for part in batch.parts:
            if part.samples and part.request.finish_reason != "error":
                self.token_steps[part.request.request_id].append(self.step_number)
        self.scheduler.audit()
        return ended

    def drain(self, limit: int = 5000) -> None:
        """Run until nothing is left; then every block must be available (leak check)."""
        for _ in range(limit):
            if self.step() is None:
                break
        assert not self.scheduler.has_work
        self.cache.audit([])
        assert self.cache.num_available_blocks == self.cache.num_usable_blocks

    def _check(self, batch: ScheduledBatch) -> None:
        """Laws of one step: budget, progress, age, contiguous rows, one writer."""
        assert 1 <= batch.num_rows <= self.config.max_num_batched_tokens
        ids = [part.request.request_id for part in batch.parts]
        assert len(set(ids)) == len(ids) <= self.config.max_num_seqs
        assert len(ids) == self.scheduler.num_running, "a running request got no row"
        if self.running:
            oldest = min(self.running, key=lambda request: request.arrival)
            assert oldest.is_finished or oldest.request_id not in batch.preempted
        for request_id in batch.preempted:
            del self.computed[request_id], self.held[request_id]
        if batch.preempted:
            assert set(ids) <= set(self.computed), "a request started on what a preemption freed"
        partial = [part for part in batch.parts if not part.samples]
        assert len(partial) <= self.config.max_num_partial_prefills
        for part in batch.parts:
            self._check_part(part)
        self.running = [part.request for part in batch.parts]

    def _check_part(self, part: ScheduledPart) -> None:
        request, unit = part.request, self.layout.virtual_block_size
        start, end = part.num_computed_tokens, part.num_computed_tokens + part.num_scheduled_tokens
        assert request.num_computed_tokens == start < end <= request.num_tokens
        assert part.samples == (end == request.num_tokens)
        assert part.token_ids == tuple(request.token_ids[start:end])
        if request.request_id in self.computed:
            assert self.computed[request.request_id] == start, "rows skipped or computed twice"
        else:
            assert start < request.num_tokens, "the last token must be computed"
            self.held[request.request_id] = start // unit
        self.computed[request.request_id] = end
        self.rows.spoil(request.block_table[self.held[request.request_id] :])
        self.held[request.request_id] = len(request.block_table)
        assert len(request.block_table) >= -(-end // unit)

    def _compute(self, batch: ScheduledBatch) -> dict[int, int | None]:
        tokens: dict[int, int | None] = {}
        written: list[int] = []
        for part in batch.parts:
            request, end = part.request, part.num_computed_tokens + part.num_scheduled_tokens
            known = request.token_ids
            table = request.block_table
            written += self.rows.write(table, known, part.num_computed_tokens, end)
            if part.samples and request.max_output_tokens:
                tokens[request.request_id] = next_token(known)
        assert len(set(written)) == len(written), "two requests wrote into one block"
        assert not set(written) & {copy.source_block for copy in batch.copies}
        return tokens
