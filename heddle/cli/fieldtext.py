"""The docstring under a config field is the help text of its flag: one sentence, written once."""

from __future__ import annotations

import ast
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path


@cache
def field_texts(config_class: type) -> dict[str, str]:
    """Field name -> the string literal under it, in the source of a config class.

    Example:
        >>> from heddle.config import CacheConfig
        >>> field_texts(CacheConfig)["block_size"]
        'Tokens of one physical page on one rank.'
    """
    source = sys.modules[config_class.__module__].__file__
    tree = ast.parse(Path(source or "").read_text(encoding="utf-8"))
    (body,) = (
        node.body
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == config_class.__name__
    )
    texts: dict[str, str] = {}
    for field, below in pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            texts[field.target.id] = " ".join(str(below.value.value).split())
    return texts
