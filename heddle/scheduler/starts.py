"""Which waiting requests start in a step, and what the others lack.

    capacity        blocks or state slots
    seats           as many sequences run as may
    prefill_slots   as many prompts are part-way through as may
    next_step       nothing but rows of this step: those before it, or shorter, take them all

Nothing else holds a request up. It is noted when a step is filled, so counting costs no search.

A long prompt waits while those before it, or shorter, take all rows that it could get: until then
it holds no blocks, and what others compute of its prefix becomes a hit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import get_args

from heddle.config.scheduler import SchedulerConfig
from heddle.errors import counted
from heddle.kvcache.hits import PrefixHit
from heddle.kvcache.manager import KVCacheManager
from heddle.scheduler.admission import kv_tokens_needed
from heddle.scheduler.flight import Flight
from heddle.scheduler.policy import (
    MAX_CANDIDATES,
    MAX_OVERTAKES,
    has_slot,
    share_rows,
    short_row_limit,
)
from heddle.scheduler.queues import Queues
from heddle.scheduler.request import Request, WaitReason


class Starts:
    """Gives waiting requests their blocks and their place among the running.

    Args:
        config: limits. At most `max_num_batched_tokens` sequences run, whatever `max_num_seqs`
            says, so that each of them gets a row in each step.
        cache: the pool.
        queues: of the scheduler.
        flight: its steps under way.
    """

    def __init__(
        self, config: SchedulerConfig, cache: KVCacheManager, queues: Queues, flight: Flight
    ) -> None:
        self._config, self._cache = config, cache
        self._queues, self._flight = queues, flight
        self._max_running = min(config.max_num_seqs, config.max_num_batched_tokens)

    # Filling a step.

    def admit(self, num_rows: int, longs: list[Request]) -> list[Request]:
        """Start waiting requests, first ones first.

        Args:
            num_rows: rows that are left for prompts.
            longs: prompts that are part-way through and in no step; new long ones are added.
        Returns:
            Those that end in this step.
        """
        shorts: list[Request] = []
        free_rows = num_rows
        passed: list[Request] = []
        max_longs = self._config.max_num_partial_prefills - self._flight.num_partial
        candidates = self._queues.waiting[:MAX_CANDIDATES]
        for at, request in enumerate(candidates):
            if (barrier := self._barrier(passed)) is not None:
                _note(candidates[at:], barrier)
                break
            hit = self._cache.fitting(self._lookup(request), self._start_need(request))
            if hit is None:
                request.wait_reason = "capacity"
                passed.append(request)
                continue
            need = request.num_tokens - hit.num_tokens
            short_rows = short_row_limit(num_rows, beside_long=bool(longs))
            short_rows -= num_rows - free_rows
            if need <= min(short_rows, self.row_cap(request)):
                shorts.append(request)
                free_rows -= need
            elif not has_slot(need, [r.num_uncomputed_tokens for r in longs], max_longs):
                request.wait_reason = "prefill_slots"
                continue
            elif self._gets_rows(request, need, longs, free_rows):
                longs.append(request)
            else:
                request.wait_reason = "next_step"
                continue
            self._start(request, hit)
            for other in passed:
                other.num_overtakes += 1
        return shorts

    def hold_back(self) -> None:
        """Nobody starts in this step: what there is of blocks is for those that run."""
        _note(self._queues.waiting[:MAX_CANDIDATES], "capacity")

    def row_cap(self, request: Request) -> int:
        """Rows of a step that one prompt may take."""
        threshold = self._config.long_prefill_token_threshold
        if threshold and request.num_tokens > threshold:
            return threshold
        return self._config.max_num_batched_tokens

    # Telling why.

    def why_waiting(self) -> str | None:
        """What the head of the queue lacks, with numbers; None if nothing waits."""
        if not self._queues.waiting:
            return None
        head, running = self._queues.waiting[0], self._queues.running
        name = f"request {head.request_id}"
        if len(running) >= self._max_running:
            return f"{name} waits for a seat: {len(running)} of {self._max_running} run"
        cache = self._cache
        if not cache.has_free_states:
            return f"{name} waits for state slots: needs {cache.states_per_sequence}"
        hit = self._lookup(head).without_copy()
        cost = cache.start_cost(hit, self._start_need(head))
        if cost > cache.num_available_blocks:
            return (
                f"{name} waits for blocks: needs {cost} of {cache.virtual_block_size} tokens, "
                f"{cache.num_available_blocks} of {cache.num_usable_blocks} free"
            )
        partial = [r.num_uncomputed_tokens for r in running if r.num_uncomputed_tokens > 1]
        need = head.num_tokens - hit.num_tokens
        if not has_slot(need, partial, self._config.max_num_partial_prefills):
            return f"{name} waits for a prefill slot: {_part_way(len(partial))}"
        if partial:
            return f"{name} waits for rows: {_part_way(len(partial))}"
        return f"{name} waits for the next step"

    def by_reason(self) -> dict[str, int]:
        """Waiting requests by what the last step that looked at them had too little of; every
        reason is there, and a request that no step has looked at waits for the next one.
        """
        counts = Counter(request.wait_reason for request in self._queues.waiting)
        return {reason: counts[reason] for reason in get_args(WaitReason)}

    def _gets_rows(
        self, request: Request, need: int, longs: Sequence[Request], num_rows: int
    ) -> bool:
        """Whether a share of the step is left for it beside these."""
        needs = [*(r.num_uncomputed_tokens for r in longs), need]
        caps = [*(self.row_cap(r) for r in longs), self.row_cap(request)]
        return share_rows(num_rows, needs, caps)[-1] > 0

    def _barrier(self, passed: list[Request]) -> WaitReason | None:
        """Why nobody further may start, whatever it needs."""
        if len(self._queues.running) >= self._max_running:
            return "seats"
        is_overtaken = any(request.num_overtakes >= MAX_OVERTAKES for request in passed)
        return "capacity" if is_overtaken or not self._cache.has_free_states else None

    def _start(self, request: Request, hit: PrefixHit) -> None:
        if not request.no_hit_reason and not request.num_cached_tokens:  # never started before
            request.num_cached_tokens = min(hit.num_tokens, request.num_prompt_tokens)
            request.no_hit_reason = hit.explain()
        self._cache.start(request.blocks, hit, request.num_tokens)
        request.num_computed_tokens = hit.num_tokens
        self._queues.start(request)

    def _lookup(self, request: Request) -> PrefixHit:
        return self._cache.lookup(
            request.blocks, request.token_ids, excluded=request.skip_prefix_hit
        )

    def _start_need(self, request: Request) -> int:
        """Stored tokens that must fit: all known ones; at a restart all that may ever be."""
        if request.num_preemptions or request.output_token_ids:
            return kv_tokens_needed(request.num_prompt_tokens, request.max_output_tokens)
        return request.num_tokens


def _part_way(count: int) -> str:
    return f"{counted(count, 'prompt')} {'is' if count == 1 else 'are'} part-way through"


def _note(requests: Iterable[Request], reason: WaitReason) -> None:
    for request in requests:
        request.wait_reason = reason
