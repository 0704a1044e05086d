"""Is a live row what one rank computes, and if not, where does it part?

    logits    the largest difference is at most the tolerance, else there is an alarm
    layers    of an alarm: the first whose attention differs, and the ranks that gave other numbers
    tokens    of an alarm about a greedy answer: the first one that one rank would not have drawn

The tolerance is ten times what certification allows (`heddle.verify`): it knows its prompts, while
here any length and depth may come, and an alarm must not be raised by rounding.

Legend: `h` lanes of a rank, `Dv` numbers of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from heddle.step.probe import Probed
from heddle.step.topology import Topology

ALARM_TOLERANCE = {"float32": 1e-4, "float64": 1e-9}
"""Of the largest number of a row, at least 1."""

Floats = npt.NDArray[np.float64]


class Verdict(NamedTuple):
    """What one rank says of a token that is there."""

    logprob: float
    """Of the token."""
    best_id: int
    best_logprob: float


@dataclass(frozen=True, slots=True)
class BadToken:
    """A token that one rank would not have drawn."""

    position: int
    """In the answer, from 0."""
    token_id: int
    wanted_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A live row that one rank does not confirm."""

    request: str
    """Id of the request, as its client knows it."""
    epoch: int
    step: int
    position: int
    """Of the token in the answer whose logits were compared."""
    difference: float
    tolerance: float
    layer: int | None
    """The first whose attention gave other numbers; None: attention was right in all."""
    ranks: tuple[int, ...]
    """Global ranks that gave them there."""
    first_bad: BadToken | None = None
    """None: one rank would have drawn every token so far, or the answer is no greedy one."""

    def __str__(self) -> str:
        return "; ".join(
            (
                f"request {self.request}, token {self.position} of its answer, step {self.step} of "
                f"epoch {self.epoch}: logits differ by {self.difference:.2g} from one rank's, "
                f"rounding explains {self.tolerance:.2g}",
                self._where,
                self._since,
            )
        )

    @property
    def _where(self) -> str:
        if self.layer is None:
            return "attention was right in every layer, so the head or the last layer's rest is not"
        ranks = " ".join(map(str, self.ranks))
        return f"the first layer whose attention differs is {self.layer}, on ranks {ranks}"

    @property
    def _since(self) -> str:
        bad = self.first_bad
        if bad is None:
            return "its tokens so far are those that one rank draws"
        return (
            f"its first bad token is {bad.position}, id {bad.token_id} where one rank draws "
            f"{bad.wanted_id}"
        )


def compare_probes(live: Probed, golden: Probed, topology: Topology, request: str) -> Alarm | None:
    """None where the live row is right.

    Args:
        live: as the layout computed it.
        golden: the same row on one rank.
        topology: of the layout.
        request: whose it is.
    Raises:
        ValueError: they are not of the same row.
    """
    if live.token_ids != golden.token_ids:
        raise ValueError(f"rows after {len(live.token_ids)} and {len(golden.token_ids)} tokens")
    dtype = topology.dtype
    found, wanted = _numbers(live.logits, dtype), _numbers(golden.logits, dtype)
    tolerance = ALARM_TOLERANCE[dtype] * max(1.0, float(np.abs(wanted).max()))
    difference = float(np.abs(found - wanted).max())
    if difference <= tolerance:
        return None
    layer, ranks = _first_layer(live, golden, topology)
    return Alarm(
        request=request,
        epoch=live.epoch,
        step=live.step,
        position=len(live.token_ids) - live.num_prompt_tokens,
        difference=difference,
        tolerance=tolerance,
        layer=layer,
        ranks=ranks,
    )


def first_bad_token(
    live: Probed, verdicts: Sequence[Verdict | None], logits: bytes, dtype: str
) -> BadToken | None:
    """The first token of a greedy answer that one rank would not have drawn, near ties aside.

    Args:
        live: the row, and all tokens before it.
        verdicts: of one rank on each of `live.token_ids`; None where it has none.
        logits: of one rank after the last token.
        dtype: of the logits.
    """
    if not live.is_greedy:
        return None
    row = _numbers(logits, dtype)
    tie = 2 * ALARM_TOLERANCE[dtype] * max(1.0, float(np.abs(row).max()))
    for place in range(live.num_prompt_tokens, len(live.token_ids)):
        verdict = verdicts[place]
        if verdict is not None and verdict.best_logprob - verdict.logprob > tie:
            return BadToken(place - live.num_prompt_tokens, live.token_ids[place], verdict.best_id)
    best = int(row.argmax())
    if live.token_id is not None and float(row[best] - row[live.token_id]) > tie:
        return BadToken(len(live.token_ids) - live.num_prompt_tokens, live.token_id, best)
    return None


def _first_layer(
    live: Probed, golden: Probed, topology: Topology
) -> tuple[int | None, tuple[int, ...]]:
    heads = topology.heads
    for layer, rows in live.layers.items():
        (golden_row,) = golden.layers[layer].values()
        wanted = _numbers(golden_row, topology.dtype).reshape(heads.num_query_heads, -1)  # [H, Dv]
        tolerance = ALARM_TOLERANCE[topology.dtype] * float(np.abs(wanted).max())
        off = []
        for rank, row in rows.items():
            first, end = heads.query_range(topology.mesh.coord_of(rank).tp)
            found = _numbers(row, topology.dtype).reshape(heads.lanes, -1)[: end - first]
            if not float(np.abs(found - wanted[first:end]).max()) <= tolerance:
                off.append(rank)
        if off:
            return layer, tuple(off)
    return None, ()


def _numbers(raw: bytes, dtype: str) -> Floats:
    return np.frombuffer(raw, dtype=dtype).astype(np.float64)
