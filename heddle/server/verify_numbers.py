"""What came of the live rows that were held against one rank, as metrics."""

from __future__ import annotations

from heddle.engine.shadow.shadow import RESULTS, Shadow
from heddle.server.request_numbers import Values, add


class VerifyNumbers:
    """Of one server; each scrape adds what a shadow has counted since the last one."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._shown = dict.fromkeys(RESULTS, 0)

    def show(self, shadow: Shadow) -> None:
        """Bring the counters up to what the shadow has done."""
        for result in RESULTS:
            new = shadow.counts[result] - self._shown[result]
            self._shown[result] += new
            self._values.of("verify_rows", result=result).inc(new)
            if result == "mismatch":
                add(self._values, "verify_mismatch", 0, new)
        self._values.of("verify_running").set(0 if shadow.stopped else 1)
