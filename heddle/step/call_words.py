"""What the collectives inside a layer's attention carry, and why, in the order of the calls.

    new rows of prompts --> class after class: queries out, or keys in --> partials back

In words, for traces and pages; what is called follows from the same plan (`heddle.step.schedule`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

from heddle.step.class_plan import ClassPlan
from heddle.step.exchanges import ExchangeSizes, describe, new_rows_gather
from heddle.step.plan import StepPlan
from heddle.step.topology import Topology
from heddle.step.traffic import Collective

_NEW_ROWS_REASON = "each PCP rank computed some rows of the prompts, and later rows see them all"


@dataclass(frozen=True, slots=True)
class CallWords:
    """One call."""

    carries: str
    reason: str


SUMS = CallWords("partial sums", "each TP rank multiplied its own share of the matrix")
"""The sum over TP behind a projection that is cut over its input."""
NORMS = CallWords("squares of norms", "a norm over heads that TP ranks share")
EMBEDDINGS = CallWords("rows of the embedding", "each TP rank holds a share of the vocabulary")
STATES = CallWords("recurrent states", "a state goes on where the rows before it were computed")
EXPERTS = CallWords("rows of dealt experts", "each rank holds some experts whole")
STAGES = CallWords("hidden rows", "the next layers are those of another stage")
ORDER = CallWords(
    "rows that are sampled", "PCP ranks computed them; order comes back before the head"
)
VOCABULARY = CallWords("logits", "each TP rank holds a share of the vocabulary")
CHOSEN = CallWords("chosen keys", "rows of sparse layers meet keys that other ranks store")


def attention_words(
    plan: StepPlan, topology: Topology, group: int, tp_rank: int
) -> list[CallWords]:
    """Of the calls of one layer.

    Args:
        plan: of the step.
        topology: constants of the engine.
        group: cache group of the layer.
        tp_rank: whose calls.
    Returns:
        One entry per call, in order; none for sparse layers, whose calls are alike (`CHOSEN`).
    """
    if topology.model.sparse is not None:
        return []
    sizes, rows, chosen = ExchangeSizes.of(topology, tp_rank), plan.rows, plan.groups[group]
    gather = new_rows_gather(chosen.new_rows, rows.num_distributed, sizes, chosen.halo_rows)
    why = chosen.new_rows_reason or _NEW_ROWS_REASON
    found = [CallWords("new KV rows", why) for _ in gather]
    for row_class, part in chosen.classes.items():
        start, end = rows.class_rows(row_class)
        found += _class_words(part, list(describe(part, end - start, sizes)))
    return found


def _class_words(part: ClassPlan, calls: Sequence[Collective]) -> Iterator[CallWords]:
    if not calls:
        return
    back = _words_back(part)
    out = "cached KV" if part.context in ("gather_kv", "ring_kv") else "queries"
    for what in (*repeat(out, len(calls) - len(back)), *back):
        yield CallWords(f"{part.row_class.value} rows: {what}", part.reason)


def _words_back(part: ClassPlan) -> tuple[str, ...]:
    """What returns where queries have travelled."""
    if part.context not in ("gather_q", "pass_q"):
        return ()
    returns = "a2a" if part.context == "pass_q" else part.returns
    if returns == "a2a":
        return ("partials with their log-sum-exps, for the merge",)
    if returns == "a2a_fine":
        return ("partials with their log-sum-exps, cut by heads", "merged heads")
    return ("log-sum-exps, for the merge", "weighed partials, summed")
