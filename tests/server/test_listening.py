"""Sockets are ours before anything is loaded, and nobody's afterwards."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from heddle.errors import ConfigError
from heddle.server.config import ServerConfig
from heddle.server.listening import bind, bind_admin, listeners, listening_sockets, url_of


def connect(listener: socket.socket) -> None:
    with socket.socket(listener.family, socket.SOCK_STREAM) as client:
        client.connect(listener.getsockname())


def test_a_free_port_is_taken_and_told() -> None:
    settings = ServerConfig(port=0)
    with listeners(settings) as (public, admin):
        assert admin is None
        port = public.getsockname()[1]
        assert port > 0
        assert url_of(settings, public) == f"http://127.0.0.1:{port}"
        connect(public)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port))
    with listeners(ServerConfig(port=port)) as (again, _):
        assert again.getsockname()[1] == port


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}"):
            bind(ServerConfig(port=port))


def test_an_address_that_is_not_ours_is_refused() -> None:
    settings = ServerConfig(host="192.0.2.1", port=0, allow_insecure_bind=True)
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0"):
        bind(settings)


def test_a_secure_server_says_so() -> None:
    settings = ServerConfig(port=0, ssl_keyfile="k", ssl_certfile="c")
    with listeners(settings) as (public, _):
        assert url_of(settings, public).startswith("https://127.0.0.1:")


def test_long_addresses_stand_in_brackets() -> None:
    settings = ServerConfig(host="::1", port=0)
    with listeners(ServerConfig(port=0)) as (public, _):
        port = public.getsockname()[1]
        assert url_of(settings, public) == f"http://[::1]:{port}"


def test_every_socket_of_this_process_and_its_children_is_listed(tmp_path: Path) -> None:
    code = (
        "import socket, sys\n"
        "s = socket.create_server(('127.0.0.1', 0))\n"
        "print(s.getsockname()[1], flush=True)\n"
        "sys.stdin.read()"
    )
    before = set(listening_sockets())
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with (
        child,
        listeners(ServerConfig(port=0)) as (public, _),
        listeners(ServerConfig(uds=str(tmp_path / "s"))),
        socket.socket(socket.AF_UNIX) as silent,
    ):
        silent.bind(str(tmp_path / "silent"))  # nobody listens there
        assert child.stdout is not None
        port = child.stdout.readline().strip()
        own = public.getsockname()[1]
        found = set(listening_sockets())
        child.communicate("")
    assert found - before == {
        f"127.0.0.1:{own} ({os.getpid()})",
        f"127.0.0.1:{port} ({child.pid})",
        f"{tmp_path / 's'} ({os.getpid()})",
    }


def test_a_unix_socket_is_its_owners_and_goes_away(tmp_path: Path) -> None:
    path = tmp_path / "s"
    settings = ServerConfig(uds=str(path))
    with listeners(settings) as (public, _):
        assert path.stat().st_mode & 0o777 == 0o600
        assert url_of(settings, public) == f"unix:{path}"
        connect(public)
    assert not path.exists()


def test_a_socket_that_was_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    assert path.exists()
    with listeners(ServerConfig(uds=str(path))) as (public, _):
        connect(public)


def test_a_file_in_the_place_of_a_socket_stays(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("dear")
    with (
        pytest.raises(ConfigError, match="cannot listen on"),
        listeners(ServerConfig(uds=str(path))),
    ):
        pass
    assert path.read_text() == "dear"


def test_the_admin_socket_is_on_this_machine_whatever_the_host(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    settings = ServerConfig(
        host="0.0.0.0", port=0, api_key=("k",), admin_port=port, admin_api_key_file="f"
    )
    with listeners(settings) as (public, admin):
        assert public.getsockname()[0] == "0.0.0.0"
        assert admin is not None
        assert admin.getsockname() == ("127.0.0.1", port)
    path = tmp_path / "a"
    admin = bind_admin(ServerConfig(port=0, admin_uds=str(path)))
    assert admin is not None
    with admin:
        assert path.stat().st_mode & 0o777 == 0o600


def test_what_is_bound_first_is_closed_when_the_second_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    settings = ServerConfig(uds=str(tmp_path / "s"), admin_uds=str(tmp_path / "taken"))
    with pytest.raises(ConfigError, match="taken"), listeners(settings):
        pass
    assert not (tmp_path / "s").exists()
