"""The attention of one step on one rank, the same flow for every layer and kind.

    new rows --PCP gather--> every rank sees each new row once --write where owned--> cache
      COPY rows          query over the slice -> local keys, bound per row -> exchange -> own heads
      distributed rows   self part (new keys, causal)  merged with  context part (cached keys)
      sparse layers      every row meets chosen keys of the cache, see `heddle.attention.sparse`

Which calls are made follows from the plan, never from what this rank happens to hold.

Legend: `M` local rows, `h` lanes, `P` PCP size, `Ks` stored kv heads, `W` elements of a row, `W'`
of a stored row.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property

import torch

from heddle.attention.adapter_rows import AdapterRows
from heddle.attention.base import DealtRows, IndexRows
from heddle.attention.copy_rows import CopyRows
from heddle.attention.distributed_rows import DistributedRows
from heddle.attention.kinds.base import AttentionKind
from heddle.attention.kinds.gqa import GQAKind
from heddle.attention.kinds.mla import MLAKind
from heddle.attention.recurrent.step_recurrence import RankRecurrence
from heddle.attention.recurrent.terms import RecurrentInputs
from heddle.attention.resources import AttentionResources
from heddle.attention.sparse.create import create_sparse_rows
from heddle.attention.sparse.kind import SparseLatentKind
from heddle.attention.storage import SlotWrite
from heddle.comm.rank_clock import RankClock
from heddle.kernels.recording.inputs import Input
from heddle.kernels.recording.noting import always_on_host
from heddle.step.experts import dispatched_rows
from heddle.step.local_group import GroupStep, localize_group
from heddle.step.localize import RankStep
from heddle.step.padding import pad_group, pad_rows
from heddle.step.probe import probed_row
from heddle.step.recurrent import create_recurrent_step
from heddle.step.timeline import Part

MAX_REPEATED_ROWS = 64
"""Rows up to which the Python of a step is worth saving."""


class RankAttention:
    """`StepOps` of one rank for one step; index tensors are made once and serve every layer.

    Args:
        step: this rank's part, without pads among COPY rows.
        resources: of the rank.
        num_rows: COPY rows that are computed, pads included; None: those of the step, and its
            layers are computed anew.
    """

    def __init__(
        self, step: RankStep, resources: AttentionResources, num_rows: int | None = None
    ) -> None:
        self.resources = resources
        topology = resources.topology
        steps = [localize_group(step, topology, group) for group in range(len(topology.groups))]
        self._is_like_others = num_rows is not None
        if num_rows is not None and num_rows != step.num_copy:
            step = pad_rows(step, num_rows)
            steps = [pad_group(found, num_rows) for found in steps]
        self.coverage = tuple(found.coverage for found in steps)
        """Per cache group: mix of the rows that this rank writes."""
        # A row at most reads a table of its own; so looks do not tell how many requests there are.
        is_fixed = resources.recordings is not None and resources.recordings.has_fixed_sizes
        num_tables = (num_rows or 1) if is_fixed else 1
        self._groups = [GroupAttention(step, found, resources, num_tables) for found in steps]
        self._probed_row = probed_row(step)
        self.probe: list[tuple[int, bytes]] = []
        """(layer, what it gave for the row that is looked at); see `heddle.step.probe`."""
        self._recurrence = _create_recurrence(step, resources)
        self._step = step
        self._clock = resources.clock

    @cached_property
    def adapters(self) -> AdapterRows | None:
        """See `StepOps.adapters`."""
        requests = self._step.plan.batch.requests
        return AdapterRows.of(self._step.per_row([r.adapter_slot for r in requests], pad=-1))

    @cached_property
    def dealt_rows(self) -> DealtRows:
        """See `StepOps.dealt_rows`."""
        rows = dispatched_rows(self._step, self.resources.topology)
        return DealtRows(torch.tensor(rows), self._step.num_copy)

    def enter(self, part: Part) -> None:
        """See `StepOps.enter`."""
        if self._clock is not None:
            _enter(self._clock, part)

    def repeated(
        self, inputs: Sequence[torch.Tensor], compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """See `StepOps.repeated`."""
        recordings, looks = self.resources.recordings, self._looks
        if recordings is None or looks is None or not self._is_like_others:
            return compute()
        own = [given for group in self._groups for given in group.inputs]
        return recordings.run(looks, [*inputs, *own], compute)

    @property
    def _looks(self) -> Hashable:
        """Steps of equal looks do the same; None: this one is like no other."""
        uses_adapters = any(r.adapter_slot >= 0 for r in self._step.plan.batch.requests)
        looks = tuple(group.looks for group in self._groups)
        if uses_adapters or self._recurrence is not None or None in looks:
            return None
        return looks

    def gqa(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `StepOps.gqa`."""
        model = self.resources.topology.model
        kind = GQAKind(
            query,
            key,
            value,
            scale=model.attention_scale,
            softcap=model.attention_softcap,
            sinks=sinks,
            own_lanes=self.resources.own_lanes,
        )
        return self._run(layer, kind)

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
        tensors = (query_nope, query_rope, latent, key_up, value_up)
        own = self.resources.own_lanes
        kind = (
            MLAKind(*tensors, scale, own)
            if index is None
            else SparseLatentKind(*tensors, scale, index, own)
        )
        return self._run(layer, kind)

    def recurrent(self, layer: int, inputs: RecurrentInputs) -> torch.Tensor:
        """See `StepOps.recurrent`."""
        assert self._recurrence is not None, "the model has recurrent layers"
        with self._attention(layer):
            return self._recurrence.run(layer, inputs)

    def _run(self, layer: int, kind: AttentionKind) -> torch.Tensor:
        group = self._groups[self.resources.topology.group_of_layer[layer]]
        with self._attention(layer):
            out = group.run(layer, kind)
        if self._probed_row is not None:
            self.probe.append((layer, row_bytes(out[self._probed_row])))
        return out

    def _attention(self, layer: int) -> AbstractContextManager[None]:
        return _NO_PART if self._clock is None else _attention_part(self._clock, layer)


