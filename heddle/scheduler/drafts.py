"""Guesses the next tokens of a sequence from its own past, so that one step can check several.

Texts repeat themselves: names, code, quotations. The longest run of last tokens that stands earlier
in prompt or output is looked up, and what followed its latest occurrence is copied:

    token_ids   7 1 2 3 8 9 ... 5 1 2 3          run (1 2 3), d = 2
                  |---| 8 9     |---| 8 9        drafts (8 9)

A copy that reaches the end of the sequence goes on through itself, as in LZ77: after `4 5 4 5` the
drafts are `4 5 4 5 ...`.

A wrong guess costs rows, never the answer: see docs/speculation.md.

Legend: `S` tokens known, `d` drafts.
Source: prompt lookup decoding (Saxena, 2023); Ziv and Lempel, 1977, for the copy through itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from heddle.config.speculative import SpeculativeConfig
from heddle.scheduler.request import Request


class DraftIndex:
    """Where each run of tokens of one sequence was last followed by another token.

    A new token costs as many entries as there are lengths of runs, whatever the sequence's length,
    and a lookup as many probes. Memory is about 200 bytes per token and length.

    Example:
        >>> index = DraftIndex(SpeculativeConfig(num_speculative_tokens=2))
        >>> index.extend([7, 1, 2, 3, 8, 9, 5, 1, 2, 3])
        >>> index.propose(2)
        (8, 9)
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._lengths = range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1)
        self._token_ids: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}
        """Run -> position after its latest occurrence; the run that ends the sequence is entered
        when a token follows, so that it never finds itself."""

    @property
    def num_tokens(self) -> int:
        """`S`: tokens of the sequence that are known here."""
        return len(self._token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens of the sequence, in order."""
        known = self._token_ids
        for token_id in token_ids:
            end = len(known)
            for length in self._lengths:
                if length <= end:
                    self._next[tuple(known[end - length :])] = end
            known.append(token_id)

    def propose(self, limit: int) -> tuple[int, ...]:
        """Up to `limit` drafts of the tokens that come next.

        Returns:
            `limit` tokens, or none at all where no run of last tokens occurred before.
        """
        known = self._token_ids
        for length in self._lengths:
            start = self._next.get(tuple(known[-length:])) if length <= len(known) else None
            if start is not None:
                # Copying through itself repeats the last `period` tokens.
                period = len(known) - start
                return tuple(known[start + at % period] for at in range(limit))
        return ()


class Drafter:
    """Proposes drafts for requests; keeps an index for each that has decoded."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._indexes: dict[int, DraftIndex] = {}

    @property
    def num_indexes(self) -> int:
        """Requests that are remembered."""
        return len(self._indexes)

    def propose_drafts(self, requests: Iterable[Request]) -> None:
        """Set `draft_token_ids` of each request for its next step.

        Call it between a step's `Scheduler.update` and the next `schedule`, with the requests of
        the step. Those that do not decode next get none: they have ended, are part-way through
        their prompt, or were preempted. Nor do those that follow a grammar.
        """
        for request in requests:
            limit = self._limit(request)
            request.draft_token_ids = self._lookup(request).propose(limit) if limit > 0 else ()
            if request.is_finished:
                self.forget(request.request_id)

    def forget(self, request_id: int) -> None:
        """Drop what is known of a request that has ended; unknown ids are fine."""
        self._indexes.pop(request_id, None)

    def _limit(self, request: Request) -> int:
        """Most drafts that can be of use: a step brings one token more than it has right drafts, so
        the last token of an answer is never a draft."""
        if request.is_finished or request.num_uncomputed_tokens != 1:
            return 0
        if request.params.structured_outputs is not None:
            return 0  # what its grammar permits is known for the next token alone
        room = request.max_output_tokens - len(request.output_token_ids)
        return min(self._config.num_speculative_tokens, room - 1)

    def _lookup(self, request: Request) -> DraftIndex:
        """The index of a request, brought up to its last token."""
        index = self._indexes.setdefault(request.request_id, DraftIndex(self._config))
        index.extend(request.token_ids[index.num_tokens :])
        return index
