"""A document -> one HTML file that asks nobody for anything.

Everything is inside: the document as JSON, styles, our scripts and the chart library. The page may
run only these scripts, which its content security policy names by their hashes, and may load
nothing. Text of the document reaches the page as text, never as markup.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

_STATIC = Path(__file__).parent / "static"
_SCRIPTS = (
    "vendor/uPlot.iife.min.js",
    "elements.js",
    "mesh.js",
    "ownership.js",
    "timeline.js",
    "charts.js",
    "plan.js",
    "simulation.js",
    "server.js",
    "page.js",
)
_STYLES = ("vendor/uPlot.min.css", "page.css")


def render(document: Mapping[str, Any]) -> str:
    """The page of a document, see `heddle.view.document`."""
    return _page(str(document["title"]), document, "'none'")


def live_page() -> tuple[str, str]:
    """The page of a running server, which asks that server alone, and its security policy."""
    empty = {"title": "heddle", "source": "live", "layouts": [], "notes": []}
    return _page("heddle", empty, "'self'"), _policy("'self'", is_header=True)


def _page(title: str, document: Mapping[str, Any], connect: str) -> str:
    body = _read("page.html")
    parts = {
        "@TITLE@": html.escape(title),
        "@POLICY@": html.escape(_policy(connect, is_header=False)),
        "@STYLES@": "".join(f"<style>{_read(name)}</style>" for name in _STYLES),
        "@DATA@": embedded(document),
        "@SCRIPTS@": "".join(f"<script>{_read(name)}</script>" for name in _SCRIPTS),
    }
    # Each mark is looked for in the template alone, never in what was put there.
    pieces: list[str] = []
    for line in body.splitlines():
        pieces.append(next((line.replace(m, t, 1) for m, t in parts.items() if m in line), line))
    return "\n".join(pieces) + "\n"


def embedded(document: Mapping[str, Any]) -> str:
    """JSON that may stand inside a script element.

    Raises:
        ValueError: a number is not finite.
    """
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _policy(connect: str, *, is_header: bool) -> str:
    sources = {
        "default-src": ["'none'"],
        "script-src": _hashes(_SCRIPTS),
        "style-src": _hashes(_STYLES),
        "img-src": ["data:"],
        "connect-src": [connect],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
    }
    if is_header:
        sources["frame-ancestors"] = ["'none'"]
    return "; ".join(f"{name} {' '.join(values)}" for name, values in sources.items())


def _hashes(names: Sequence[str]) -> list[str]:
    digests = (hashlib.sha256(_read(name).encode()).digest() for name in names)
    return [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]


@cache
def _read(name: str) -> str:
    return (_STATIC / name).read_text(encoding="utf-8")
