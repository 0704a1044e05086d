"""Settings that are refused before anything is opened, and keys."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from heddle.errors import ConfigError
from heddle.server.config import ServerConfig, read_keys


@pytest.mark.parametrize("host", ["127.0.0.1", "127.5.6.7", "::1", "localhost"])
def test_this_machine_alone_may_ask_without_a_key(host: str) -> None:
    assert ServerConfig(host=host).is_loopback


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.1.2.3", "myhost", "127.0.0.1.example", "localhost.example", ""]
)
def test_other_machines_need_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="reachable from other machines and no key"):
        ServerConfig(host=host)
    for allowed in ({"api_key": ("k",)}, {"api_key_file": "f"}, {"allow_insecure_bind": True}):
        settings: dict[str, Any] = {"host": host, **allowed}
        assert not ServerConfig(**settings).is_loopback


def test_the_keys_of_admins_are_no_keys_of_clients() -> None:
    with pytest.raises(ConfigError, match="no key is set"):
        ServerConfig(host="0.0.0.0", admin_api_key_file="f")


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("port", 65535),
        ("admin_port", 65535),
        ("max_logprobs", 20),
        ("request_timeout", 10**9),
        ("sse_keep_alive_interval", 10**9),
        ("stream_stall_timeout", 10**9),
        ("shutdown_timeout", 10**9),
        ("max_prompt_logprobs_tokens", 10**9),
        ("max_log_len", 10**9),
    ],
)
def test_numbers_have_their_ranges(name: str, most: int) -> None:
    needed: dict[str, Any] = {"admin_port": {"admin_api_key_file": "f"}}
    needed["max_log_len"] = {"enable_log_requests": True}

    def settings(value: int) -> ServerConfig:
        found = {name: value, **needed.get(name, {})}
        if name == "admin_port" and value == 0:
            del found["admin_api_key_file"]  # no port, and so no key of it
        return ServerConfig(**found)

    for value in (0, most):
        assert getattr(settings(value), name) == value
    for value, nearest in ((-1, 0), (most + 1, most)):
        with pytest.raises(ConfigError, match=rf"^{name}={value} is not legal") as caught:
            settings(value)
        word = str(caught.value).rpartition("nearest: ")[2].rstrip(")")
        assert float(word) == nearest
        settings(int(float(word)))


@pytest.mark.parametrize("name", ["request_timeout", "shutdown_timeout"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_times_are_finite(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        ServerConfig(**{name: value})


@pytest.mark.parametrize("count", [0, -1])
def test_somebody_must_be_able_to_connect(count: int) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        ServerConfig(max_connections=count)


def test_a_certificate_has_a_key() -> None:
    for half in ("ssl_keyfile", "ssl_certfile"):
        with pytest.raises(ConfigError, match="belong together"):
            ServerConfig(**{half: "x"})
    assert ServerConfig(ssl_keyfile="x", ssl_certfile="y").ssl_certfile == "y"


def test_admin_routes_are_there_where_they_have_a_place() -> None:
    assert not ServerConfig().has_admin
    assert ServerConfig(admin_port=1, admin_api_key_file="f").has_admin
    assert ServerConfig(admin_uds="/run/a").has_admin


@pytest.mark.parametrize(
    ("idle", "remedy"),
    [
        ({"metrics_key": True}, {"api_key": ("k",)}),
        ({"metrics_key": True}, {"api_key_file": "f"}),
        ({"admin_api_key_file": "f"}, {"admin_port": 7}),
        ({"tool_call_parser": "hermes"}, {"enable_auto_tool_choice": True}),
        ({"max_log_len": 7}, {"enable_log_requests": True}),
        ({"host": "::1", "uds": "/run/s"}, {"uds": ""}),
        ({"port": 7, "uds": "/run/s"}, {"uds": ""}),
    ],
)
def test_a_setting_without_effect_is_refused(idle: dict[str, Any], remedy: dict[str, Any]) -> None:
    name = next(iter(idle))
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')} has no effect: "):
        ServerConfig(**idle)
    assert getattr(ServerConfig(**{**idle, **remedy}), name) == idle[name]


def test_the_key_of_a_socket_of_admins_has_no_effect() -> None:
    with pytest.raises(ConfigError, match="a unix socket needs no key"):
        ServerConfig(admin_api_key_file="f", admin_uds="/run/a")


def test_an_admin_port_is_locked() -> None:
    with pytest.raises(ConfigError, match="needs --admin-api-key-file"):
        ServerConfig(admin_port=1)
    with pytest.raises(ConfigError, match="give one"):
        ServerConfig(admin_port=1, admin_api_key_file="f", admin_uds="/run/a")


def test_keys_come_from_the_setting_and_its_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one\n\n  two words \r\nthr\u00e9e\n", encoding="utf-8")
    assert read_keys(("zero",), str(path)) == ("zero", "one", "two words", "thr\u00e9e")
    assert read_keys(("zero",), "") == ("zero",)
    assert read_keys((), "") == ()


@pytest.mark.parametrize("data", [b"", b"\n \n", b"\xff\xfe"])
def test_a_file_without_a_key_opens_no_door(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "keys"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="keys"):
        read_keys(("zero",), str(path))
    with pytest.raises(ConfigError, match="keys in"):
        read_keys((), str(tmp_path / "none"))


@pytest.mark.parametrize("keys", [("",), ("a", "")])
def test_an_empty_key_would_open_to_everybody(keys: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        read_keys(keys, "")
