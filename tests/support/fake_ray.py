"""As much of Ray as the executor asks for, without Ray: nodes are names, and an actor is a process
of its own that answers calls over a pipe.

What an actor is given must be plain data, here as in the real thing; its death is seen as Ray shows
it: every call that is open fails.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from types import ModuleType
from typing import Any

ACTOR = "import sys; sys.path[:] = {path!r}; from tests.support.fake_ray import serve; serve()"


class ActorDiedError(Exception):
    """The process of an actor is gone."""


class GetTimeoutError(TimeoutError):
    """A call has not ended in time."""


class FakeRay(ModuleType):
    """The module `ray`, in a cluster of some nodes on this machine."""

    def __init__(self, cpus: Sequence[int]) -> None:
        """Make a cluster.

        Args:
            cpus: of each node; the driver lives on the first. Empty: there is no cluster.
        """
        super().__init__("ray")
        self.cpus = list(cpus)
        self.joined = False
        self.is_full = False
        """Actors are not started: all CPUs are taken."""
        self.actors: list[FakeActor] = []
        self.exceptions = ModuleType("ray.exceptions")
        self.exceptions.GetTimeoutError = GetTimeoutError  # type: ignore[attr-defined]
        self.strategies = ModuleType("ray.util.scheduling_strategies")
        self.strategies.NodeAffinitySchedulingStrategy = Affinity  # type: ignore[attr-defined]

    def is_initialized(self) -> bool:
        return self.joined

    def init(self, *, address: str, **_: object) -> None:
        assert address == "auto"  # a cluster is joined, never started
        if not self.cpus:
            raise ConnectionError("Could not find any running Ray instance.\n  at length")
        self.joined = True

    def get_runtime_context(self) -> FakeRay:
        return self

    def get_node_id(self) -> str:
        return "node0"

    def nodes(self) -> list[dict[str, Any]]:
        found = [
            {
                "NodeID": f"node{place}",
                "Alive": True,
                "NodeManagerAddress": "127.0.0.1",
                "Resources": {"CPU": float(count), "memory": 2.0**34},
            }
            for place, count in enumerate(self.cpus)
        ]
        return [*found, {"NodeID": "dead", "Alive": False, "Resources": {"CPU": 64.0}}]

    def remote(self, kind: type) -> ActorClass:
        return ActorClass(self, kind)

    def wait(
        self, calls: Sequence[Future[Any]], *, num_returns: int, timeout: float
    ) -> tuple[list[Future[Any]], list[Future[Any]]]:
        give_up = time.monotonic() + timeout
        while sum(call.done() for call in calls) < num_returns and time.monotonic() < give_up:
            time.sleep(0.01)
        return [c for c in calls if c.done()], [c for c in calls if not c.done()]

    def get(self, call: Future[Any], timeout: float | None = None) -> Any:
        try:
            return call.result(timeout)
        except TimeoutError:
            raise GetTimeoutError("Get timed out") from None

    def kill(self, actor: FakeActor) -> None:
        actor.end()


class Affinity:
    """On which node an actor must live."""

    def __init__(self, node_id: str, *, soft: bool) -> None:
        assert not soft
        self.node_id = node_id


class ActorClass:
    """A class whose objects are actors."""

    def __init__(self, ray: FakeRay, kind: type, **options: Any) -> None:
        self._ray, self._kind, self._options = ray, kind, options

    def options(self, **options: Any) -> ActorClass:
        return ActorClass(self._ray, self._kind, **options)

    def remote(self, *arguments: object) -> FakeActor:
        place = f"{self._kind.__module__}:{self._kind.__qualname__}"
        actor = FakeActor(place, arguments, self._options, self._ray.is_full)
        self._ray.actors.append(actor)
        return actor


class FakeActor:
    """A process that makes one object, and calls its methods side by side."""

    def __init__(
        self, place: str, arguments: Sequence[object], options: dict[str, Any], waits: bool
    ) -> None:
        self.arguments, self.options = arguments, options
        self._calls: dict[int, Future[Any]] = {}
        self._process: subprocess.Popen[str] | None = None
        if waits:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-c", ACTOR.format(path=[os.path.abspath(at) for at in sys.path])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._say({"kind": place, "arguments": list(arguments)})
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)

    def call(self, method: str) -> Future[Any]:
        number, answer = len(self._calls), Future[Any]()
        self._calls[number] = answer
        if self._process is not None and self._process.poll() is not None:
            answer.set_exception(_died())
        self._say({"call": number, "method": method})
        return answer

    def end(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def _say(self, message: dict[str, Any]) -> None:
        words = json.dumps(message)  # refuses whatever is no plain data
        if self._process is not None:
            assert self._process.stdin is not None
            with suppress(BrokenPipeError):
                self._process.stdin.write(words + "\n")

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                answer = json.loads(line)
                call = self._calls[answer["call"]]
                if "error" in answer:
                    call.set_exception(RuntimeError(answer["error"]))
                else:
                    call.set_result(answer["result"])
        for call in list(self._calls.values()):
            if not call.done():
                call.set_exception(_died())


class Method:
    """A method of an actor."""

    def __init__(self, actor: FakeActor, name: str) -> None:
        self._actor, self._name = actor, name

    def remote(self) -> Future[Any]:
        return self._actor.call(self._name)


def serve() -> None:
    """Main function of an actor's process; ends with its driver."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    description = json.loads(sys.stdin.readline())
    module, _, name = description["kind"].partition(":")
    actor = getattr(importlib.import_module(module), name)(*description["arguments"])

    def answer(call: int, method: str) -> None:
        try:
            found = {"call": call, "result": getattr(actor, method)()}
        except Exception as error:
            found = {"call": call, "error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(found) + "\n")

    for line in sys.stdin:
        threading.Thread(target=answer, kwargs=json.loads(line), daemon=True).start()
    os._exit(0)


def install(cpus: Sequence[int]) -> FakeRay:
    """Be what `import ray` finds in this process."""
    fake = FakeRay(cpus)
    sys.modules |= {"ray": fake, "ray.util.scheduling_strategies": fake.strategies}
    return fake


def _died() -> ActorDiedError:
    words = "The actor is dead because its worker process has died."
    return ActorDiedError(f"The actor died unexpectedly.\n\tactor_id: 7\n{words}")
