"""Descriptions become grammars, once each.

A description comes from outside, and its cost is not seen from its length. So the library counts
its work and gives up at limits; what it does not count is bounded by a helper process, which
compiles each description first (`trial`). Grammars are compiled on a thread with a large stack:
rules that lead to rules are followed by recursion, and a stack that overflows ends the process.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from heddle.config.structured import StructuredOutputsParams
from heddle.engine.grammar.matcher import Matcher
from heddle.engine.grammar.source import lark_text
from heddle.engine.grammar.trial import Trials
from heddle.engine.grammar.vocabulary import Vocabulary
from heddle.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from heddle.engine.text import TokenBytes

MAX_GRAMMARS = 64
"""Grammars that are kept; the one that was not asked for longest goes first."""
STACK_BYTES = 256 * 2**20
"""Of the thread that compiles. Reserved, and spent only as far as rules go deep."""
MAX_RENEWAL_SECONDS = 0.05
"""A matcher is made anew between two steps of the engine."""
LIMITS: dict[str, Any] = {
    "max_items_in_row": 2_000,
    "step_max_items": 20_000,
    "step_lexer_fuel": 200_000,
    "initial_lexer_fuel": 1_000_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
}
"""Names and units are the library's: states of the parser, work of the lexer."""
_BEGINNINGS = (b'{"', b'[{"')
"""Of the answer: where most options of a schema meet, the names of an object's properties."""
_TOO_MANY = re.compile("too many items|row has [0-9]+ items", re.IGNORECASE)


class Grammar:
    """A compiled description.

    Args:
        text: in Lark syntax.
        vocabulary: of the model.
    Raises:
        ValueError: the library refuses the text, or it permits nothing but the empty answer.
    """

    def __init__(self, text: str, vocabulary: Vocabulary) -> None:
        self._text = text
        self._vocabulary = vocabulary
        self.is_worn = False
        """Its lexer has met a limit; further answers had better share a new one."""
        began = time.monotonic()
        self._prototype = self._create()
        self._seconds = time.monotonic() - began
        if self._prototype.is_error():
            raise ValueError(self._prototype.get_error())
        self._first = Matcher(self._create, vocabulary, self._prototype.deep_copy()).permitted
        if not self._first.bits.any():
            what = "only the empty text" if self._first.may_end else "no text"
            raise ValueError(f"it permits {what} in the tokens of this model")
        for beginning in _BEGINNINGS:
            self._try(vocabulary.spell(beginning) or ())

    def _try(self, token_ids: Sequence[int]) -> None:
        """See whether an answer could begin so, and go on from there within the limits."""
        inner = self._prototype.deep_copy()
        if token_ids and inner.validate_tokens(list(token_ids)) == len(token_ids):
            inner.consume_tokens(list(token_ids))
            inner.compute_bitmask()
            if inner.is_error():
                raise ValueError(inner.get_error())

    def start(
        self, eos_token_ids: Sequence[int] = (), stop_token_ids: Sequence[int] = ()
    ) -> Matcher:
        """The state of a new answer.

        Args:
            eos_token_ids: permitted where its text is legal as it stands.
            stop_token_ids: those of them that have no text are, too; any other is a token of the
                text, and ends an answer wherever it is drawn.
        """
        stops = [id_ for id_ in stop_token_ids if not self._vocabulary.has_text(id_)]
        end_ids = (*eos_token_ids, *stops)
        inner = self._prototype.deep_copy()
        return Matcher(self._renew, self._vocabulary, inner, end_ids=end_ids, first=self._first)

    def _renew(self) -> LLMatcher:
        """For a matcher that ran into a limit.

        Raises:
            RequestError: it takes longer than other answers may wait for this one.
        """
        self.is_worn = True
        if self._seconds > MAX_RENEWAL_SECONDS:
            raise RequestError("no time to compile it again", "invalid_grammar")
        return self._create()

    def _create(self) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**LIMITS, verbose_errors=False)
        inner = self._vocabulary.inner
        return _on_large_stack(lambda: LLMatcher(inner, self._text, log_level=0, limits=limits))


class GrammarCompiler:
    """Compiles for one engine, in any thread.

    Args:
        tokenizer: of the model; None: every description is refused.
        vocab_size: of the model, in tokens.
        eos_token_ids: ids that end a text.
    """

    def __init__(
        self, tokenizer: TokenBytes | None, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._vocabulary: Vocabulary | None = None
        self._trials = Trials(lambda: self._get_vocabulary().plain())
        self._lock = threading.Lock()
        self._grammars: OrderedDict[tuple[str, str], Grammar] = OrderedDict()

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """The grammar of a description; equal ones are compiled once as long as they are kept.

        Raises:
            RequestError: it is not understood, asks for something that cannot be held, or takes
                more work than the limits allow (`invalid_grammar`); or the model has no tokenizer.
        """
        key = (params.kind, params.source)
        with self._lock:
            vocabulary = self._get_vocabulary()
            found = self._grammars.get(key)
        if found is None or found.is_worn:
            found = self._compile(params, vocabulary)
        with self._lock:
            self._grammars[key] = found
            self._grammars.move_to_end(key)
            if len(self._grammars) > MAX_GRAMMARS:
                self._grammars.popitem(last=False)
        return found

    def is_ready(self, params: StructuredOutputsParams) -> bool:
        """Whether `compile` has it, and takes no time."""
        with self._lock:
            found = self._grammars.get((params.kind, params.source))
        return found is not None and not found.is_worn

    def close(self) -> None:
        """End the helper processes; a second call does nothing."""
        self._trials.close()

    def _compile(self, params: StructuredOutputsParams, vocabulary: Vocabulary) -> Grammar:
        try:
            text = lark_text(params)
            self._trials.run(text)
            return Grammar(text, vocabulary)
        except ValueError as error:
            raise RequestError(
                f"structured_outputs.{params.kind} cannot be followed: {_reason(str(error))}",
                "invalid_grammar",
            ) from None

    def _get_vocabulary(self) -> Vocabulary:
        if self._tokenizer is None:
            raise RequestError("structured_outputs needs a tokenizer, and this model has none")
        if self._vocabulary is None:
            self._vocabulary = Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
        return self._vocabulary


def _reason(message: str) -> str:
    """What the library says, without the places and pieces of the text that it quotes."""
    if _TOO_MANY.search(message):
        return "too many options at one place, such as optional properties of one object"
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no reason given"]
    named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    line = re.sub(r"^(at )?\d+\(\d+\): ", "", (named or lines)[0])
    line = re.sub(r'"[^"]{33,}("|$)', '"..."', line)
    return line if len(line) <= 160 else f"{line[:157]}..."


_stack_lock = threading.Lock()


def _on_large_stack(create: Callable[[], LLMatcher]) -> LLMatcher:
    """Call a function on a thread of its own, and wait for it.

    Raises:
        RequestError: no such thread can be had, or the library broke off.
    """
    made: list[LLMatcher] = []
    thread = threading.Thread(target=lambda: made.append(create()), name="grammar")
    with _stack_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        except RuntimeError as error:
            raise RequestError(f"no room to compile it ({error})", "invalid_grammar") from None
        finally:
            threading.stack_size(before)
    thread.join()
    if not made:
        raise RequestError("the library failed to read it", "invalid_grammar")
    return made[0]
