"""Compilers for small vocabularies, and walks that draw any token that a grammar permits."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import tokenizers

from heddle.config.structured import StructuredOutputsParams
from heddle.engine.grammar.compiler import GrammarCompiler
from heddle.engine.grammar.matcher import Matcher
from heddle.engine.tokenizer import Tokenizer
from tests.support.byte_tokenizer import byte_level, space_marked

PADDING = 37
"""Ids of the model that no token of the tokenizer has."""
EOS = 0


def create(
    build: Callable[[], tokenizers.Tokenizer] = byte_level,
) -> tuple[Tokenizer, GrammarCompiler]:
    """A tokenizer, and a compiler for a model with some ids more."""
    tokenizer = Tokenizer(build(), special_tokens={}, chat_template=None)
    return tokenizer, GrammarCompiler(tokenizer, tokenizer.vocab_size + PADDING, (EOS,))


BOTH = {name: create(build) for name, build in {"bytes": byte_level, "marks": space_marked}.items()}
"""Both ways in which vocabularies write bytes."""


def ids_of(mask: bytes) -> list[int]:
    """Ids that a mask permits."""
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()


def walk(
    matcher: Matcher, rng: random.Random, most: int, preferred: frozenset[int] = frozenset()
) -> list[int]:
    """Draw permitted tokens until the matcher is done, the end is drawn, or there are `most`.

    `preferred` ids are drawn three times in four where they are permitted.
    """
    drawn: list[int] = []
    while not matcher.is_done and len(drawn) < most:
        legal = ids_of(matcher.mask())
        assert legal, f"nothing is permitted after {drawn}"
        short = [id_ for id_ in legal if id_ in preferred]
        drawn.append(rng.choice(short if short and rng.random() < 0.75 else legal))
        matcher.accept(drawn[-1])
    return drawn


def describe(**fields: object) -> StructuredOutputsParams:
    return StructuredOutputsParams(**fields)  # type: ignore[arg-type]
