"""Faults on purpose in what a rank computes: what it received, where it stores, what it says to the
others, what comes out.

    received   the header of a step, damaged on the way
    placed     where new rows are stored
    groups     calls that are not those of the plan
    backend    a partial that is finite and wrong
    ops        the layers: a rank may fail within them, or produce NaN
    logits     rows of the head
    sampled    drawn tokens

Made only on a rank for which rules wait. Each fault is of a kind that a defect could produce, and
sits where the defect would: in front of the checks that have to find it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import torch

from heddle.attention.adapter_rows import AdapterRows
from heddle.attention.backends.base import AttentionBackend
from heddle.attention.base import DealtRows, IndexRows, StepOps
from heddle.attention.recurrent.terms import RecurrentInputs
from heddle.attention.state import AttentionState
from heddle.comm.base import RankGroups
from heddle.config.faults import FaultRule
from heddle.faults.watch import RankWatch
from heddle.layout.mesh import GROUP_KINDS
from heddle.runner.stray_calls import StrayCommunicator
from heddle.step.batch import GlobalBatch, SampledToken
from heddle.step.localize import RankStep
from heddle.step.timeline import Part


class Damage:
    """Of one rank."""

    def __init__(self, watch: RankWatch, dcp_size: int) -> None:
        self._watch = watch
        self._dcp_size = dcp_size

    def received(self, batch: GlobalBatch, digest: int) -> tuple[GlobalBatch, int]:
        """What the rank takes for the step that it got.

        Raises:
            RuntimeError: a token in it is poison.
        """
        for _ in self._watch.due(("data",), lambda rule: _has_poison(rule, batch)):
            raise RuntimeError(f"injected: step {batch.step} holds a poisonous token")
        for rule in self._watch.due(("plan",), _named("stale_epoch", "corrupt_header")):
            if rule.action == "stale_epoch":
                batch = msgspec.structs.replace(batch, epoch=batch.epoch - 1)
            else:
                digest ^= 1 << 17
        return batch, digest

    def placed(self, step: RankStep) -> RankStep:
        """The rank's part of a step, with one row stored elsewhere."""
        if not len(step.rows.position):
            return step
        rows = step.rows
        for rule in self._watch.due(("plan",), _named("flip_slot", "wrong_owner")):
            if rule.action == "flip_slot":
                # Its neighbour's slot in the same block, on the same rank or on another one.
                position = np.array(rows.position)
                position[-1] ^= 1
                rows = replace(rows, position=position)
            else:
                rows = replace(rows, start_rank=(rows.start_rank + 1) % self._dcp_size)
        return step if rows is step.rows else replace(step, rows=rows)

    def groups(self, groups: RankGroups) -> RankGroups:
        """Groups of which one call goes astray when that is due."""
        stray = {
            kind: StrayCommunicator(group, self._watch) if group.world_size > 1 else group
            for kind in GROUP_KINDS
            for group in [groups.of(kind)]
        }
        return RankGroups(**stray)

    def backend(self, backend: AttentionBackend) -> AttentionBackend:
        """A backend that may give the lse of an earlier call."""
        made = _StalePagedBackend if hasattr(backend, "attend_paged") else _StaleBackend
        return made(backend, self._watch)

    def ops(self, ops: StepOps, step: RankStep) -> StepOps:
        """The layers of a step, as points where a rank may fail."""
        return _DamagedOps(ops, step, self._watch)

    def logits(self, batch: GlobalBatch, logits: torch.Tensor) -> torch.Tensor:
        """Rows of the head, `[R, vocabulary]`."""
        for rule in self._watch.due(("data",), _of_request("inf_logits", batch, argument=0)):
            row = 0
            for request in batch.requests:
                num_rows = len(request.prompt_logprob_targets) + len(request.samples)
                if request.request_id == int(rule.args[0]):
                    logits[row : row + num_rows] = float("inf")
                row += num_rows
        return logits

    def sampled(
        self, batch: GlobalBatch, sampled: tuple[SampledToken, ...]
    ) -> tuple[SampledToken, ...]:
        """Drawn tokens: those of a grammar may be ones that it forbids."""
        masks = {r.request_id: r.samples[0].grammar_mask for r in batch.requests if r.samples}
        if not any(masks.values()) or not self._watch.due(("data",), _named("break_matcher")):
            return sampled
        return tuple(
            msgspec.structs.replace(token, token_id=_forbidden(masks[token.request_id]))
            if masks.get(token.request_id)
            else token
            for token in sampled
        )


