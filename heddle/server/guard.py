"""What is looked at before any handler: size of the headers, host, origin, key, request id.

Pure ASGI, around the whole application, so that no route can be reached past it.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from heddle.errors import counted
from heddle.server.errors import ApiError
from heddle.server.sse import send_error

MAX_HEADER_BYTES = 32 << 10
MAX_HEADER_FIELDS = 100
HEALTH_PATH = "/health"
PAGE_PATH = "/"
_HEALTH_PATHS = frozenset((HEALTH_PATH, "/ready", "/ping"))
OPEN_PATHS = _HEALTH_PATHS | {PAGE_PATH}
"""Need no key, but for a deep look, and for any other use of the page's path than to read it."""
PROBES = _HEALTH_PATHS | {"/metrics"}
"""Asked for every few seconds: their lines are for debugging."""
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
MAX_LOGGED_PATH = 100
EXPOSED_HEADERS = "x-request-id, retry-after, retry-after-ms, x-should-retry"
"""That pages of allowed origins may read."""
log = logging.getLogger("heddle.server")
TOLD_FAULT = "told_fault"
"""In the state of a request: the fault that its client and the log were told of."""
access_log = logging.getLogger("heddle.access")

Observe = Callable[[str, str, int, float], None]
"""(method, route, status, seconds) of an answer."""
OnRefusal = Callable[[str, ApiError], None]
"""(request id, error) that a client gets."""


