"""Errors of the library within one line of ours; nothing heavy is imported."""

from __future__ import annotations

_LONGEST = 200
"""Characters of a quotation."""


def quoted(error: BaseException) -> str:
    """What an error says: its first line, with the next one where a colon announces it.

    Lists of stack frames and long values are left out: at most 200 characters are kept.
    """
    said = ""
    for line in str(error).splitlines():
        said = f"{said} {line.strip()}".strip()
        if said and not said.endswith(":"):
            break
    return said if len(said) <= _LONGEST else f"{said[: _LONGEST - 3]}..."