class _DamagedOps:
    """`StepOps` that pass a fault hook in every layer."""

    def __init__(self, inner: StepOps, step: RankStep, watch: RankWatch) -> None:
        self._inner = inner
        self._step = step
        self._watch = watch

    @property
    def adapters(self) -> AdapterRows | None:
        """See `StepOps.adapters`."""
        return self._inner.adapters

    @property
    def dealt_rows(self) -> DealtRows:
        """See `StepOps.dealt_rows`."""
        return self._inner.dealt_rows

    def enter(self, part: Part) -> None:
        """See `StepOps.enter`."""
        self._inner.enter(part)

    def repeated(
        self, inputs: Sequence[torch.Tensor], compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """See `StepOps.repeated`."""
        return self._inner.repeated(inputs, compute)

    def gqa(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `StepOps.gqa`."""
        self._watch.enter_layer(layer)
        return self._damaged(layer, self._inner.gqa(layer, query, key, value, sinks))

    def mla(
        self,
        layer: int,
        query_nope: torch.Tensor,
        query_rope: torch.Tensor,
        latent: torch.Tensor,
        key_up: torch.Tensor,
        value_up: torch.Tensor,
        scale: float,
        index: IndexRows | None = None,
    ) -> torch.Tensor:
        """See `StepOps.mla`."""
        self._watch.enter_layer(layer)
        found = self._inner.mla(
            layer, query_nope, query_rope, latent, key_up, value_up, scale, index
        )
        return self._damaged(layer, found)

    def recurrent(self, layer: int, inputs: RecurrentInputs) -> torch.Tensor:
        """See `StepOps.recurrent`."""
        self._watch.enter_layer(layer)
        return self._damaged(layer, self._inner.recurrent(layer, inputs))

    def _damaged(self, layer: int, out: torch.Tensor) -> torch.Tensor:
        requests = self._step.plan.batch.requests
        is_due = _of_request("nan", self._step.plan.batch, argument=1)
        for rule in self._watch.due(
            ("data",), lambda rule: is_due(rule) and int(rule.args[0]) == layer
        ):
            wanted = [n for n, r in enumerate(requests) if r.request_id == int(rule.args[1])]
            rows = np.flatnonzero(np.isin(self._step.request_of_row, wanted))
            out[torch.tensor(rows)] = float("nan")
        return out


class _StaleBackend:
    """Gives one partial the lse of the call before it that had the same shape."""

    def __init__(self, inner: AttentionBackend, watch: RankWatch) -> None:
        self._inner = inner
        self._watch = watch
        self._last: dict[torch.Size, torch.Tensor] = {}

    @property
    def name(self) -> str:
        """See `AttentionBackend.name`."""
        return self._inner.name

    def unsupported_reasons(self, **facts: object) -> list[str]:
        """See `AttentionBackend.unsupported_reasons`."""
        return self._inner.unsupported_reasons(**facts)  # type: ignore[arg-type]

    def attend(self, *given: object, **options: object) -> AttentionState:
        """See `AttentionBackend.attend`."""
        return self._stale(self._inner.attend(*given, **options))  # type: ignore[arg-type]

    def _stale(self, state: AttentionState) -> AttentionState:
        before = self._last.get(state.lse.shape)
        self._last[state.lse.shape] = state.lse.clone()
        if before is None:
            return state
        # Rows that see nothing have no weight to be wrong: NaN would be found by others.
        stale = torch.where(before.isfinite() & state.lse.isfinite(), before, state.lse)
        if torch.equal(stale, state.lse) or not self._watch.due(("data",), _named("stale_lse")):
            return state
        return AttentionState(state.out, stale)


class _StalePagedBackend(_StaleBackend):
    """The same of one that meets rows where they lie."""

    def attend_paged(self, *given: object, **options: object) -> AttentionState:
        """See `PagedBackend.attend_paged`."""
        return self._stale(self._inner.attend_paged(*given, **options))  # type: ignore[attr-defined]


def create_damage(watch: RankWatch, dcp_size: int) -> Damage | None:
    """None on a rank for which no rule waits."""
    return None if watch.injector is None else Damage(watch, dcp_size)


def _named(*actions: str) -> Callable[[FaultRule], bool]:
    return lambda rule: rule.action in actions


def _of_request(action: str, batch: GlobalBatch, argument: int) -> Callable[[FaultRule], bool]:
    """Rules of an action whose request is in a batch."""
    present = {request.request_id for request in batch.requests}
    return lambda rule: rule.action == action and int(rule.args[argument]) in present


def _has_poison(rule: FaultRule, batch: GlobalBatch) -> bool:
    return rule.action == "poison_token" and any(
        int(rule.args[0]) in request.token_ids for request in batch.requests
    )


def _forbidden(mask: bytes) -> int:
    """The first id that a grammar does not permit."""
    return next(i for i in range(8 * len(mask)) if not mask[i // 8] >> i % 8 & 1)