_NO_PART = nullcontext()


@contextmanager
def _attention_part(clock: RankClock, layer: int) -> Iterator[None]:
    _enter(clock, "attention", layer)
    yield
    _enter(clock, "output", layer)


@always_on_host
def _enter(clock: RankClock, part: Part, layer: int = -1) -> None:
    """A step that is launched again without its Python passes here too."""
    clock.enter(part, layer)


def row_bytes(row: torch.Tensor) -> bytes:
    """The numbers of a row as they lie in memory."""
    return row.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()


def _create_recurrence(step: RankStep, resources: AttentionResources) -> RankRecurrence | None:
    """The recurrent layers of a step, where this rank has some."""
    states, model = resources.states, resources.topology.model
    if states is None or model.recurrent is None:
        return None
    uses = [request.state for request in step.plan.batch.requests]
    rows = create_recurrent_step(step.plan.rows, uses, step.pcp_rank)
    return RankRecurrence(rows, states, resources.groups.pcp, model.recurrent.chunk_size)


class GroupAttention:
    """The layers of one cache group in one step; arguments as of `CopyRows`."""

    def __init__(
        self,
        step: RankStep,
        group: GroupStep,
        resources: AttentionResources,
        num_tables: int = 1,
    ) -> None:
        self.resources = resources
        self.num_copy = step.num_copy
        self.num_distributed = step.num_distributed
        self.write = SlotWrite.of(group.slot_mapping, resources.store.num_slots)
        self.new_order = torch.tensor(group.new_order)
        self.new_sends = None if group.new_sends is None else torch.tensor(group.new_sends)
        self.copy_rows = CopyRows(step, group, resources, num_tables)
        self.classes = [DistributedRows(step, rows, resources) for rows in group.classes]
        is_sparse = resources.topology.model.sparse is not None
        self.sparse_rows = create_sparse_rows(step, resources) if is_sparse else []

    @property
    def inputs(self) -> list[Input]:
        """What differs between steps of equal looks."""
        return [self.write.mapping, *self.copy_rows.inputs]

    @property
    def looks(self) -> tuple[Hashable, ...] | None:
        """See `RankAttention`."""
        if self.num_copy > MAX_REPEATED_ROWS or self.num_distributed or self.sparse_rows:
            return None
        return self.copy_rows.looks

    def run(self, layer: int, kind: AttentionKind) -> torch.Tensor:
        """`[M, h, Dv]` in the dtype of the queries."""
        new_rows = self._share_new_rows(layer, kind.rows)
        if isinstance(kind, SparseLatentKind):
            parts = [rows.run(layer, kind) for rows in self.sparse_rows]
        else:
            parts = self._dense_parts(layer, kind, new_rows)
        if not parts:  # an idle replica keeps step with the others
            query = kind.travelling_query[:, self.resources.own_lanes]
            return kind.finish(query[..., : kind.stored(kind.rows)[1].shape[-1]])
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.to(kind.rows.dtype)

    def _dense_parts(
        self, layer: int, kind: AttentionKind, new_rows: torch.Tensor
    ) -> list[torch.Tensor]:
        """Class after class, `[n, h, Dv]`."""
        parts: list[torch.Tensor] = []
        if self.num_copy > 0:
            parts.append(self.copy_rows.run(layer, kind))
        if self.classes:
            new_keys = kind.expand(new_rows)
            parts += [rows.run(layer, kind, new_keys) for rows in self.classes]
        return parts

    def _share_new_rows(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Bring distributed rows over PCP and write what is owned here.

        Args:
            layer: index of the layer.
            rows: `[M, Ks, W]`, this rank's own new rows.
        Returns:
            `[T_seen, Ks, W]`: the distributed rows that rows of this rank may see, in global order,
            as the cache will give them back: a narrow cache rounds once, for every layout alike.
        """
        store, num_copy = self.resources.store, self.num_copy
        seen = store.codec.encode(rows)  # [M, Ks, W']
        if self.num_distributed == 0:
            store.write(layer, self.write, seen)
            return rows[:0]
        received = seen[num_copy:]
        if self.resources.groups.pcp.world_size > 1:
            received = self._received(received)
            seen = torch.cat((seen[:num_copy], received)) if num_copy else received
        store.write(layer, self.write, seen)
        return store.codec.decode(received.index_select(0, self.new_order), rows.dtype)

    def _received(self, own: torch.Tensor) -> torch.Tensor:
        """Rows of all PCP ranks, `[P*n, Ks, W']`; through a halo those that each of them hands to
        this one, then its own, `[P*m + n, Ks, W']`.
        """
        pcp = self.resources.groups.pcp
        if self.new_sends is None:
            return pcp.all_gather(own.contiguous()).flatten(0, 1)
        if self.new_sends.numel() == 0:
            return own
        blocks = own.index_select(0, self.new_sends.flatten())
        blocks = blocks.view(*self.new_sends.shape, *own.shape[1:])  # [P, m, Ks, W']
        return torch.cat((pcp.all_to_all(blocks).flatten(0, 1), own))