class KeyRing:
    """Keys that open the door; kept as digests and compared in constant time."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def opens(self, authorization: str) -> bool:
        """Whether this header shows one of the keys; takes as long for every one.

        Args:
            authorization: its bytes, each as one character: that is how headers arrive.
        """
        scheme, _, key = authorization.partition(" ")
        shown = _digest(key.strip().encode("latin-1", "replace"))
        matches = [hmac.compare_digest(shown, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)

    def name(self, authorization: str) -> str:
        """What a client that was let in is told apart by: no key, and none is found from it."""
        key = authorization.partition(" ")[2].strip().encode("latin-1", "replace")
        return hashlib.sha256(b"client " + _digest(key)).hexdigest()[:32] if self._digests else ""


class Guard:
    """ASGI around the application."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: KeyRing,
        local_only: bool,
        origins: Sequence[str],
        open_paths: frozenset[str] = OPEN_PATHS,
        quiet_paths: frozenset[str] = frozenset(),
        max_requests: int = 1024,
        observe: Observe | None = None,
        on_refusal: OnRefusal | None = None,
    ) -> None:
        """Wrap.

        Args:
            app: the application.
            keys: of clients; none: everybody may ask.
            local_only: the server listens on loopback, so a foreign `Host` is a forged name.
            origins: whose pages may call; `*` is any.
            open_paths: paths that need no key.
            quiet_paths: paths without a line in the access log.
            max_requests: at once; probes are answered beyond it.
            observe: told of every answer.
            on_refusal: told of what is refused here; the application tells of its own refusals.
        """
        self._app = app
        self._keys = keys
        self._local_only = local_only
        self._origins = frozenset(origins)
        self._open_paths = open_paths
        self._quiet_paths = quiet_paths
        self._max_requests = max_requests
        self.num_requests = 0
        """Requests that are being answered now."""
        self._observe = observe
        self._on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Look at a request, and pass it on or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get("x-request-id", ""))
        scope.setdefault("state", {})["request_id"] = request_id
        started = time.monotonic()
        status, is_whole = 0, False

        async def send_on(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                self._add_cors(headers, scope)
            await send(message)
            is_whole = message["type"] == "http.response.body" and not message.get("more_body")

        self.num_requests += 1
        try:
            refusal = self._refusal(scope)
            if refusal is not None:
                if self._on_refusal is not None:
                    self._on_refusal(request_id, refusal)
                await send_error(send_on, refusal)
            elif _is_preflight(scope):
                await _answer_preflight(send_on)
            else:
                shown = Headers(scope=scope).get("authorization", "")
                scope["state"]["client"] = self._keys.name(shown)
                await self._app(scope, receive, send_on)
        except Exception as error:
            if not is_whole:
                raise  # half an answer: the connection is cut
            if scope["state"].get(TOLD_FAULT) is not error:
                text = "request %s: a fault of heddle after its whole answer was sent"
                log.error(text, request_id, exc_info=error)
        finally:
            self.num_requests -= 1
            self._note(scope, status, time.monotonic() - started, request_id)

    def _refusal(self, scope: Scope) -> ApiError | None:
        is_probe = scope["path"] in PROBES and not is_deep(scope)
        if self.num_requests > self._max_requests and not is_probe:
            return ApiError(
                f"{counted(self._max_requests, 'request')} may be open at once; see "
                "--max-connections",
                "engine_unavailable",
            )
        raw = scope["headers"]
        if len(raw) > MAX_HEADER_FIELDS or sum(len(k) + len(v) for k, v in raw) > MAX_HEADER_BYTES:
            return ApiError(
                f"the headers are larger than {MAX_HEADER_BYTES} bytes or {MAX_HEADER_FIELDS} "
                "fields",
                "headers_too_large",
            )
        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy in front may have read the other one, and sees another next request.
            return ApiError(
                "Content-Length and Transfer-Encoding are both given; give one",
                headers={"Connection": "close"},
            )
        if self._local_only and not _is_local(headers.get("host", "localhost")):
            return ApiError("the Host header names another machine", "forbidden")
        origin = headers.get("origin")
        if origin is not None and not self._allows(origin, headers.get("host", "")):
            return ApiError("pages of this origin may not call; see --allowed-origins", "forbidden")
        is_read = scope["path"] != PAGE_PATH or scope["method"] in ("GET", "HEAD")
        is_open = scope["path"] in self._open_paths and is_read and not is_deep(scope)
        needs_key = not is_open and not _is_preflight(scope)
        if self._keys and needs_key and not self._keys.opens(headers.get("authorization", "")):
            return ApiError("no API key, or a wrong one", "invalid_api_key")
        return None

    def _allows(self, origin: str, host: str) -> bool:
        try:
            own = urlsplit(origin).netloc
        except ValueError:  # no address at all, as of a bracket that nobody closes
            return False
        return own == host or bool(self._origins & {"*", origin})

    def _add_cors(self, headers: MutableHeaders, scope: Scope) -> None:
        origin = Headers(scope=scope).get("origin")
        if origin is not None and self._origins & {"*", origin}:
            headers["access-control-allow-origin"] = origin
            headers["vary"] = "origin"
            asked = Headers(scope=scope).get("access-control-request-headers", "")
            headers["access-control-allow-headers"] = asked or "authorization, content-type"
            headers["access-control-allow-methods"] = "GET, POST"
            headers["access-control-expose-headers"] = EXPOSED_HEADERS

    def _note(self, scope: Scope, status: int, seconds: float, request_id: str) -> None:
        route = scope.get("route")
        path = getattr(route, "path", "other")
        if self._observe is not None:
            self._observe(scope["method"], path, status, seconds)
        if path not in self._quiet_paths:
            access_log.log(
                logging.DEBUG if path in PROBES else logging.INFO,
                "%s %s %d %.3f s %s",
                scope["method"],
                path if route is not None else ascii(scope["path"])[:MAX_LOGGED_PATH],
                status,
                seconds,
                request_id,
            )


def is_deep(scope: Scope) -> bool:
    """A request asks every rank for a sign of life; such a one needs a key."""
    asked = QueryParams(scope.get("query_string", b"")).get("deep", "0")
    return scope["path"] == HEALTH_PATH and asked.lower() not in ("", "0", "false")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _request_id(given: str) -> str:
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _is_local(host: str) -> bool:
    """Names of this machine, with or without a port."""
    name = host.lower()
    bare = name.rpartition(":")[0] if re.fullmatch(r"(\[.*\]|[^:]*):\d*", name) else name
    try:
        return ipaddress.ip_address(bare.strip("[]")).is_loopback
    except ValueError:
        return bare == "localhost"


def _is_preflight(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    return scope["method"] == "OPTIONS" and "access-control-request-method" in headers


async def _answer_preflight(send: Send) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})
