"""No byte from outside is run: neither named anywhere in the code, nor by what a border does."""

from __future__ import annotations

import ast
import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import heddle
from heddle.engine.executors.frames import MAX_FRAME_BYTES, FrameDecoder, encode_frame
from heddle.engine.executors.messages import FromRank, Stop, ToRank, ToSeat
from heddle.engine.executors.ray_host import Hello
from heddle.engine.executors.ray_listener import RankListener
from heddle.engine.helper_process import Limits, RanAway
from heddle.engine.template_helper import TemplateHelpers
from heddle.errors import HeddleError
from tests.security.gadgets import gadgets
from tests.support.served import toy_server

PACKAGE = Path(heddle.__file__).parent
MODULES = ("cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve", "code", "codeop")
"""That turn bytes into code or into objects of any class."""
CALLS = ("eval", "exec", "compile", "__import__")
"""Of the language itself, by their bare names."""
ATTRIBUTES = (
    *("recv_pyobj", "send_pyobj", "allow_pickle", "unsafe_load", "full_load"),
    *("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)
"""Of libraries, whatever they are called on."""
NAMES = (
    *(
        "os.system",
        "os.popen",
        "torch.load",
        "torch.jit.load",
        "torch.package",
        "yaml.load",
        "numpy.load",
        "np.load",
    ),
)
CONNECTIONS = "heddle/engine/helper_process.py"
"""The only module with a connection of `multiprocessing`; its `send` and `recv` pickle."""


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE.parent)), ast.parse(path.read_text(encoding="utf-8"))


def dotted(node: ast.AST) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([*([node.id] if isinstance(node, ast.Name) else []), *reversed(parts)])


def offences(tree: ast.Module) -> Iterator[str]:
    """What a module does of all that, line by line."""
    for node in ast.walk(tree):
        found = ""
        if isinstance(node, ast.Import):
            found = " ".join(a.name for a in node.names if a.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            names = {a.name for a in node.names}
            if (node.module or "").split(".")[0] in MODULES:
                found = f"from {node.module}"
            elif node.module == "multiprocessing" and names - {"connection"}:
                found = f"multiprocessing {sorted(names)}"
            elif names & {*ATTRIBUTES}:
                found = f"from {node.module} {sorted(names & {*ATTRIBUTES})}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found = node.func.id if node.func.id in CALLS else ""
        elif isinstance(node, ast.Attribute):
            found = node.attr if node.attr in ATTRIBUTES or dotted(node) in NAMES else ""
        elif isinstance(node, ast.keyword):
            is_false = isinstance(node.value, ast.Constant) and node.value.value is False
            dangerous = ("trust_remote_code", "allow_pickle", "shell", "weights_only")
            found = str(node.arg) if node.arg in dangerous and not is_false else ""
        if found:
            yield f"{getattr(node, 'lineno', 0)}: {found}"


def test_nothing_that_runs_bytes_is_named_in_the_code() -> None:
    found, count = {}, 0
    for name, tree in sources():
        count += 1
        if lines := list(offences(tree)):
            found[name] = [line.partition(": ")[2] for line in lines]
    assert count > 300
    assert found == {CONNECTIONS: ["multiprocessing ['Pipe']"]}


def test_a_connection_carries_bytes_alone() -> None:
    tree = ast.parse((PACKAGE.parent / CONNECTIONS).read_text(encoding="utf-8"))
    calls = [
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    assert {"send_bytes", "recv_bytes"} <= set(calls)
    assert not {"send", "recv"} & set(calls)


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import dill.source",
        "torch.load('x', weights_only=False)",
        "numpy.load(f)",
        "dist.broadcast_object_list([])",
        "from torch.distributed import all_gather_object",
        "socket.recv_pyobj()",
        "yaml.load(text)",
        "eval(text)",
        "exec(text)",
        "compile(text, '', 'exec')",
        "load(path, trust_remote_code=True)",
        "load(path, trust_remote_code=config.trusts)",
        "subprocess.run(line, shell=True)",
        "os.system(line)",
        "from multiprocessing import Queue",
    ],
)
def test_the_search_finds_what_it_looks_for(line: str) -> None:
    assert list(offences(ast.parse(line)))


@pytest.mark.parametrize("kind", [Hello, ToRank, ToSeat, FromRank], ids=str)
def test_control_frames_refuse_them(kind: Any, trap: Path) -> None:
    mark = encode_frame(Stop())[:4]
    for data in gadgets(trap):
        for frame in (data, mark + len(data).to_bytes(4, "little") + data):
            with pytest.raises(HeddleError):
                list(FrameDecoder(kind, MAX_FRAME_BYTES).feed(frame + bytes(64)))


def test_the_door_of_ranks_turns_them_away(trap: Path) -> None:
    listener = RankListener(None, "token")
    sent = [socket.socket(socket.AF_UNIX) for _ in range(6)]
    try:
        for each, data in zip(sent, gadgets(trap), strict=True):
            each.connect(listener.address)
            each.sendall(data)
        end = time.monotonic() + 0.5
        assert listener.admit_all(1, end, lambda: None, None) is None
        for each in sent:
            each.settimeout(60)
            with contextlib.suppress(ConnectionResetError):  # closed before it was read to its end
                assert each.recv(1) == b""
    finally:
        listener.close()
        for each in sent:
            each.close()


def test_helpers_end_at_them(trap: Path) -> None:
    helpers = TemplateHelpers(Limits(seconds=5.0))
    for data in gadgets(trap)[:2]:
        with pytest.raises(RanAway):
            helpers._own.ask(data)
    helpers.close()


def test_the_port_refuses_them(trap: Path, tmp_path: Path) -> None:
    with toy_server(tmp_path / "toy") as served:
        host, port = served.url.removeprefix("http://").split(":")
        for data in gadgets(trap):
            for kind in ("application/json", "application/octet-stream", "application/x-pickle"):
                answer = served.client.post(
                    "/v1/completions", content=data, headers={"content-type": kind}
                )
                assert answer.status_code in (400, 415), answer.text
            with socket.create_connection((host, int(port)), timeout=60) as raw:
                raw.sendall(data + b"\r\n\r\n")
                raw.shutdown(socket.SHUT_WR)
                assert raw.recv(64)[:12] in (b"HTTP/1.1 400", b"")
        assert served.complete(prompt="a", max_tokens=1)["usage"]["completion_tokens"] == 1
