from __future__ import annotations

import subprocess
import sys

import pytest

from heddle.engine.progress import loading_bar, progress_bar


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_shown_without_a_terminal(
    enabled: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_bar(2, enabled=enabled) as advance:
        advance()
        advance()
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "")


def test_switched_off_bar_loads_no_library() -> None:
    code = (
        "import sys; from heddle.engine.progress import loading_bar, progress_bar\n"
        "with progress_bar(1, enabled=False) as advance: advance()\n"
        "print('tqdm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_loading_shows_the_first_rank_on_a_terminal_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with loading_bar() as report:
        report(0, 3, 7)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with loading_bar() as report:
        report(1, 5, 9)
        report(0, 3, 7)
        report(0, 7, 7)
    shown = capsys.readouterr().err
    assert "Loading weights: 100%" in shown
    assert "7/7" in shown
    assert "/9" not in shown
