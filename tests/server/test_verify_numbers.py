"""Each scrape shows what a shadow has counted, once."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from heddle.engine.shadow.shadow import RESULTS
from heddle.server.health import MAX_ALARMS, _alarms, _bad_numbers
from heddle.server.verify_numbers import VerifyNumbers


class Values:
    """Counters by name and labels."""

    def __init__(self) -> None:
        self.found: Counter[tuple[str, ...]] = Counter()

    def of(self, name: str, replica: int = 0, **labels: object) -> Any:
        key = (name, *map(str, labels.values()))
        self.found[key] += 0
        return SimpleNamespace(inc=lambda amount: self.found.update({key: amount}))


def test_counts_are_added_once() -> None:
    values, shadow = Values(), SimpleNamespace(counts=Counter(dict.fromkeys(RESULTS, 0)))
    shown = VerifyNumbers(values)
    shown.show(shadow)
    assert values.found == {("verify_rows", result): 0 for result in RESULTS}
    shadow.counts.update(ok=3, mismatch=2, dropped=1)
    shown.show(shadow)
    shown.show(shadow)
    shadow.counts.update(ok=1, mismatch=1)
    shown.show(shadow)
    assert values.found["verify_rows", "ok"] == 4
    assert values.found["verify_rows", "dropped"] == 1
    assert values.found["verify_rows", "mismatch"] == values.found["verify_mismatch",] == 3


def serving(alarms: list[str] | None, trouble: str = "") -> Any:
    shadow = None if alarms is None else SimpleNamespace(alarms=alarms)
    driver = SimpleNamespace(bad_numbers=SimpleNamespace(trouble=trouble))
    engine = SimpleNamespace(llm=SimpleNamespace(shadow=shadow), driver=driver)
    return SimpleNamespace(running_engine=engine)


def test_a_deep_look_tells_the_first_and_the_last_alarms() -> None:
    assert _alarms(serving(None)) == _alarms(serving([])) == []
    assert _alarms(SimpleNamespace(running_engine=None)) == []  # type: ignore[arg-type]
    assert _alarms(serving(["a", "b"])) == ["a", "b"]
    many = [str(number) for number in range(9)]
    assert _alarms(serving(many)) == ["0", "5", "6", "7", "8"]
    assert len(_alarms(serving(many))) == MAX_ALARMS


def test_numbers_that_are_all_bad_are_trouble_of_the_engine() -> None:
    assert _bad_numbers(serving(None, "the last 3 steps")) == "the last 3 steps"
    assert _bad_numbers(serving(None)) == ""
    assert _bad_numbers(SimpleNamespace(running_engine=None)) == ""  # type: ignore[arg-type]
