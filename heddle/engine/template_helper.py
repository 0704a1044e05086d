"""Chat templates run in helper processes, within limits of time, memory and length of the text.

A template comes with a model, or with a request where the operator takes such ones. It is code: a
loop in it, or a power of ten that the compiler works out, has no end in sight. Templates of
requests have a helper of their own, so that nobody who uses the model's waits for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import lru_cache

import msgspec

from heddle.engine.chat_template import ChatTemplate, Conversation
from heddle.engine.helper_process import (
    HelperPool,
    Limits,
    NoHelper,
    RanAway,
    TaskHandler,
    serve_tasks,
)
from heddle.errors import RequestError

DEFAULT_LIMITS = Limits(seconds=5.0, memory_bytes=256 << 20)
NUM_HELPERS = 2
"""For the model's own template."""
MAX_ADDED_CHARACTERS = 1 << 20
"""That a template may make beyond `MAX_GROWTH` times what it was given."""
MAX_GROWTH = 4
_CODE = "invalid_template_input"


class _Task(msgspec.Struct, frozen=True, kw_only=True):
    """One rendering."""

    source: str
    special_tokens: Mapping[str, str]
    conversation: bytes
    """Encoded apart: its length bounds that of the text."""


class _Told(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    text: str = ""
    refusal: str = ""
    """Empty: there is a text."""
    code: str = ""


class TemplateHelpers:
    """The helpers of one server. Any thread may ask; nothing is started before somebody does."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        """Start none yet.

        Args:
            limits: of one rendering.
        """
        self._own = HelperPool(__name__, bytes, limits, seats=NUM_HELPERS)
        self._given = HelperPool(__name__, bytes, limits, seats=1)

    def render(
        self, source: str, special_tokens: Mapping[str, str], conversation: Conversation
    ) -> str:
        """The text of a conversation, by the model's or the server's template.

        Raises:
            RequestError: the template refuses, or takes too much (`invalid_template_input`).
        """
        return _ask(self._own, source, special_tokens, conversation)

    def render_given(
        self, source: str, special_tokens: Mapping[str, str], conversation: Conversation
    ) -> str:
        """The same by a template that a request brought.

        Raises:
            RequestError: the template refuses, or takes too much (`invalid_template_input`).
        """
        return _ask(self._given, source, special_tokens, conversation)

    def warm(self) -> None:
        """Start a helper, so that the first conversation need not wait for it."""
        with contextlib.suppress(RequestError):  # who needs one is told
            self.render("", {}, Conversation(messages=[{"role": "user", "content": ""}]))

    def close(self) -> None:
        """End the helpers. May be called twice."""
        self._own.close()
        self._given.close()


def _ask(
    helpers: HelperPool, source: str, special_tokens: Mapping[str, str], conversation: Conversation
) -> str:
    try:
        task = _Task(
            source=source,
            special_tokens=special_tokens,
            conversation=msgspec.msgpack.encode(conversation),
        )
        told = msgspec.msgpack.decode(helpers.ask(msgspec.msgpack.encode(task)), type=_Told)
    except RanAway as error:
        raise RequestError(f"rendering the conversation: {error}", _CODE) from None
    except NoHelper as error:
        raise RequestError(f"the conversation cannot be rendered now: {error}", _CODE) from None
    except (OverflowError, UnicodeEncodeError, TypeError) as error:
        raise RequestError(f"a value cannot be passed to a chat template: {error}", _CODE) from None
    if told.refusal:
        raise RequestError(told.refusal, told.code)
    return told.text


def serve(descriptor: int) -> None:
    """The helper: render what comes until the driver has gone.

    Args:
        descriptor: of the connection to the driver.
    """
    serve_tasks(descriptor, _prepare)


def _prepare(setup: bytes) -> TaskHandler:
    del setup  # all that a template needs comes with its task
    compiled = lru_cache(maxsize=4)(_compile)

    def answer(data: bytes) -> bytes:
        try:
            task = msgspec.msgpack.decode(data, type=_Task)
            conversation = msgspec.msgpack.decode(task.conversation, type=Conversation)
            template = compiled(task.source, tuple(task.special_tokens.items()))
            most = MAX_GROWTH * len(task.conversation) + MAX_ADDED_CHARACTERS
            told = _Told(text=template.render(conversation, most))
        except RequestError as error:
            told = _Told(refusal=str(error), code=error.code)
        except RecursionError:
            told = _Told(
                refusal="the conversation or its template is nested too deeply", code=_CODE
            )
        except MemoryError:
            told = _Told(refusal="rendering the conversation takes too much memory", code=_CODE)
        try:
            return msgspec.msgpack.encode(told)
        except UnicodeEncodeError:  # a template may write any escape, and raise with one
            words = "the chat template makes half a character (a surrogate), which no text holds"
            return msgspec.msgpack.encode(_Told(refusal=words, code=_CODE))

    return answer


def _compile(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens))
