"""How the layers of one cache group attend in a step: one choice per row class.

    COPY            queries meet local keys, bound per row; partials return (`returns`)
    WHOLE, SPLIT    a self part over the step's new keys, and a context part over cached ones:
                        none        no request of the class sees a cached key
                        local       every rank holds its whole context
                        gather_q    queries visit all shards at once, partials return
                        pass_q      queries travel round the group, partials return
                        gather_kv   shards visit the queries, piece by piece
                        ring_kv     shards travel round the group
                        chosen      sparse layers: queries visit the keys that were chosen

Legend: `m` rows that one PCP rank hands to another.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from heddle.layout.rows import RowClass
from heddle.step.context import ContextChunk
from heddle.step.new_rows import Halo


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassPlan:
    """How the rows of one class meet their keys."""

    row_class: RowClass
    context: str = "none"
    """See the module's table; COPY rows that are there have `local` or `gather_q`."""
    returns: str = "none"
    """How partials return where queries travel: `ag_rs`, `ag_ar`, `a2a` or `a2a_fine`."""
    chunks: tuple[ContextChunk, ...] = ()
    """Pieces of context met one after another; empty where queries meet whole shards."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """The choices of one cache group."""

    classes: dict[RowClass, ClassPlan]
    new_rows: str
    """How new KV of distributed rows reaches its readers: `none`, `own`, `gather` or `halo`."""
    halo_rows: int = 0
    """`m`, where `new_rows` is `halo`."""
    halo: Halo | None = field(default=None, compare=False, repr=False)
    """Who needs which rows, there; it follows from batch and rows."""
    new_rows_reason: str = ""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why, class by class."""
        parts = (self.new_rows_reason, *(part.reason for part in self.classes.values()))
        return tuple(reason for reason in parts if reason)
