"""Seconds of a step on a device: the one model of cost that plans and simulations use.

    stage    = layers * (dense + experts + attention + overhead) + exposed exchanges + head
    step     = the sum over stages + overhead of a step
    part     = max(operations / rate of arithmetic, bytes read / rate of memory)
    exchange = calls * alpha + received bytes / beta, link by link; what arrives while a rank
               computes is paid only as far as the computing does not hide it

Rates are peaks times efficiencies (`devices`); with both ends of their ranges a prediction becomes
a band. Nothing here knows of queues: who runs when is a scheduler's business.

Source: the roofline model (Williams et al., 2009); alpha-beta costs of collectives (Hockney, 1994).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from heddle.planner.arithmetic import (
    Work,
    attention_work,
    dense_work,
    expert_work,
    recurrent_work,
)
from heddle.planner.batches import Rows, create_batch
from heddle.planner.devices import Edge, Rates
from heddle.planner.memory import PlannedEngine
from heddle.planner.parts import RankWeights
from heddle.planner.traffic import Traffic, step_traffic
from heddle.step.plan import StepPlan, plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Seconds of one pipeline stage in one step, by what they are spent on."""

    dense: float
    experts: float
    attention: float
    exchange: float
    """Not hidden by arithmetic."""
    head: float
    overhead: float

    @property
    def total(self) -> float:
        """All of it."""
        parts = self.dense + self.experts + self.attention
        return parts + self.exchange + self.head + self.overhead


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """One step."""

    stages: tuple[StageTime, ...]
    step_seconds: float
    """Overhead of the step itself."""
    traffic: Traffic
    """Of a rank of the first stage."""
    reasons: tuple[str, ...]
    """Why rows were placed and exchanges chosen as they were."""

    @property
    def seconds(self) -> float:
        """From the start of the step to its tokens."""
        return self.step_seconds + sum(stage.total for stage in self.stages)

    @property
    def slowest_stage(self) -> float:
        """After which the next step may enter, where stages work on several at once."""
        return max(stage.total for stage in self.stages) + self.step_seconds / len(self.stages)


@dataclass(frozen=True)
class CostModel:
    """Steps of one planned engine; equal steps are priced once."""

    engine: PlannedEngine
    edge: Edge = "mid"
    _known: dict[tuple[Rows, ...], StepCost] = field(default_factory=dict, repr=False)

    @property
    def rates(self) -> Rates:
        """Of one rank."""
        settings = self.engine.settings
        per_rank = settings.devices_per_rank(self.engine.parallel.world_size)
        return settings.sheet.rates(self.engine.resolved.dtype, self.edge, per_rank)

    def step(self, parts: Sequence[Rows]) -> StepCost:
        """Price one step of a replica.

        Args:
            parts: of the sequences that take part, at least one; their order matters little.
        """
        key = tuple(parts)
        if key not in self._known:
            topology = self.engine.topology
            self._known[key] = self.planned(plan(create_batch(topology, parts), topology))
        return self._known[key]

    def planned(self, step: StepPlan) -> StepCost:
        """Price a step whose plan is there, of this engine's topology."""
        topology, rates = self.engine.topology, self.rates
        plane = topology.mesh.pcp_size * topology.mesh.tp_size
        stages, first = [], None
        for stage, weights in enumerate(self.engine.weights):
            rank = stage * plane
            traffic = step_traffic(step, topology, rank)
            first = first or traffic
            stages.append(self._stage(step, weights, rank, traffic, rates))
        assert first is not None, "there is a stage"
        return StepCost(
            stages=tuple(stages),
            step_seconds=rates.step_seconds,
            traffic=first,
            reasons=step.reasons,
        )

    def _stage(
        self, step: StepPlan, weights: RankWeights, rank: int, traffic: Traffic, rates: Rates
    ) -> StageTime:
        dense = experts = 0.0
        for layer, count in weights.alike():
            dense += count * dense_work(layer, step.rows.num_local_rows).seconds(
                rates.flops, rates.memory
            )
            work = expert_work(layer, step, self.engine.topology)
            experts += count * work.seconds(rates.flops, rates.memory)
        attention = self._attention(step, rank, rates)
        talking, hidden = traffic.seconds(rates, self.engine.topology, rank)
        sampled = Work(
            2.0 * step.logits.num_rows * weights.head.row_elements,
            float(weights.head.num_bytes if step.logits.num_rows else 0),
        )
        return StageTime(
            dense=dense,
            experts=experts,
            attention=attention,
            exchange=talking - min(hidden, attention),
            head=sampled.seconds(rates.flops, rates.memory),
            overhead=len(weights.layers) * rates.layer_seconds,
        )

    def _attention(self, step: StepPlan, rank: int, rates: Rates) -> float:
        topology = self.engine.topology
        tp_rank = topology.mesh.coord_of(rank).tp
        layers = topology.stage_layers(rank)
        per_group = Counter(
            topology.group_of_layer[layer] for layer in layers if layer in topology.group_of_layer
        )
        seconds = 0.0
        for group, count in per_group.items():
            work = attention_work(step, topology, group, tp_rank)
            seconds += count * work.seconds(rates.attention_flops, rates.memory)
        recurrent = len(topology.recurrent_layers(layers))
        if recurrent:
            work = recurrent_work(step, topology, tp_rank)
            seconds += recurrent * work.seconds(rates.attention_flops, rates.memory)
        return seconds
