"""Settings of the server, beside those of its engine."""

from __future__ import annotations

import dataclasses
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from heddle.errors import ConfigError

GenerationDefaults = Literal["auto", "heddle"]
MetricsCompat = Literal["vllm", "gateway", "off"]
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
SelfCheck = Literal["auto", "on", "off"]

SECRETS = frozenset(("api_key",))
"""Settings whose values are shown nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How the model is offered; one field per flag."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    uds: str = ""
    """Path of a unix socket to listen on, instead of a port."""
    allow_insecure_bind: bool = False
    """Listen beyond this machine even without an API key."""
    api_key: tuple[str, ...] = ()
    """Keys that clients must show one of; none: everybody may ask."""
    api_key_file: str = ""
    """File with one key per line."""
    admin_api_key_file: str = ""
    """File with keys of the admin routes, one per line."""
    admin_port: int = 0
    """Port of the admin routes on loopback; 0: none."""
    admin_uds: str = ""
    """Path of a unix socket for the admin routes; they need no key there."""
    ssl_keyfile: str = ""
    """Private key of the certificate."""
    ssl_certfile: str = ""
    """Certificate, PEM."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose pages may call this server from a browser; `*` is any."""
    served_model_name: tuple[str, ...] = ()
    """Names of the model in the API; the first is told in answers; none: MODEL as it was given."""
    chat_template: str = ""
    """File with a chat template in place of the model's own."""
    default_chat_template_kwargs: str = ""
    """Variables of the chat template, as a JSON object; a request may set others."""
    trust_request_chat_template: bool = False
    """Take chat templates from requests; they run in a sandbox."""
    generation_config: GenerationDefaults = "auto"
    """Where defaults of sampling come from: the model's generation_config.json (auto), or the
    server's own."""
    tool_call_parser: str = ""
    """How tool calls stand in the model's text: hermes, llama3_json, deepseek_v3, ...; empty: as
    the model's template suggests."""
    enable_auto_tool_choice: bool = False
    """Let the model decide whether it calls a tool (`tool_choice` auto)."""
    reasoning_parser: str = ""
    """How reasoning stands in the model's text: deepseek_r1, qwen3, ...; empty: not told apart."""
    cache_per_key: bool = False
    """Share cached prefixes only among requests that show the same key."""
    hide_cached_tokens: bool = False
    """Report 0 cached tokens in usage."""
    max_logprobs: int = 20
    """Most alternatives per token that a request may ask for; at most 20."""
    max_prompt_logprobs_tokens: int = 32768
    """Longest prompt whose log-probabilities a request may ask for, in tokens."""
    request_timeout: float = 0.0
    """Seconds after which a request is ended; 0: never."""
    sse_keep_alive_interval: float = 15.0
    """Seconds of silence after which a stream gets a comment line; 0: never."""
    stream_stall_timeout: float = 120.0
    """Seconds after which a reader that takes nothing loses its stream."""
    max_connections: int = 1024
    """Connections at once; 16 more are kept for health, readiness and metrics."""
    shutdown_timeout: float = 30.0
    """Seconds that open requests get to finish when the server is told to stop."""
    self_check: SelfCheck = "auto"
    """Compare the layout with one rank on a fixed prompt before ready: auto does it where the
    layout has several ranks and memory has room for one more copy of the weights."""
    log_level: LogLevel = "info"
    """Least severe lines that are written."""
    log_format: LogFormat = "text"
    """Form of log lines."""
    enable_log_requests: bool = False
    """Write prompts to the log, cut to --max-log-len."""
    max_log_len: int = 0
    """Characters of a prompt in the log; 0: none."""
    disable_log_stats: bool = False
    """Write no periodic line."""
    disable_access_log_for_endpoints: tuple[str, ...] = ()
    """Paths whose requests are not logged."""
    metrics_compat: MetricsCompat = "vllm"
    """Second names of metrics: all that vLLM's dashboards read, those that the Gateway API
    inference extension reads, or none."""
    metrics_key: bool = False
    """Ask for an API key at /metrics too."""
    enable_tokenizer_info: bool = False
    """Offer GET /tokenizer_info."""

    def __post_init__(self) -> None:
        """Check what needs no machine.

        Raises:
            ConfigError: a value outside its range, or settings that exclude each other.
        """
        for name, most in (("port", 65535), ("admin_port", 65535), ("max_logprobs", 20)):
            _check_range(name, getattr(self, name), most)
        for name in (
            "request_timeout",
            "sse_keep_alive_interval",
            "stream_stall_timeout",
            "shutdown_timeout",
            "max_prompt_logprobs_tokens",
            "max_log_len",
        ):
            _check_range(name, getattr(self, name), 10**9)
        if self.max_connections < 1:
            raise ConfigError(
                f"max_connections={self.max_connections} is not legal; it is at least 1"
            )
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigError("--ssl-keyfile and --ssl-certfile belong together; give both")
        if self.admin_uds and self.admin_port:
            raise ConfigError("--admin-uds and --admin-port are both given; give one")
        if self.admin_port and not self.admin_api_key_file:
            raise ConfigError("--admin-port needs --admin-api-key-file; a unix socket needs none")
        if not (self.uds or self.is_loopback or self.has_keys or self.allow_insecure_bind):
            raise ConfigError(
                f"--host {self.host} is reachable from other machines and no key is set; give "
                "--api-key-file, or --allow-insecure-bind if everybody there may use it"
            )
        self._check_effects()

    def _check_effects(self) -> None:
        """Refuse what would be taken without effect.

        Raises:
            ConfigError: names the setting, and what it needs.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for is_idle, name, reason in (
            (self.metrics_key and not self.has_keys, "metrics_key", "no API key is set"),
            (self.cache_per_key and not self.has_keys, "cache_per_key", "no API key is set"),
            (
                self.admin_api_key_file and not self.admin_port,
                "admin_api_key_file",
                "--admin-port is not given, and a unix socket needs no key",
            ),
            (
                self.tool_call_parser and not self.enable_auto_tool_choice,
                "tool_call_parser",
                "--enable-auto-tool-choice is not given",
            ),
            (
                self.max_log_len and not self.enable_log_requests,
                "max_log_len",
                "--enable-log-requests is not given",
            ),
            (self.uds and self.host != defaults["host"], "host", "--uds is given"),
            (self.uds and self.port != defaults["port"], "port", "--uds is given"),
        ):
            if is_idle:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} has no effect: {reason}; leave it out, or change that")

    @property
    def is_loopback(self) -> bool:
        """Only this machine can connect."""
        return is_loopback(self.host)

    @property
    def has_keys(self) -> bool:
        """Clients must show a key."""
        return bool(self.api_key or self.api_key_file)

    @property
    def has_admin(self) -> bool:
        """There are admin routes."""
        return bool(self.admin_uds or self.admin_port)


def is_loopback(host: str) -> bool:
    """Whether a name or an address is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_keys(inline: tuple[str, ...], path: str) -> tuple[str, ...]:
    """All keys of a setting and its file.

    Raises:
        ConfigError: the file cannot be read or holds none, or a key is empty.
    """
    keys = list(inline)
    if path:
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"keys in {path}: {error}") from error
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise ConfigError(f"{path} holds no key; write one per line")
        keys += found
    if not all(keys):
        raise ConfigError("an API key is empty; a key has at least one character")
    return tuple(keys)


def _check_range(name: str, value: float, most: float) -> None:
    if not 0 <= value <= most:
        nearest = min(max(value, 0), most)
        raise ConfigError(
            f"{name}={value} is not legal; it is in 0..{most:g} (nearest: {nearest:g})"
        )
