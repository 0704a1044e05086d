"""One file that is whole, runs nothing but its own scripts, and can be read in both themes."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from html.parser import HTMLParser
from importlib import resources
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.config import ParallelConfig
from heddle.layout.layout_object import layout_object
from heddle.view.document import of_layout, page_document
from heddle.view.page import embedded, live_page, render

HOSTILE = "</script><script>alert(1)</script><!-- \u2028 @DATA@ @SCRIPTS@ @TITLE@ & \"x\" 'y'"
VOID = {"meta", "link", "img", "br", "input", "hr"}


class Reader(HTMLParser):
    """What stands in a page; every element that is opened must be closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.styles: list[str] = []
        self.title = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        if tag == "style":
            self.styles.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        match self._open[-1:]:
            case ["script"]:
                attributes, text = self.scripts[-1]
                self.scripts[-1] = attributes, text + data
            case ["style"]:
                self.styles[-1] += data
            case ["title"]:
                self.title += data

    @property
    def policy(self) -> dict[str, list[str]]:
        (content,) = (
            facts["content"]
            for tag, facts in self.elements
            if tag == "meta" and facts.get("http-equiv") == "Content-Security-Policy"
        )
        assert content is not None
        return directives(content)


def directives(policy: str) -> dict[str, list[str]]:
    parts = (part.split() for part in policy.split(";"))
    return {name: values for name, *values in parts}


def layout_document(tp: int, pcp: int, dcp: int, dp: int = 1, *seq_lens: int) -> dict[str, Any]:
    parallel = ParallelConfig(
        tensor_parallel_size=tp,
        prefill_context_parallel_size=pcp,
        decode_context_parallel_size=dcp,
        data_parallel_size=dp,
    )
    layout = layout_object(parallel, block_size=16, executor="auto")
    entry = of_layout("as given", parallel, layout, heads=(128, 8), seq_lens=seq_lens or (64,))
    return page_document("a layout", "layout", [entry])


@pytest.fixture(scope="module")
def page() -> str:
    return render(layout_document(2, 2, 4))


def test_nothing_outside_is_named(page: str) -> None:
    found = Reader(page)
    for tag, facts in found.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base"), tag
        assert not {"src", "srcset", "data", "action", "style"} & set(facts), (tag, facts)
        assert not [name for name in facts if name.startswith("on")], (tag, facts)
        assert (facts.get("href") or "#").startswith("#")
    for style in found.styles:
        assert "url(" not in style
        assert "@import" not in style
    # A namespace, and in its licence the home of the library; neither is loaded.
    said = {"http://www.w3.org/2000/svg", "https://github.com/leeoniya/uPlot"}
    assert set(re.findall(r"https?://[\w./-]+", page)) == said


def test_the_policy_lets_in_these_scripts_and_styles_alone(page: str) -> None:
    found = Reader(page)
    policy = found.policy
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == ["'none'"]
    assert policy["connect-src"] == ["'none'"]

    def hashes(texts: list[str]) -> list[str]:
        digests = [hashlib.sha256(text.encode()).digest() for text in texts]
        return [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]

    data = [text for facts, text in found.scripts if facts.get("type") == "application/json"]
    code = [text for facts, text in found.scripts if not facts]
    assert len(data) == 1
    assert len(data) + len(code) == len(found.scripts)
    assert policy["script-src"] == hashes(code)
    assert policy["style-src"] == hashes(found.styles)


def test_the_live_page_asks_its_own_server_alone() -> None:
    text, header = live_page()
    policy = directives(header)
    assert policy["connect-src"] == ["'self'"]
    assert policy["frame-ancestors"] == ["'none'"]
    assert policy["script-src"] == Reader(text).policy["script-src"]
    assert not [value for values in policy.values() for value in values if "unsafe" in value]


def test_text_of_a_document_stays_text() -> None:
    document = page_document(HOSTILE, HOSTILE, [], notes=[HOSTILE])
    text = render(document)
    found = Reader(text)
    assert found.title == HOSTILE
    assert len(found.scripts) == len(Reader(render(page_document("x", "y", []))).scripts)
    (data,) = (body for facts, body in found.scripts if facts.get("id") == "data")
    assert json.loads(data) == document


def test_scripts_never_make_markup_of_text() -> None:
    folder = resources.files("heddle.view") / "static"
    own = {path.name: path.read_text() for path in folder.iterdir() if path.name.endswith(".js")}
    assert len(own) >= 8
    for name, code in own.items():
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in code, (name, word)


@given(st.text())
def test_embedded_data_are_the_same_data_and_end_no_element(text: str) -> None:
    found = embedded({"text": text, text: [1, None, text]})
    assert json.loads(found) == {"text": text, text: [1, None, text]}
    assert not set(found) & set("<>&\u2028\u2029")


def test_numbers_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        embedded({"n": float("nan")})


def test_a_large_layout_is_a_small_file() -> None:
    document = layout_document(32, 8, 32, 4, 1_000_000, 1000)
    assert document["layouts"][0]["layout"]["world_size"] == 1024
    assert len(render(document).encode()) < 5_000_000


def test_the_title_is_shown_as_it_is() -> None:
    assert f"<title>{html.escape('a & b <c>')}</title>" in render(
        page_document("a & b <c>", "", [])
    )


def theme_colours(name: str) -> dict[str, str]:
    css = (resources.files("heddle.view") / "static" / "page.css").read_text()
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
        for block in re.findall(r":root[^{]*\{([^}]*)\}", css)
    )
    assert light.keys() == dark.keys()
    return light if name == "light" else dark


def luminance(colour: str) -> float:
    """Relative luminance. Source: WCAG 2.2, "relative luminance"."""
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_of_known_colours() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)  # the known threshold


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast_is_that_of_wcag_aa(theme: str) -> None:
    colours = theme_colours(theme)
    series = [name for name in colours if re.fullmatch(r"c\d", name)]
    assert len(series) == 8
    for back in ("back", "panel"):
        for text in ("text", "soft", "accent", "warn"):
            assert contrast(colours[text], colours[back]) >= 4.5, (text, back)
        for name in series:  # graphics
            assert contrast(colours[name], colours[back]) >= 3, (name, back)
    for name in series:
        assert contrast(colours["on-color"], colours[name]) >= 4.5, name
