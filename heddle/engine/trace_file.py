"""A trace as a file: what each rank did when, and why it exchanged what.

The format is the JSON array of Chrome's trace events, which Perfetto and `chrome://tracing` open,
cut off or not. Processes are ranks, and one more stands for the driver. An event of a rank is a
step, a part of it, or a collective; they lie inside each other on one thread. Times (`ts`, `dur`)
are in microseconds from the first step on.
"""

from __future__ import annotations

import bisect
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

import msgspec

from heddle.config.engine import ResolvedConfig
from heddle.errors import ConfigError
from heddle.layout.layout_object import layout_object
from heddle.step.batch import RankReply
from heddle.step.call_words import (
    CHOSEN,
    EMBEDDINGS,
    EXPERTS,
    NORMS,
    ORDER,
    STAGES,
    STATES,
    SUMS,
    VOCABULARY,
    CallWords,
    attention_words,
)
from heddle.step.plan import StepPlan
from heddle.step.timeline import PartBegin, StepTimeline, TimedCall
from heddle.step.topology import Topology

log = logging.getLogger("heddle.engine")
_NAMES = {"mlp": "MLP"}


class TraceFile:
    """Written step by step; a file system that fails ends the trace, not the engine."""

    def __init__(self, resolved: ResolvedConfig, file: IO[bytes]) -> None:
        """Begin a file.

        Args:
            resolved: what runs; `trace_steps` bounds the file.
            file: to write to; closed here.
        """
        self._topology = Topology.from_resolved(resolved)
        self._resolved = resolved
        self._file: IO[bytes] | None = file
        self._num_steps = 0
        self._epoch = resolved.epoch
        self._origin: float | None = None
        self._is_first = True
        self._write(self._headers())

    @classmethod
    def create(cls, resolved: ResolvedConfig) -> TraceFile | None:
        """The file that `resolved` asks for; None: it asks for none. One that was there is emptied
        and keeps its mode, a new one is private to this user.

        Raises:
            ConfigError: it cannot be written.
        """
        if resolved.trace_file is None:
            return None
        try:
            descriptor = os.open(
                resolved.trace_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600
            )
            return cls(resolved, os.fdopen(descriptor, "wb"))
        except (OSError, TypeError, ValueError) as error:
            raise ConfigError(
                f"trace_file={resolved.trace_file} cannot be written: {error}; it is a file in a "
                "folder that is there and open to you"
            ) from error

    def add_step(
        self, replica: int, plan: StepPlan, began: float, ended: float, replies: Sequence[RankReply]
    ) -> None:
        """Write a step that has ended.

        Args:
            replica: whose step.
            plan: of the step.
            began: monotonic time at which the driver chose it.
            ended: monotonic time at which its tokens were accounted for.
            replies: of the ranks of the replica, in order.
        """
        if self._file is None:
            return
        if self._origin is None:
            self._origin = began
        self._write(self._step_events(replica, plan, began, ended, replies))
        self._num_steps += 1
        if self._num_steps == self._resolved.trace_steps:
            log.info("trace: %d steps are in %s", self._num_steps, self._resolved.trace_file)
            self.close()

    def close(self) -> None:
        """End the file; a second call does nothing."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            with file:
                file.write(b"\n]\n")
        except OSError as error:
            self._give_up(error)

    def _write(self, events: Iterator[Mapping[str, Any]]) -> None:
        assert self._file is not None
        try:
            for event in events:
                self._file.write(b"[\n" if self._is_first else b",\n")
                self._is_first = False
                self._file.write(msgspec.json.encode(event))
            self._file.flush()
        except OSError as error:
            file, self._file = self._file, None
            self._give_up(error)
            try:
                file.close()
            except OSError:
                log.debug("closing %s failed as well", self._resolved.trace_file)

    def _give_up(self, error: OSError) -> None:
        log.warning("trace: %s ends here: %s", self._resolved.trace_file, error)

    def _headers(self) -> Iterator[Mapping[str, Any]]:
        resolved, mesh = self._resolved, self._topology.mesh
        layout = layout_object(
            resolved.parallel, block_size=resolved.cache.block_size, executor=resolved.executor
        )
        about = {"layout": layout, "num_layers": resolved.model.num_layers}
        yield _meta("heddle", mesh.world_size, about)
        yield _meta("process_name", mesh.world_size, {"name": "driver"})
        for rank in range(mesh.world_size):
            coord = mesh.coord_of(rank)
            places = {"dp": coord.dp, "pp": coord.pp, "tp": coord.tp, "pcp": coord.pcp}
            where = " ".join(f"{axis}{place}" for axis, place in places.items())
            yield _meta("process_name", rank, {"name": f"rank {rank} ({where})"})
            yield _meta("process_sort_index", rank, {"sort_index": rank})

    def _step_events(
        self, replica: int, plan: StepPlan, began: float, ended: float, replies: Sequence[RankReply]
    ) -> Iterator[Mapping[str, Any]]:
        batch, mesh = plan.batch, self._topology.mesh
        driver, lane = mesh.world_size, replica * mesh.pp_size + batch.step % mesh.pp_size
        if batch.epoch != self._epoch:
            self._epoch = batch.epoch
            what = {"name": f"new ranks, life {batch.epoch}", "ph": "i", "s": "g"}
            yield {**what, "pid": driver, "tid": 0, "ts": self._at(began)}
        facts = {
            "step": batch.step,
            "epoch": batch.epoch,
            "requests": [
                {"request": r.request_id, "rows": len(r.token_ids), "cached": r.num_computed_tokens}
                for r in batch.requests
            ],
            "rows": plan.rows.num_rows,
            "classes": [found.value for found in plan.classes],
            "reasons": plan.reasons,
        }
        # As many steps of a replica lie over each other as its pipeline has stages.
        yield self._event(f"step {batch.step}", driver, began, ended, facts, tid=lane)
        for rank, reply in zip(mesh.ranks_of_replica(replica), replies, strict=True):
            if reply.timeline is not None:
                yield from self._rank_events(plan, rank, _aligned(reply.timeline, began, ended))

    def _rank_events(
        self, plan: StepPlan, rank: int, timeline: StepTimeline
    ) -> Iterator[Mapping[str, Any]]:
        parts, step = _with_layers(timeline.parts), plan.batch.step
        ends = [part.began for part in parts[1:]] + [timeline.ended]
        whole = {"step": step, "rows": plan.rows.num_local_rows}
        yield self._event(f"step {step}", rank, parts[0].began, timeline.ended, whole)
        for part, end in zip(parts, ends, strict=True):
            place = {"step": step, "layer": part.layer}
            yield self._event(_NAMES.get(part.part, part.part), rank, part.began, end, place)
        words = _Words(plan, self._topology, rank)
        for call, part in _calls_in(parts, timeline.calls):
            yield self._event(
                f"{call.op} {call.group}",
                rank,
                call.began,
                call.ended,
                {
                    "step": step,
                    "layer": part.layer,
                    "op": call.op,
                    "group": call.group,
                    "bytes": call.num_bytes,
                    **words.of(call, part),
                },
            )

    def _at(self, moment: float) -> float:
        assert self._origin is not None
        return round((moment - self._origin) * 1e6, 1)

    def _event(
        self,
        name: str,
        rank: int,
        began: float,
        ended: float,
        facts: Mapping[str, Any],
        tid: int = 0,
    ) -> Mapping[str, Any]:
        start = self._at(began)
        return {
            "name": name,
            "ph": "X",
            "pid": rank,
            "tid": tid,
            "ts": start,
            "dur": round(self._at(ended) - start, 1),
            "args": facts,
        }


class _Words:
    """Of the calls of one rank in one step, asked in their order."""

    def __init__(self, plan: StepPlan, topology: Topology, rank: int) -> None:
        self._plan, self._topology = plan, topology
        self._tp_rank = topology.mesh.coord_of(rank).tp
        self._by_group: dict[int, list[CallWords]] = {}
        self._layer, self._number = -1, 0

    def of(self, call: TimedCall, part: PartBegin) -> dict[str, str]:
        """What it carries and why, as facts of an event."""
        found = self._find(call, part)
        return {"carries": found.carries, "reason": found.reason}

    def _find(self, call: TimedCall, part: PartBegin) -> CallWords:
        if part.part == "attention" and call.op != "wait":
            return self._next_of_attention(part.layer)
        if call.group == "pp":
            return STAGES
        if part.part == "embedding":
            return EMBEDDINGS
        if part.part == "logits":
            return ORDER if call.group == "pcp" else VOCABULARY
        if part.part == "projection":
            return NORMS
        if call.group == "tp":
            return SUMS
        return EXPERTS if part.part in ("output", "mlp") else CallWords("", "")

    def _next_of_attention(self, layer: int) -> CallWords:
        if layer != self._layer:
            self._layer, self._number = layer, 0
        if self._topology.model.kind_of(layer).mixer == "recurrent":
            return STATES
        group = self._topology.group_of_layer[layer]
        if group not in self._by_group:
            found = attention_words(self._plan, self._topology, group, self._tp_rank)
            self._by_group[group] = found
        words, number = self._by_group[group], self._number
        self._number += 1
        return words[number] if number < len(words) else CHOSEN


def _meta(name: str, rank: int, facts: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"name": name, "ph": "M", "pid": rank, "tid": 0, "args": facts}


def _aligned(timeline: StepTimeline, began: float, ended: float) -> StepTimeline:
    """Moved to where the driver's step is, if a rank's clock is another host's."""
    start = timeline.parts[0].began
    if began <= start and timeline.ended <= ended:
        return timeline
    shift = began - start
    return StepTimeline(
        parts=tuple(PartBegin(p.part, p.layer, p.began + shift) for p in timeline.parts),
        calls=tuple(
            TimedCall(c.op, c.group, c.num_bytes, c.began + shift, c.ended + shift)
            for c in timeline.calls
        ),
        ended=timeline.ended + shift,
    )


def _with_layers(parts: Sequence[PartBegin]) -> list[PartBegin]:
    """Parts with the layer that they belong to: a projection to the attention that follows, what
    comes after attention to it.
    """
    found: list[PartBegin] = []
    for index, part in enumerate(parts):
        layer = part.layer
        if part.part == "projection":
            layer = next((p.layer for p in parts[index:] if p.part == "attention"), -1)
        elif part.part == "mlp":
            layer = found[-1].layer
        found.append(PartBegin(part.part, layer, part.began))
    return found


def _calls_in(
    parts: Sequence[PartBegin], calls: Sequence[TimedCall]
) -> Iterator[tuple[TimedCall, PartBegin]]:
    """Calls in order, with the part in which each began."""
    begins = [part.began for part in parts]
    for call in sorted(calls, key=lambda call: call.began):
        yield call, parts[bisect.bisect_right(begins, call.began) - 1]
