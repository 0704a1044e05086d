"""Values that replace those of a model's `config.json`, as one canonical JSON text.

A text can be compared, sent to ranks and put into names of cached content; two spellings of one
object are one text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import cast

from heddle.errors import ConfigError

_EXAMPLE = '{"max_position_embeddings": 65536}'


def overrides_text(given: object) -> str:
    """What a caller passes as `hf_overrides`: a mapping, JSON text of an object, or None.

    Returns:
        JSON with sorted keys; empty when nothing is replaced.

    Raises:
        ConfigError: anything else, or a value that JSON does not have.

    Example:
        >>> overrides_text({"b": 1, "a": [2.5]}), overrides_text('{"a":[2.5], "b":1}')
        ('{"a":[2.5],"b":1}', '{"a":[2.5],"b":1}')
    """
    value = given
    if isinstance(given, str):
        try:
            value = json.loads(given or "{}")
        except (ValueError, RecursionError) as error:
            raise _wrong(given) from error
    if value is None:
        return ""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _wrong(given)
    try:
        text = json.dumps(dict(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(given) from error
    return "" if text == "{}" else text


def merge_overrides(config: Mapping[str, object], text: str) -> dict[str, object]:
    """A configuration with values replaced: objects are merged, `null` takes a value away.

    Args:
        config: as a file holds it; not changed.
        text: of `overrides_text`.

    Example:
        >>> merge_overrides({"a": {"b": 1, "c": 2}, "d": 3}, '{"a":{"b":5},"d":null}')
        {'a': {'b': 5, 'c': 2}}
    """
    return _merged(config, json.loads(text or "{}"))


def override_keys(text: str) -> tuple[str, ...]:
    """Dotted names of the values that are replaced.

    Example:
        >>> override_keys('{"a":{"b":5,"c":{}},"d":null}')
        ('a.b', 'a.c', 'd')
    """
    return tuple(_leaves(json.loads(text or "{}"), ""))


def _merged(config: object, patch: Mapping[str, object]) -> dict[str, object]:
    found = dict(cast("Mapping[str, object]", config)) if isinstance(config, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = _merged(found.get(key), value) if isinstance(value, Mapping) else value
    return found


def _leaves(patch: Mapping[str, object], prefix: str) -> list[str]:
    names: list[str] = []
    for key, value in patch.items():
        is_object = isinstance(value, Mapping) and len(value) > 0
        nested = cast("Mapping[str, object]", value) if is_object else {}
        names += _leaves(nested, f"{prefix}{key}.") if is_object else [f"{prefix}{key}"]
    return names


def _wrong(given: object) -> ConfigError:
    return ConfigError(
        f"hf_overrides={given!r} is not legal; it is a JSON object of values of config.json, for "
        f"example {_EXAMPLE}"
    )
