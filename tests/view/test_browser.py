"""Pages in a real browser: no error, the figures of the document, keys, names, and soon enough."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from heddle.cli.main import main
from tests.support.browser import Browser, Tab, chromium, needs_chromium
from tests.support.served import toy_server

pytestmark = needs_chromium
THEMES = ("light", "dark")
READY_SECONDS = 3.0
"""Of the largest page: the promise."""
PLAN = "qwen3-0.6b --device H200 --devices 4 --prompt-len 8k --output-len 100 --concurrency 4"
PLAN += " --kv-cache-memory-bytes 60G"
SIMULATE = "qwen3-0.6b --device H200 --devices 4 --max-model-len 4096 --sweep --ttft 1"
SIMULATE += " --kv-cache-memory-bytes 128M --synthetic poisson --requests 20 --rate 20"
SIMULATE += " --prompt-len 300 --output-len 10"
UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
NAMES = """
[...document.querySelectorAll("button, select, input, summary, a, [role=button], [role=region],"
  + "[role=img], [role=group]")]
  .filter((e) => !(e.getAttribute("aria-label") || e.textContent.trim()
    || [...(e.labels || [])].some((l) => l.textContent.trim())))
  .map((e) => e.outerHTML.slice(0, 120))
"""


def output_of(command: str) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        assert main(shlex.split(command)) == 0
    return text.getvalue()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def page(folder: Path, trace_file: Path) -> Callable[[str], tuple[Any, str]]:
    """By its source, once each: what was shown, and the address of the page."""
    made: dict[str, tuple[Any, str]] = {}

    def command(source: str) -> str:
        path = folder / f"{source}.json"
        match source:
            case "plan":
                path.write_text(output_of(f"plan {PLAN} --json"))
            case "simulation":
                path.write_text(output_of(f"simulate {SIMULATE} --json"))
            case "trace":
                return str(trace_file)
            case "server":
                with toy_server(folder / "toy", admin_uds=str(folder / "s")) as served:
                    served.complete(model="toy", prompt="abc", max_tokens=2)
                    transport = httpx2.HTTPTransport(uds=str(folder / "s"))
                    with httpx2.Client(transport=transport) as client:
                        path.write_text(client.get("http://x/server_info").text)
            case "flags":
                return "-tp 2 -pcp 2 -dcp 4 --heads 8/2 --seq-len 40 1000"
            case "model":
                return "gpt-oss-20b -tp 2 -pcp 2 -dcp 4 --device H200 --seq-len 32K"
            case "large":
                return "-tp 32 -pcp 8 -dcp 32 -dp 4 --heads 128/8 --seq-len 1M"
        return str(path)

    def get(source: str) -> tuple[Any, str]:
        if source not in made:
            words, out = command(source), folder / f"{source}.html"
            output_of(f"view {words} -o {out}")
            is_file = Path(words).is_file()
            made[source] = json.loads(Path(words).read_text()) if is_file else None, out.as_uri()
        return made[source]

    return get


Page = Callable[[str], tuple[Any, str]]
SOURCES = ("flags", "model", "plan", "simulation", "trace", "server", "large")


def value(text: str) -> float | None:
    """What a figure says: `1,234`, `12.0 ms`, `37.0%`, `3.25 GB`."""
    if text == "\N{EN DASH}":
        return None
    number, _, unit = text.replace(",", "").partition(" ")
    if number.endswith("%"):
        return float(number[:-1]) / 100
    return float(number) * UNITS.get(unit, 1)


def is_figure(text: str, number: float | None, places: float = 0.5) -> bool:
    """A figure is the number, to three digits or to `places` of its last one."""
    found = value(text)
    if found is None or number is None:
        return found is None and number is None
    return abs(found - number) <= max(0.0051 * abs(number), 1e-12) or abs(found - number) <= places


def same(cells: list[str], numbers: list[float | None], places: float = 1e-12) -> None:
    assert len(cells) == len(numbers)
    for cell, number in zip(cells, numbers, strict=True):
        assert is_figure(cell, number, places), (cells, numbers)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("source", SOURCES)
def test_a_page_draws_itself_without_an_error(
    source: str, theme: str, browser: Browser, page: Page
) -> None:
    with browser.tab(f"{page(source)[1]}?theme={theme}") as tab:
        assert tab.evaluate("document.documentElement.dataset.theme") == theme
        for wide in (600, 1300):
            tab.call(
                "Emulation.setDeviceMetricsOverride",
                width=wide,
                height=900,
                deviceScaleFactor=1,
                mobile=False,
            )
            tab.evaluate("new Promise((done) => setTimeout(done, 300))")
            # Only inner parts may be wider than the window.
            assert tab.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, wide
        assert tab.evaluate(NAMES) == []
        assert tab.errors() == []


def test_the_theme_is_that_of_the_system_until_it_is_chosen(browser: Browser, page: Page) -> None:
    with browser.tab(page("flags")[1]) as tab:
        theme = "document.documentElement.dataset.theme"
        for name in ("dark", "light", "dark"):
            feature = [{"name": "prefers-color-scheme", "value": name}]
            tab.call("Emulation.setEmulatedMedia", features=feature)
            tab.wait(f"{theme} === '{name}'")
        tab.evaluate("document.getElementById('theme').focus()")
        tab.press("Enter")
        tab.wait(f"{theme} === 'light'")


def test_figures_of_a_plan(browser: Browser, page: Page) -> None:
    plan, url = page("plan")
    with browser.tab(url) as tab:
        chosen = [entry["candidate"] for entry in plan["recommended"]]
        rest = [n for n in range(len(plan["candidates"])) if n not in chosen]
        order = [plan["candidates"][n] for n in sorted(chosen) + rest]
        rows = tab.rows("candidates")
        assert len(rows) == len(order)
        for row, candidate in zip(rows, order, strict=True):
            told = candidate["predicted"] or {}
            same(row[2:5], [told.get(name) for name in ("ttft", "tpot", "gap")])
            same(row[5:6], [told.get("tok_s")], 0.051)
            counts = ("tokens_total", "longest_prompt", "concurrency")
            assert row[6:] == [f"{candidate[name]:,}" for name in counts]
            assert row[0].startswith(f"tp {candidate['layout']['tp']} ")
        parts = ("weights", "activations", "exchange", "kv_pool", "states", "reserve", "headroom")
        for row, candidate in zip(tab.rows("memory"), order, strict=False):
            same(row[2:], [candidate["memory"][name] for name in parts], 0.51)
        lines = tab.rows("break-even")
        assert len(lines) == len(plan["break_even"]) > 0
        for row, line in zip(lines, plan["break_even"], strict=True):
            assert (row[0], row[1]) == (line["what"], line["layout"])
            told = "never" if line["tokens"] is None else f"{round(line['tokens']):,}"
            assert row[4] == told


def test_a_bar_of_memory_is_as_long_as_its_bytes(browser: Browser, page: Page) -> None:
    plan, url = page("plan")
    with browser.tab(url) as tab:
        found = tab.evaluate(
            "[...document.querySelectorAll('#memory .bar')].map((bar) => [...bar.children]"
            ".map((part) => part.getBoundingClientRect().width / bar.clientWidth))"
        )
        chosen = [entry["candidate"] for entry in plan["recommended"]]
        first = plan["candidates"][min(chosen)]["memory"]
        names = ("weights", "activations", "exchange", "kv_pool", "states", "reserve")
        assert found[0] == pytest.approx([first[n] / first["device"] for n in names], abs=0.01)


def test_figures_of_a_simulation(browser: Browser, page: Page) -> None:
    simulation, url = page("simulation")
    with browser.tab(url) as tab:
        points = ("p50", "p90", "p99", "mean", "max")
        for row, name in zip(tab.rows("percentiles"), ("ttft", "itl", "e2e"), strict=True):
            same(row[1:6], [simulation[name][point] for point in points])
        rows = tab.rows("sweep")
        assert len(rows) == len(simulation["sweep"]) > 1
        for row, entry in zip(rows, simulation["sweep"], strict=True):
            times = [entry[n][p] for n in ("ttft", "itl") for p in ("p50", "p99")]
            same(row[1:5], times)
            same(row[5:7], [entry["tok_s"], entry["tok_s_per_device"]], 0.051)
            assert row[7:] == [f"{entry['rejects']:,}", "yes" if entry["on_front"] else "no"]
        limited = [value(row[1]) for row in tab.rows("limits")]
        assert limited == pytest.approx(list(simulation["limited_by"].values()), abs=0.0006)


@pytest.mark.parametrize("source", ["trace", "model"])
def test_calls_of_a_step(source: str, browser: Browser, page: Page) -> None:
    _, url = page(source)
    with browser.tab(url) as tab:
        timeline = tab.evaluate(
            "JSON.parse(document.getElementById('data').textContent).layouts[0].timeline"
        )
        for number, step in enumerate(timeline["steps"][:3]):
            select = "[...document.querySelectorAll('#timeline select')][0]"
            tab.evaluate(
                f"{select}.value = '{number}'; {select}.dispatchEvent(new Event('change'))"
            )
            calls = [s for s in step["lanes"][0] if s[5] >= 0]
            rows = tab.rows("calls")
            assert sum(int(row[2]) for row in rows) == len(calls)
            assert sum(value(row[3]) or 0 for row in rows) == sum(s[5] for s in calls)
            reasons = {timeline["words"][s[7]] for s in calls if s[7] >= 0}
            assert {row[5] for row in rows if row[5]} == reasons
            spans = tab.evaluate("document.querySelectorAll('#timeline rect.span').length")
            assert spans == sum(map(len, step["lanes"][:8]))
        assert tab.errors() == []


def test_counters_of_a_server(browser: Browser, page: Page) -> None:
    info, url = page("server")
    with browser.tab(url) as tab:
        rows = dict(map(tuple, tab.rows("counters")))

        def check(prefix: str, found: dict[str, Any]) -> int:
            count = 0
            for name, number in found.items():
                if isinstance(number, dict):
                    count += check(f"{prefix}{name}.", number)
                elif isinstance(number, int | float) and not isinstance(number, bool):
                    assert float(rows[prefix + name]) == number
                    count += 1
            return count

        assert check("", info["counters"]) > 5
        assert "toy" in tab.text("h1")


def focused(tab: Tab, name: str) -> str:
    found: str = tab.evaluate(f"document.activeElement.getAttribute('{name}') || ''")
    return found


def test_ranks_are_reached_with_keys(browser: Browser, page: Page) -> None:
    """Ranks of tp 2 pcp 2: right is the next TP rank, down the next PCP rank."""
    with browser.tab(page("flags")[1]) as tab:
        inside = "document.activeElement.matches('button[data-rank]')"
        for _ in range(30):
            tab.press("Tab")
            if tab.evaluate(inside):
                break
        seen = [focused(tab, "data-rank")]
        keys = ("ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp", "End", "Home", "ArrowLeft")
        for key in keys:
            tab.press(key)
            seen.append(focused(tab, "data-rank"))
        assert seen == ["0", "1", "3", "2", "0", "3", "0", "0"]
        tab.press("End")
        told = tab.text("#rank")
        assert "Rank 3" in told
        assert "0, place 3 of 4: ranks 0 2 1 3" in told  # its DCP group
        assert "4 to 7" in told  # query heads of TP rank 1
        # 40 and 1,000 tokens over four places, one by one.
        assert "stores 10" in told
        assert "stores 250" in told
        # One stop for all ranks: the next one is outside.
        tab.press("Tab")
        assert not tab.evaluate(inside)


def test_a_token_is_found_with_its_computer_and_its_store(browser: Browser, page: Page) -> None:
    with browser.tab(page("flags")[1]) as tab:
        field = "document.querySelector('#ownership input[type=number]')"
        for token in (0, 5, 13, 39):
            tab.evaluate(f"{field}.value = {token}; {field}.dispatchEvent(new Event('change'))")
            told = tab.text("#owner")
            # 40 rows over PCP 2 are four pieces of 10: the outer two on rank 0.
            assert f"computed by pcp {0 if token < 10 or token >= 30 else 1};" in told
            assert f"stored at place {token % 4} of" in told
            assert f"as its token {token // 4}, in its page 0" in told
        drawn = tab.evaluate("document.querySelectorAll('#tokens rect').length")
        assert drawn == 40


def test_spans_are_reached_with_keys(browser: Browser, page: Page) -> None:
    with browser.tab(page("trace")[1]) as tab:
        tab.evaluate("document.querySelector('#timeline rect.span[tabindex=\"0\"]').focus()")
        names = [focused(tab, "aria-label")]
        for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "Home"):
            tab.press(key)
            names.append(focused(tab, "aria-label"))
        assert names[0] == names[4] != names[1] == names[3] != names[2]
        tab.press("ArrowDown")
        assert "rank 1" in focused(tab, "aria-label")
        assert "rank 1" in tab.text("#span")
        tab.press("End")
        assert (
            tab.evaluate("document.querySelectorAll('#timeline rect[tabindex=\"0\"]').length") == 1
        )


def test_text_of_a_source_is_text(browser: Browser, folder: Path, page: Page) -> None:
    plan = copy.deepcopy(page("plan")[0])
    attack = '<img src=x onerror="document.body.dataset.errors=1"></script><script>x()</script>'
    plan["model"]["name"] = attack
    plan["notes"] = [attack]
    plan["recommended"][0]["why"] = [attack]
    path = folder / "hostile.json"
    path.write_text(json.dumps(plan))
    output_of(f"view {path} -o {folder / 'hostile.html'}")
    with browser.tab((folder / "hostile.html").as_uri()) as tab:
        assert attack in tab.text("h1")
        assert tab.evaluate("document.querySelectorAll('img').length") == 0
        assert tab.errors() == []


def test_the_largest_page_is_ready_soon(browser: Browser, page: Page) -> None:
    """1,024 ranks and a million tokens; a busy machine gets one more try."""
    _, url = page("large")
    times = []
    for _ in range(2):
        with browser.tab(url) as tab:
            assert tab.evaluate("document.querySelectorAll('button[data-rank]').length") == 1024
            times.append(float(tab.evaluate("document.body.dataset.ready")) / 1000)
            asked = "performance.now()"
            start = tab.evaluate(asked)
            tab.evaluate("document.querySelector('[data-rank=\"777\"]').focus()")
            told = tab.evaluate(asked) - start
            assert "Rank 777" in tab.text("#rank")
        if times[-1] <= READY_SECONDS:
            break
    assert min(times) <= READY_SECONDS, times
    assert told < 1000  # milliseconds
