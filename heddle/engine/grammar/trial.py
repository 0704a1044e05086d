"""A description is compiled in a helper process first: what runs away there hurts nobody.

    driver                                    helper
    tokens, once ------------------------->   Vocabulary
    description -------------------------->   Grammar, within limits
                 <------- nothing, or why not

The library counts its work, but not all of it: an intersection of twenty expressions in 600 bytes
of schema takes 3 s and 200 MB, one of thirty has no end. What was compiled there compiles in the
driver in the same time.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from heddle.engine.helper_process import (
    HelperPool,
    Limits,
    NoHelper,
    RanAway,
    TaskHandler,
    serve_tasks,
)
from heddle.errors import RequestError

MAX_HELPERS = 2
"""That compile at once; further callers wait."""
DEFAULT_LIMITS = Limits()


class PlainTokens(msgspec.Struct, kw_only=True):
    """What a vocabulary asks of its tokenizer, as plain data."""

    tokens: list[bytes]
    special_ids: set[int]
    strips_first_space: bool

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token."""
        return self.tokens[token_id]

    def is_special(self, token_id: int) -> bool:
        """True for ids that are no text."""
        return token_id in self.special_ids


class Trials:
    """The helpers of one engine. Any thread may ask.

    Args:
        tokens: of the vocabulary; called once per helper.
        limits: of one description.
    """

    def __init__(self, tokens: Callable[[], PlainTokens], limits: Limits = DEFAULT_LIMITS) -> None:
        self._helpers = HelperPool(
            __name__, lambda: msgspec.msgpack.encode(tokens()), limits, seats=MAX_HELPERS
        )

    def run(self, text: str) -> None:
        """Compile a description.

        Args:
            text: in Lark syntax.
        Raises:
            ValueError: the library refuses it, or it takes too much time or memory.
            RequestError: no helper can be had (`invalid_grammar`).
        """
        try:
            reason = self._helpers.ask(text.encode()).decode()
        except RanAway as error:
            raise ValueError(f"compiling {error}") from None
        except NoHelper as error:
            raise RequestError(f"it cannot be compiled now: {error}", "invalid_grammar") from None
        if reason:
            raise ValueError(reason)

    def close(self) -> None:
        """End the idle helpers; those at work end with their descriptions. May be called twice."""
        self._helpers.close()


def serve(descriptor: int) -> None:
    """The helper: compile what comes until the driver has gone.

    Args:
        descriptor: of the connection to the driver.
    """
    from heddle.engine.grammar.compiler import STACK_BYTES, Grammar
    from heddle.engine.grammar.vocabulary import Vocabulary

    def prepare(setup: bytes) -> TaskHandler:
        tokens = msgspec.msgpack.decode(setup, type=PlainTokens)
        vocabulary = Vocabulary(tokens, len(tokens.tokens), ())
        _ = vocabulary.inner

        def answer(task: bytes) -> bytes:
            try:
                Grammar(task.decode(), vocabulary)
            except (ValueError, RequestError) as error:
                return (str(error) or "no reason given").encode("utf-8", "replace")
            return b""

        return answer

    serve_tasks(descriptor, prepare, reserved_bytes=STACK_BYTES)
