"""Sockets that are bound before anything is loaded, and cleaned up afterwards."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator

from heddle.errors import ConfigError
from heddle.server.config import ServerConfig

BACKLOG = 2048
LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def listeners(settings: ServerConfig) -> Iterator[tuple[socket.socket, socket.socket | None]]:
    """The public socket and the admin one, closed and removed at the end.

    Raises:
        ConfigError: an address is in use or not ours.
    """
    with contextlib.ExitStack() as stack:
        public = bind(settings)
        stack.callback(_close, public, *_mark(settings.uds))
        admin = bind_admin(settings)
        if admin is not None:
            stack.callback(_close, admin, *_mark(settings.admin_uds))
        yield public, admin


def bind(settings: ServerConfig) -> socket.socket:
    """The public socket.

    Raises:
        ConfigError: the address is in use or not ours.
    """
    return _bind(settings.host, settings.port, settings.uds)


def bind_admin(settings: ServerConfig) -> socket.socket | None:
    """The socket of the admin routes, on loopback; None: there are none.

    Raises:
        ConfigError: the address is in use or not ours.
    """
    if not settings.has_admin:
        return None
    return _bind(LOOPBACK, settings.admin_port, settings.admin_uds)


def url_of(settings: ServerConfig, listener: socket.socket) -> str:
    """Where clients find the server."""
    if settings.uds:
        return f"unix:{settings.uds}"
    scheme = "https" if settings.ssl_certfile else "http"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


def _bind(host: str, port: int, uds: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(socket.AF_UNIX if uds else family, socket.SOCK_STREAM)
    try:
        if uds:
            _remove_leftover(uds)
            listener.bind(uds)
            os.chmod(uds, stat.S_IRUSR | stat.S_IWUSR)
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"cannot listen on {uds or f'{host}:{port}'}: {error}") from error
    return listener


def _mark(uds: str) -> tuple[str, int]:
    """A path and the inode that is ours there; empty and 0 for a port."""
    return (uds, os.stat(uds).st_ino) if uds else ("", 0)


def _close(listener: socket.socket, uds: str, inode: int) -> None:
    """Close, and remove the socket that is still ours."""
    listener.close()
    with contextlib.suppress(FileNotFoundError):
        if uds and os.stat(uds).st_ino == inode:
            os.unlink(uds)


def _remove_leftover(path: str) -> None:
    """Remove a socket that nobody listens on; anything else stays and makes `bind` fail."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
