"""A step as the planner's model sees it, rank by rank: every call with its bytes and its reason.

Ranks hold to the list of calls that is shown; only seconds are a model (`heddle.planner.cost`).
Layers of one kind are alike, so the first layer of each kind stands for all of them. What hides
under arithmetic is drawn behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from heddle.planner.arithmetic import Work, attention_work, dense_work, expert_work, recurrent_work
from heddle.planner.batches import Rows, create_batch
from heddle.planner.cost import CostModel
from heddle.planner.memory import PlannedEngine
from heddle.planner.traffic import layer_kind, members_of
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
from heddle.step.plan import StepPlan, plan
from heddle.step.schedule import collective_schedule, layer_calls
from heddle.step.traffic import Collective, cost_of
from heddle.view.timeline import MAX_RANKS, LaneBuilder, Words

Inner = tuple[str, float, int, str, str]
_BACK = ("partials", "log-sum-exps", "merged heads", "weighed")
"""Words of calls that come after the keys were met."""


def describe(engine: PlannedEngine, steps: Sequence[tuple[str, Sequence[Rows]]]) -> dict[str, Any]:
    """Lanes of steps, see `heddle.view.timeline`.

    Args:
        engine: a layout on a device.
        steps: (name, sequences that take part).
    """
    words = Words()
    mesh = engine.topology.mesh
    ranks = mesh.ranks_of_replica(0)[:MAX_RANKS]
    return {
        "source": "model",
        "num_steps": len(steps),
        "words": words.texts,
        "ranks": [{"rank": rank, "label": _label(engine, rank)} for rank in ranks],
        "steps": [_step(engine, name, parts, ranks, words) for name, parts in steps],
    }


def _label(engine: PlannedEngine, rank: int) -> str:
    coord = engine.topology.mesh.coord_of(rank)
    return f"rank {rank} (dp{coord.dp} pp{coord.pp} tp{coord.tp} pcp{coord.pcp})"


def _step(
    engine: PlannedEngine, name: str, parts: Sequence[Rows], ranks: Sequence[int], words: Words
) -> dict[str, Any]:
    found = plan(create_batch(engine.topology, parts), engine.topology)
    return {
        "name": name,
        "requests": [
            {"request": number, "rows": part.new, "cached": part.cached}
            for number, part in enumerate(parts)
        ],
        "rows": found.rows.num_rows,
        "reasons": list(found.reasons),
        "seconds": CostModel(engine).planned(found).seconds,
        "lanes": [_RankStep(engine, found, rank, words).spans() for rank in ranks],
    }


class _RankStep:
    """One rank's part of one planned step."""

    def __init__(self, engine: PlannedEngine, step: StepPlan, rank: int, words: Words) -> None:
        self._topology, self._step, self._rank = engine.topology, step, rank
        coord = self._topology.mesh.coord_of(rank)
        self._tp_rank, stage = coord.tp, coord.pp
        self._weights = engine.weights[stage]
        self._rates = CostModel(engine).rates
        self._schedule = collective_schedule(step, self._topology, rank)
        self._lane = LaneBuilder(words)

    def spans(self) -> list[list[Any]]:
        """All of it: what comes before the layers, one layer of each kind, what comes after."""
        for call in self._schedule.prologue:
            self._lane.part(
                "embedding", -1, [self._call(call, STAGES if call.group == "pp" else EMBEDDINGS)]
            )
        for layer, count in self._kinds():
            self._layer(layer, count)
        self._head()
        return self._lane.spans

    def _kinds(self) -> list[tuple[int, int]]:
        """(first layer, layers) of each kind of this stage."""
        layers = self._topology.stage_layers(self._rank)
        first: dict[tuple[int, bool], list[int]] = {}
        for layer in layers:
            first.setdefault(layer_kind(self._topology, layer), []).append(layer)
        return [(found[0], len(found)) for found in first.values()]

    def _layer(self, layer: int, count: int) -> None:
        topology, step = self._topology, self._step
        weights = self._weights.layers[layer - topology.stage_layers(self._rank).start]
        dense = dense_work(weights, step.rows.num_local_rows)
        prices = self._rates.flops, self._rates.memory, self._rates.serial_share
        share = _attention_share(weights)
        projection = (dense * share).seconds(*prices)
        feed_forward = (dense * (1 - share)).seconds(*prices)
        feed_forward += expert_work(weights, step, topology).seconds(*prices)
        calls = layer_calls(step, topology, self._rank, layer)
        name = f"projections (of {count} layers alike)" if count > 1 else "projections"
        norms = (self._call(call, NORMS) for call in calls.projection)
        self._lane.part(name, layer, [(name, projection, -1, "", ""), *norms])
        self._lane.part("attention", layer, self._attention(layer, calls.attention))
        if calls.output:
            self._lane.part("output", layer, (self._call(call, SUMS) for call in calls.output))
        ends = (
            self._call(call, SUMS if call.group == "tp" else EXPERTS) for call in calls.feed_forward
        )
        self._lane.part("MLP", layer, [("MLP", feed_forward, -1, "", ""), *ends])

    def _attention(self, layer: int, calls: Sequence[Collective]) -> Iterator[Inner]:
        # In their order; all classes of rows meet their keys before the first result comes back.
        attend = ("attend", self._attention_seconds(layer), -1, "", "")
        is_met = False
        for call, words in zip(calls, self._words(layer, len(calls)), strict=True):
            if not is_met and _is_back(words):
                yield attend
                is_met = True
            yield self._call(call, words)
        if not is_met:
            yield attend

    def _words(self, layer: int, count: int) -> Sequence[CallWords]:
        topology = self._topology
        if layer not in topology.group_of_layer:
            return [STATES] * count
        group = topology.group_of_layer[layer]
        found = attention_words(self._step, topology, group, self._tp_rank)
        return found or [CHOSEN] * count

    def _attention_seconds(self, layer: int) -> float:
        topology = self._topology
        if layer in topology.group_of_layer:
            group = topology.group_of_layer[layer]
            work = attention_work(self._step, topology, group, self._tp_rank)
        else:
            work = recurrent_work(self._step, topology, self._tp_rank)
        rates = self._rates
        return work.seconds(rates.attention_flops, rates.cache, rates.serial_share)

    def _head(self) -> None:
        calls = self._schedule.epilogue
        rows = self._step.logits.num_rows
        head = self._weights.head
        work = Work(2.0 * rows * head.row_elements, float(head.num_bytes if rows else 0))
        seconds = work.seconds(self._rates.flops, self._rates.memory, self._rates.serial_share)
        words = {"pp": STAGES, "pcp": ORDER}
        before = [call for call in calls if call.group in words]
        after = [call for call in calls if call.group not in words]
        self._lane.part(
            "logits",
            -1,
            [
                *(self._call(call, words[call.group]) for call in before),
                ("logits", seconds, -1, "", ""),
                *(self._call(call, VOCABULARY) for call in after),
            ],
        )

    def _call(self, call: Collective, words: CallWords) -> Inner:
        mesh = self._topology.mesh
        known = call._replace(shape=tuple(1 if size is None else size for size in call.shape))
        num_bytes = cost_of([known], mesh).received_bytes
        link = self._rates.link(members_of(mesh, call.group, self._rank))
        seconds = link.alpha + num_bytes / link.beta
        return (f"{call.op} {call.group}", seconds, num_bytes, words.carries, words.reason)


def _attention_share(weights: Any) -> float:
    """Of a layer's dense work, the part around its attention."""
    own = sum(part.row_elements for part in weights.parts if part.name in ("attention", "indexer"))
    return own / weights.row_elements if weights.row_elements else 0.0


def _is_back(words: CallWords) -> bool:
    return any(word in words.carries for word in _BACK)
