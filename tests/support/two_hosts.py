"""Two hosts on one machine: two network namespaces joined by a cable, or two loopback addresses.

A namespace has interfaces of its own and sees nothing of the other but the far end of the cable, as
a host does; making one needs the rights of root. Loopback addresses need no rights, and separate
nothing but the launchers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO

import psutil


@dataclass(frozen=True)
class Host:
    """Where one launcher runs."""

    name: str
    address: str
    prefix: tuple[str, ...] = ()
    """Words before a command that is to run on this host."""


LOOPBACK_HOSTS = (Host("first", "127.0.0.1"), Host("second", "127.0.0.2"))
_NETWORK = "10.213.77"
"""The namespaces see no other network, so it cannot clash with one."""


@contextmanager
def separate_hosts() -> Iterator[tuple[Host, ...]]:
    """Hosts as separate as this machine allows."""
    hosts = [_namespace(place) for place in range(2)]
    try:
        try:
            _join([host.name for host in hosts])
        except (OSError, subprocess.CalledProcessError):
            yield LOOPBACK_HOSTS
        else:
            yield tuple(hosts)
    finally:
        if shutil.which("ip") is not None:
            for host in hosts:  # its end of the cable goes with it
                subprocess.run(["ip", "netns", "del", host.name], capture_output=True, check=False)


def run_on(
    hosts: Sequence[Host], commands: Sequence[Sequence[str]], *, seconds: float
) -> list[subprocess.CompletedProcess[str]]:
    """One command per host, side by side; when one fails, or is late, all are killed."""
    with ExitStack() as stack:
        runs = [
            stack.enter_context(_running([*host.prefix, *command]))
            for host, command in zip(hosts, commands, strict=True)
        ]
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            codes = [run.process.poll() for run in runs]
            # A launcher whose peer has failed may wait for it for minutes.
            if None not in codes or any(codes):
                break
            time.sleep(0.1)
        return [run.ended() for run in runs]


@dataclass(frozen=True)
class _Run:
    process: subprocess.Popen[bytes]
    out: IO[bytes]
    err: IO[bytes]

    def ended(self) -> subprocess.CompletedProcess[str]:
        """What it has said; it is killed if it still runs."""
        if self.process.poll() is None:
            # A launcher gives each rank a session of its own.
            launcher = psutil.Process(self.process.pid)
            for process in [*launcher.children(recursive=True), launcher]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        code = self.process.wait()
        texts = []
        for file in (self.out, self.err):
            file.seek(0)
            texts.append(file.read().decode())
        return subprocess.CompletedProcess(self.process.args, code, *texts)


@contextmanager
def _running(command: Sequence[str]) -> Iterator[_Run]:
    """A command that does not outlive this block, nor do its children."""
    with TemporaryFile() as out, TemporaryFile() as err:
        process = subprocess.Popen(command, stdout=out, stderr=err)
        run = _Run(process, out, err)
        try:
            yield run
        finally:
            run.ended()


def _namespace(place: int) -> Host:
    name = f"heddle{os.getpid()}-{place}"
    return Host(name, f"{_NETWORK}.{place + 1}", ("ip", "netns", "exec", name))


def _join(names: Sequence[str]) -> None:
    """Make the namespaces and lay a cable between them."""
    first, second = names
    for name in names:
        _ip("netns", "add", name)
    _ip(*f"link add cable netns {first} type veth peer name cable netns {second}".split())
    for place, name in enumerate(names):
        _ip(*f"-n {name} addr add {_NETWORK}.{place + 1}/24 dev cable".split())
        _ip(*f"-n {name} link set cable up".split())
        _ip(*f"-n {name} link set lo up".split())
    # Making namespaces may be allowed where entering them is not.
    subprocess.run(["ip", "netns", "exec", first, "true"], check=True, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
