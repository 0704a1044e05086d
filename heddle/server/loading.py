"""A model that is about to be served: loaded, and held against one rank."""

from __future__ import annotations

import time
from collections.abc import Callable

from heddle.config.engine import EngineConfig
from heddle.engine.executors.launch_info import LaunchInfo
from heddle.engine.llm import LLM, OnPlan, Watch
from heddle.server.config import SelfCheck
from heddle.server.self_check import check_layout, why_skipped
from heddle.server.startup_lines import plan_lines


def load_checked(
    config: EngineConfig,
    self_check: SelfCheck,
    launch: LaunchInfo | None,
    say: Callable[[str], None],
    watch: Watch | None = None,
    on_plan: OnPlan | None = None,
) -> LLM:
    """Load the model, and compare its layout with one rank where that can be done.

    Args:
        config: of the engine.
        self_check: whether it is compared.
        launch: what a launcher told this process.
        say: gets lines of the start-up.
        watch: sees what the driver asks of its ranks.
        on_plan: told what will run, before it is loaded.
    Raises:
        HeddleError: it does not load.
        NumericsError: the layout gives other numbers.
    """
    llm = LLM.from_config(config, launch=launch, on_compile=say, watch=watch, on_plan=on_plan)
    try:
        reason = why_skipped(config, llm, self_check)
        if reason:
            say(f"self-check: none, {reason}")
        else:
            started = time.monotonic()
            difference = check_layout(config, llm)
            seconds = time.monotonic() - started
            say(f"self-check: logits within {difference:.1e} of one rank's ({seconds:.1f} s)")
    except BaseException:
        llm.close()
        raise
    return llm


def load_here(config: EngineConfig, say: Callable[[str], None]) -> LLM:
    """The same for a command that serves nobody else, and says what takes so long.

    Args:
        config: of the engine.
        say: gets lines for its user.
    Raises:
        HeddleError: it does not load.
        NumericsError: the layout gives other numbers.
    """
    started = time.monotonic()
    say(f"loading {config.model}")
    llm = load_checked(config, "auto", None, say, on_plan=lambda plan: say(plan_lines(plan)[0]))
    say(f"loaded in {time.monotonic() - started:.1f} s")
    return llm
