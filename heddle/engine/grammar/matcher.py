"""One answer that follows a grammar: which tokens may come next, and when it has ended.

    mask = tokens that keep the text a beginning of a legal one
           + the ids that end an answer, where the text is legal as it stands

An answer is done once its text is legal and can grow no further. If no token is permitted and the
text is not legal, the grammar leads nowhere, or needs more work than the limits allow: then the
request fails.

States of the lexer are shared by all matchers of a grammar, and so is the limit of their number. A
matcher that runs into a limit is therefore made anew once, alone, before it counts as failed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from heddle.engine.grammar.vocabulary import Vocabulary
from heddle.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher


log = logging.getLogger("heddle.engine")
T = TypeVar("T")


class Permitted(NamedTuple):
    """What may come next."""

    bits: npt.NDArray[np.uint8]
    """Ids that go on with the text: bit `id % 8` of byte `id // 8`."""
    may_end: bool
    """The text is legal as it stands."""


class Matcher:
    """The state of one answer. Not safe for several threads at once.

    Args:
        create: makes a library object that shares nothing, at the start of the grammar.
        vocabulary: of the model.
        inner: one that may share its lexer, at the start too; None: `create` makes one.
        end_ids: permitted where the text is legal as it stands.
        first: what is permitted at the start, if that is known.
    """

    def __init__(
        self,
        create: Callable[[], LLMatcher],
        vocabulary: Vocabulary,
        inner: LLMatcher | None = None,
        *,
        end_ids: Sequence[int] = (),
        first: Permitted | None = None,
    ) -> None:
        self._create = create
        self._vocabulary = vocabulary
        self._inner = inner or create()
        self._end_ids = frozenset(end_ids)
        self._end_bits = vocabulary.bits(self._end_ids)
        self._nothing = Permitted(vocabulary.bits(()), may_end=False)
        self._permitted = first
        self._consumed: list[int] = []
        self._has_text = False
        self._is_done = False
        self._was_renewed = False

    @property
    def permitted(self) -> Permitted:
        """What may come next, the ids that end an answer left out."""
        if self._permitted is None:
            found = self._try(self._compute) or self._try(self._compute_anew)
            self._permitted = found or self._nothing
        return self._permitted

    @property
    def is_done(self) -> bool:
        """The text is legal, and nothing may follow."""
        return self._is_done or (self.permitted.may_end and not self.permitted.bits.any())

    @property
    def is_stuck(self) -> bool:
        """The text is not legal, and no token could make it so."""
        return not (self._is_done or self.permitted.may_end or self.permitted.bits.any())

    def mask(self) -> bytes:
        """Ids that may be drawn, as bits in whole 32-bit words, lowest first."""
        bits, may_end = self.permitted
        return (bits | self._end_bits if may_end else bits).tobytes()

    def accept(self, token_id: int) -> None:
        """Move on by one token; one that is not permitted leaves the matcher stuck for good."""
        if self.is_stuck:
            return
        is_end = self.permitted.may_end and token_id in self._end_ids
        ids = () if is_end else self._spelling(token_id)
        self._is_done = is_end
        is_legal = is_end or (ids is not None and bool(self._try(lambda: self._consume(ids))))
        self._permitted = None if is_legal and not is_end else self._nothing
        self._has_text |= self._vocabulary.has_text(token_id)

    def _try(self, ask: Callable[[], T]) -> T | None:
        """What the library says; None where it breaks off, which is this answer's end and nobody
        else's. A panic of it is no `Exception`.
        """
        try:
            return ask()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            log.warning("a grammar broke off in the middle of an answer: %s", type(error).__name__)
            return None

    def _consume(self, ids: Sequence[int]) -> bool:
        self._consumed += ids
        return self._inner.consume_tokens(list(ids)) or self._start_anew()

    def _start_anew(self) -> bool:
        """Once for an answer: what meets the limits again would meet them at every token."""
        if self._was_renewed:
            return False
        self._was_renewed = True
        try:
            self._inner = self._create()
        except RequestError:
            return False
        return self._inner.consume_tokens(self._consumed)

    def _compute_anew(self) -> Permitted | None:
        return self._compute() if self._start_anew() else None

    def _compute(self) -> Permitted | None:
        """None where a limit was reached, or the grammar leads nowhere."""
        inner, vocabulary = self._inner, self._vocabulary
        packed = inner.compute_bitmask()
        may_end = inner.is_accepting()
        if inner.is_error():
            return None
        bits = np.frombuffer(packed, np.uint8)[: vocabulary.mask_bytes].copy()
        bits &= vocabulary.real_bits
        if vocabulary.strips_first_space and not self._has_text:
            bits = self._permit_first_space(bits)
        return Permitted(bits, may_end)

    def _permit_first_space(self, bits: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Decoding drops a space at the very start, so there a token with one stands for the rest
        of its bytes.
        """
        spaced = self._vocabulary.spaced
        legal = [token_id for token_id, rest in spaced.items() if self._is_viable(rest, bits)]
        without: npt.NDArray[np.uint8] = bits & ~self._vocabulary.bits(spaced)
        return without | self._vocabulary.bits(legal)

    def _is_viable(self, ids: Sequence[int] | None, bits: npt.NDArray[np.uint8]) -> bool:
        """True where the ids in a row go on with the text; most are decided by the first."""
        if not ids:
            return ids is not None
        is_first_legal = bits[ids[0] >> 3] >> (ids[0] & 7) & 1
        return bool(is_first_legal) and self._inner.validate_tokens(list(ids)) == len(ids)

    def _spelling(self, token_id: int) -> Sequence[int] | None:
        """Ids whose bytes are what a token adds to the text; None if no ids have these bytes."""
        is_first = self._vocabulary.strips_first_space and not self._has_text
        return self._vocabulary.spaced.get(token_id, (token_id,)) if is_first else (token_id,)
