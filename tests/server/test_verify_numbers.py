"""Each scrape shows what a shadow has counted, once."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from heddle.engine.shadow.shadow import RESULTS
from heddle.server.health import MAX_ALARMS, _bad_numbers, _live_checks
from heddle.server.verify_numbers import VerifyNumbers


class Values:
    """Counters by name and labels."""

    def __init__(self) -> None:
        self.found: Counter[tuple[str, ...]] = Counter()

    def of(self, name: str, replica: int = 0, **labels: object) -> Any:
        key = (name, *map(str, labels.values()))
        self.found[key] += 0
        return SimpleNamespace(
            inc=lambda amount: self.found.update({key: amount}),
            set=lambda amount: self.found.__setitem__(key, amount),
        )


def test_counts_are_added_once() -> None:
    values = Values()
    shadow: Any = SimpleNamespace(counts=Counter(dict.fromkeys(RESULTS, 0)), stopped="")
    shown = VerifyNumbers(values)
    shown.show(shadow)
    rows = {("verify_rows", result): 0 for result in RESULTS}
    assert values.found == {**rows, ("verify_running",): 1}
    shadow.counts.update(ok=3, mismatch=2, dropped=1)
    shown.show(shadow)
    shown.show(shadow)
    shadow.counts.update(ok=1, mismatch=1)
    shown.show(shadow)
    assert values.found["verify_rows", "ok"] == 4
    assert values.found["verify_rows", "dropped"] == 1
    assert values.found["verify_rows", "mismatch"] == values.found["verify_mismatch",] == 3
    shadow.stopped = "its rank ended"
    shown.show(shadow)
    assert values.found["verify_running",] == 0


def serving(alarms: list[str] | None, trouble: str = "", stopped: str = "") -> Any:
    shadow = None if alarms is None else SimpleNamespace(alarms=alarms, stopped=stopped)
    driver = SimpleNamespace(bad_numbers=SimpleNamespace(trouble=trouble))
    engine = SimpleNamespace(llm=SimpleNamespace(shadow=shadow), driver=driver)
    return SimpleNamespace(running_engine=engine)


def test_a_deep_look_tells_the_first_and_the_last_alarms() -> None:
    assert _live_checks(serving(None)) == _live_checks(serving([])) == {}
    assert _live_checks(SimpleNamespace(running_engine=None)) == {}  # type: ignore[arg-type]
    assert _live_checks(serving(["a", "b"])) == {"verify_alarms": ["a", "b"]}
    many = [str(number) for number in range(9)]
    found = _live_checks(serving(many))["verify_alarms"]
    assert found == ["0", "5", "6", "7", "8"]
    assert len(found) == MAX_ALARMS


def test_a_deep_look_tells_that_live_checks_have_stopped_but_no_cause() -> None:
    """A cause may name a host, a file, a line of code."""
    assert _live_checks(serving([], stopped="at /home/me")) == {"verify_stopped": True}
    both = _live_checks(serving(["a"], stopped="at /home/me"))
    assert both == {"verify_alarms": ["a"], "verify_stopped": True}


def test_numbers_that_are_all_bad_are_trouble_of_the_engine() -> None:
    assert _bad_numbers(serving(None, "the last 3 steps")) == "the last 3 steps"
    assert _bad_numbers(serving(None)) == ""
    assert _bad_numbers(SimpleNamespace(running_engine=None)) == ""  # type: ignore[arg-type]
