"""Another user of the machine: what lies in a folder or listens there is not for him."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from heddle.errors import ConfigError
from heddle.server.config import ServerConfig
from heddle.server.listening import MAX_PATH_BYTES, bind, listeners
from tests.support.served import toy_server

STRANGER = """
import json, os, socket, sys
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
opened = []
for path in json.load(sys.stdin):
    try:
        with socket.socket(socket.AF_UNIX) as each:
            each.connect(path)
        opened.append(path)
    except OSError as error:
        print(path, error, file=sys.stderr)
print(json.dumps(opened))
"""


def opened_by_a_stranger(*paths: Path) -> list[str]:
    """Sockets that the user `nobody` may connect to."""
    words = json.dumps([str(path) for path in paths])
    done = subprocess.run(
        [sys.executable, "-c", STRANGER], input=words, capture_output=True, text=True, check=True
    )
    found: list[str] = json.loads(done.stdout)
    return found


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that everybody may enter, so that the modes of what lies in it count alone."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        Path(made).chmod(0o755)
        yield Path(made)


def test_sockets_are_of_their_owner_alone(folder: Path) -> None:
    public, admin, open_one = folder / "api", folder / "admin", folder / "open"
    before = os.umask(0)  # as careless as it can be
    try:
        with toy_server(folder / "toy", uds=str(public), admin_uds=str(admin)) as served:
            for path in (public, admin):
                assert stat.S_IMODE(path.stat().st_mode) == 0o600
            with bind(ServerConfig(uds=str(open_one))):
                open_one.chmod(0o666)
                # Who is root becomes somebody else; who is not is a friend, and the modes count.
                friends = [str(open_one)] if os.getuid() == 0 else None
                found = opened_by_a_stranger(public, admin, open_one)
                assert friends is None or found == friends
                assert str(open_one) in found
            transport = httpx2.HTTPTransport(uds=str(admin))
            with httpx2.Client(transport=transport, base_url="http://admin") as client:
                assert client.get("/server_info").status_code == 200
            assert served.serving.num_open == 0
    finally:
        os.umask(before)


def test_two_servers_side_by_side_do_not_meet(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with (
        toy_server(tmp_path / "one", uds=path, api_key=("one",)) as one,
        toy_server(tmp_path / "two", api_key=("two",)) as two,
    ):
        with pytest.raises(ConfigError, match="in use"), listeners(ServerConfig(uds=path)):
            pytest.fail("the socket of another server was taken")
        port = int(two.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match="in use"), listeners(ServerConfig(port=port)):
            pytest.fail("the port of another server was taken")
        one.client.close()
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=path), base_url="http://a") as client:
            own = client.get("/v1/models", headers={"authorization": "Bearer one"})
            other = client.get("/v1/models", headers={"authorization": "Bearer two"})
        assert (own.status_code, other.status_code) == (200, 401)
        other = two.client.get("/v1/models", headers={"authorization": "Bearer one"})
        assert other.status_code == 401


@pytest.mark.parametrize("excess", [0, 1, 100])
def test_a_path_that_no_socket_can_have_is_named_with_its_length(
    tmp_path: Path, excess: int
) -> None:
    room = MAX_PATH_BYTES + excess - len(str(tmp_path)) - 1
    path = tmp_path / ("é" * (room // 2) + "e" * (room % 2))
    length = len(os.fsencode(str(path)))
    assert length == MAX_PATH_BYTES + excess
    if not excess:
        bind(ServerConfig(uds=str(path))).close()
        return
    with pytest.raises(ConfigError, match=rf"has {length} bytes; at most {MAX_PATH_BYTES}"):
        bind(ServerConfig(uds=str(path)))
