"""What is asked of Ray: nodes, an actor on each node that was chosen, and what became of it.

Ray is imported here alone, and only when it is asked for. A cluster is joined, never started: one
that `ray.init` starts listens on every address of the host, which is for its owner to decide.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
from collections.abc import Sequence
from typing import Any

from heddle.engine.executors.ray_host import RankHost
from heddle.engine.executors.ray_nodes import Node
from heddle.errors import ConfigError, UnsupportedError

_WORDS = 480
"""Longest piece of Ray's own words in a message, in characters."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def join_cluster() -> Cluster:
    """The cluster that this process has joined, or else that `RAY_ADDRESS` names or that runs on
    this host; joined until the process ends, as Ray does it.

    Raises:
        UnsupportedError: Ray is not installed.
        ConfigError: there is no cluster, or it does not let us in.
    """
    try:
        ray = importlib.import_module("ray")
        # Of the package's submodules these are not imported with it in every version.
        strategies = importlib.import_module("ray.util.scheduling_strategies")
    except ImportError as error:
        raise UnsupportedError(
            "executor=ray needs the package ray, which is not installed; install "
            "heddle-llm[ray] on every node, or use executor=processes"
        ) from error
    if not ray.is_initialized():
        try:
            ray.init(
                address="auto",
                log_to_driver=False,  # ranks send their lines themselves
                logging_level=logging.WARNING,
                configure_logging=False,
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(
                "executor=ray could not join a Ray cluster; start one with `ray start --head`, "
                "name one in RAY_ADDRESS, or use executor=processes; Ray says: "
                f"{ray_words(_root(error))}"
            ) from error
    return Cluster(ray, strategies)


class Cluster:
    """A Ray cluster that this process belongs to."""

    def __init__(self, ray: Any, strategies: Any) -> None:
        self._ray, self._strategies = ray, strategies

    def nodes(self) -> list[Node]:
        """Those that live."""
        own = self._ray.get_runtime_context().get_node_id()
        return [
            Node(
                node_id=node["NodeID"],
                address=node["NodeManagerAddress"],
                cpus=int(node["Resources"].get("CPU", 0)),
                memory_bytes=int(node["Resources"].get("memory", 0)),
                is_own=node["NodeID"] == own,
            )
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    def start_hosts(
        self, placed: Sequence[Node], cpus_per_rank: int, address: str, token: str
    ) -> RankHosts:
        """An actor for each rank, on its node; returns before Ray has started them.

        Args:
            placed: the node of each rank.
            cpus_per_rank: that each actor holds.
            address: where actors find the driver.
            token: what they say there.
        """
        actor = self._ray.remote(RankHost)
        hosts = []
        for rank, node in enumerate(placed):
            there = self._strategies.NodeAffinitySchedulingStrategy(node.node_id, soft=False)
            options = actor.options(
                num_cpus=cpus_per_rank,
                max_restarts=0,
                max_concurrency=2,  # it waits for its rank, and answers meanwhile
                scheduling_strategy=there,
            )
            hosts.append(options.remote(address, token, rank, os.getcwd()))
        return RankHosts(self._ray, hosts)


class RankHosts:
    """The actors of one executor."""

    def __init__(self, ray: Any, actors: Sequence[Any]) -> None:
        self._ray, self._actors = ray, actors
        self._runs = [actor.run.remote() for actor in actors]

    def ended(self, timeout: float = 0.0) -> list[int]:
        """Ranks whose actor waits no longer: its process has ended, or itself has failed."""
        done, _ = self._ray.wait(self._runs, num_returns=len(self._runs), timeout=timeout)
        return [self._runs.index(run) for run in done]

    def why(self, rank: int, seconds: float) -> str:
        """Why an actor has gone without a word of its process, as far as Ray knows.

        Args:
            rank: whose.
            seconds: how long Ray may take to find out.
        """
        try:
            code = self._ray.get(self._runs[rank], timeout=seconds)
        except self._ray.exceptions.GetTimeoutError:
            return "its Ray actor cannot be reached"
        except Exception as error:  # of Ray, or what the actor raised
            return f"its Ray actor ended: {ray_words(error)}"
        return f"its Ray actor ended, and its process with code {code}"

    def stacks(self, seconds: float) -> dict[int, str]:
        """Stacks of the processes whose actors answer in time, by rank."""
        asked = [actor.stacks.remote() for actor in self._actors]
        done, _ = self._ray.wait(asked, num_returns=len(asked), timeout=seconds)
        found = {}
        for answer in done:
            try:
                text = self._ray.get(answer)
            except Exception:  # noqa: S112 - an actor that is gone has no stacks
                continue
            if text:
                found[asked.index(answer)] = text
        return found

    def close(self) -> None:
        """End the actors, and with them whatever is left of their processes."""
        if self._ray.is_initialized():  # else Ray has left its cluster, and ended them itself
            for actor in self._actors:
                self._ray.kill(actor)
        self._actors, self._runs = (), []


def _root(error: BaseException) -> BaseException:
    """The error that Ray met first."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def ray_words(error: BaseException) -> str:
    """What an error of Ray says, on one line: without colours, and without tracebacks and lists of
    identifiers, which are indented. Of a long one the beginning and the end, where the cause is.
    """
    plain = _COLOURS.sub("", str(error))
    lines = [line for line in plain.splitlines() if line and not line[0].isspace()]
    words = " ".join(lines) or type(error).__name__
    return words if len(words) <= _WORDS else f"{words[: _WORDS // 3]} ... {words[-_WORDS // 2 :]}"
