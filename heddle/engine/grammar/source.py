"""Every kind of description as one text in the Lark syntax of llguidance."""

from __future__ import annotations

import json
import re

from heddle.config.structured import StructuredOutputsParams

JSON_WHITESPACE = r"[ \t\n\r]{0,64}"
"""Between the tokens of JSON. A model that has nothing to say could write blanks for ever."""

_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
"""Each token that keeps the text legal is permitted, not only the one that a tokenizer would choose
where the text is forced. It stands last: of two settings the later one counts."""

_LARK_START = re.compile(r"^\s*start\s*:(?!:=)", re.MULTILINE)
"""What no text in GBNF has: `::=` may stand in a literal of a Lark grammar."""


def lark_text(params: StructuredOutputsParams) -> str:
    """The grammar of a description.

    Raises:
        ValueError: a GBNF grammar that cannot be read.
    """
    return _body(params) + _OPTIONS


def _body(params: StructuredOutputsParams) -> str:
    kind, source = params.kind, params.source
    if kind == "grammar":
        return _grammar(source)
    if kind == "regex":
        return f"start: /{_regex(source)}/"
    if kind == "choice":
        texts = params.choice or ()
        return f"start: {' | '.join(json.dumps(text) for text in texts)}"
    return _json(source if kind == "json" else '{"type":"object"}')


def _json(source: str) -> str:
    schema = json.loads(source)
    given = schema.get("x-guidance")
    options = given if isinstance(given, dict) else {}
    # A keyword that is not understood is refused: leaving it out would permit too much.
    options = {"whitespace_pattern": JSON_WHITESPACE, **options, "lenient": False}
    return f"start: %json {json.dumps({**schema, 'x-guidance': options})}"


def _regex(source: str) -> str:
    from llguidance import regex_to_lark

    return regex_to_lark(source, "")


def _grammar(source: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if "::=" not in source or _LARK_START.search(source):
        return source
    try:
        return gbnf_to_lark(source)
    except RecursionError:
        raise ValueError("the grammar is nested too deeply") from None
    except Exception as error:  # its own class of error derives from Exception alone
        raise ValueError(str(error)) from None
