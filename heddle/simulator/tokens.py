"""Stand-ins for tokens that nobody wrote: as many, and equal where the trace says that they are.

    hash ids   [ 7 . . . . 512 of them | 9 . . . . ]    a block of the trace is its name, repeated
    the rest   [ own own own ]                          a name that no other request has
    answer     [ own' own' ]                            another such name

The real prefix cache then finds what it would find: equal names stand at equal places exactly where
prompts begin alike, and one more token differs exactly where they part. Held as runs of equal ids,
a prompt of a million tokens is a few numbers, and all blocks of one run are one tuple.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator
from typing import overload

from heddle.planner.trace import HASHED_TOKENS, TracedRequest

_NAME = struct.Struct("<QQQ")
_OWN = 1 << 62
"""Names from here on belong to single requests."""


class RunTokens:
    """A growing sequence of token ids, as runs of equal ones; in place of a list.

    Args:
        runs: (id, count) of each run, counts at least 1.
        answer: the id that stands for each token to come.
        places: numbers of prefixes, shared by all sequences whose blocks are compared.
    Example:
        >>> tokens = RunTokens([(7, 3), (9, 2)], answer=1)
        >>> tokens.extend(2)
        >>> len(tokens), tokens[2:6], tokens[-1]
        (7, (7, 9, 9, 1), 1)
    """

    __slots__ = ("_ends", "_ids", "_num_prompt_tokens", "_pieces", "_places", "answer")

    def __init__(
        self,
        runs: list[tuple[int, int]],
        answer: int,
        places: dict[tuple[int, int, int], int] | None = None,
    ) -> None:
        self.answer = answer
        self._places = {} if places is None else places
        self._ids: list[int] = []
        self._ends: list[int] = []
        self._pieces: dict[tuple[int, int], tuple[int, ...]] = {}
        for token, count in runs:
            self._add(token, count)
        self._num_prompt_tokens = len(self)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[int]:
        return iter(self[0 : len(self)])

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[int, ...]: ...

    def __getitem__(self, at: int | slice) -> int | tuple[int, ...]:
        if not isinstance(at, slice):
            place = at + len(self) if at < 0 else at
            if not 0 <= place < len(self):
                raise IndexError(f"token {at} of {len(self)}")
            return self._ids[bisect_right(self._ends, place)]
        start, end, step = at.indices(len(self))
        assert step == 1, "tokens are read in order"
        found: tuple[int, ...] = ()
        run = bisect_right(self._ends, start)
        while start < end:
            stop = min(self._ends[run], end)
            piece = self._piece(self._ids[run], stop - start)
            found = found + piece if found else piece
            start, run = stop, run + 1
        return found

    def block_names(self, unit: int) -> list[bytes]:
        """A name for each full block of the prompt: equal exactly where all tokens up to the end of
        the block are equal.

        Runs are as long as can be, so a prefix is what its runs before the last are, the id of the
        last, and its length.

        Args:
            unit: tokens of a block.
        """
        names: list[bytes] = []
        before, run = 0, 0
        for end in range(unit, self._num_prompt_tokens + 1, unit):
            while self._ends[run] < end:
                place = (before, self._ids[run], self._ends[run])
                before = self._places.setdefault(place, len(self._places) + 1)
                run += 1
            names.append(_NAME.pack(before, self._ids[run], end))
        return names

    def append(self, token: int) -> None:
        """One more token."""
        self._add(token, 1)

    def extend(self, count: int) -> None:
        """So many more tokens of the answer."""
        if count:
            self._add(self.answer, count)

    def _add(self, token: int, count: int) -> None:
        if self._ids and self._ids[-1] == token:
            self._ends[-1] += count
        else:
            self._ends.append(len(self) + count)
            self._ids.append(token)

    def _piece(self, token: int, count: int) -> tuple[int, ...]:
        """Equal tokens; blocks that are full of one id are one object."""
        key = (token, count)
        if key not in self._pieces:
            if len(self._pieces) > 8:
                self._pieces.clear()
            self._pieces[key] = (token,) * count
        return self._pieces[key]


class Names:
    """Gives each content a token id, the same for the same.

    Args:
        hashed_tokens: tokens of one hash.
    """

    def __init__(self, hashed_tokens: int = HASHED_TOKENS) -> None:
        self._hashed_tokens = hashed_tokens
        self._known: dict[int, int] = {}
        self._places: dict[tuple[int, int, int], int] = {}

    def stand_ins(self, request: TracedRequest, index: int) -> RunTokens:
        """Tokens of a request's prompt.

        Args:
            request: with the hashes of its blocks, if the trace has them.
            index: its place in the trace; what it shares with nobody is named after it.
        """
        runs: list[tuple[int, int]] = []
        left = request.prompt_len
        for value in request.prefix_hashes:
            count = min(self._hashed_tokens, left)
            if count <= 0:
                break
            runs.append((self._known.setdefault(value, len(self._known)), count))
            left -= count
        own = _OWN + 2 * index
        if left > 0:
            runs.append((own, left))
        return RunTokens(runs, answer=own + 1, places=self._places)
