"""Sockets that are bound before anything is loaded, and cleaned up afterwards."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil

from heddle.errors import ConfigError, quoted
from heddle.server.config import ServerConfig

BACKLOG = 2048
_ACCEPTS = 1 << 16
"""Flag of a listening socket in /proc/net/unix."""
LOOPBACK = "127.0.0.1"
MAX_PATH_BYTES = 107
"""Of a unix socket, on Linux."""


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


def listening_sockets() -> list[str]:
    """Every address on which this process and its descendants listen, of the system's own tables.

    Returns:
        `address:port (pid)` or `path (pid)`, in order, each once.
    """
    own = psutil.Process()
    found: set[str] = set()
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            for each in process.net_connections(kind="tcp"):
                if each.status == psutil.CONN_LISTEN:
                    host = f"[{each.laddr.ip}]" if ":" in each.laddr.ip else each.laddr.ip
                    found.add(f"{host}:{each.laddr.port} ({process.pid})")
            paths = {each.laddr for each in process.net_connections(kind="unix")}
            found |= {f"{path} ({process.pid})" for path in paths & _accepting_paths()}
    return sorted(found)


def _accepting_paths() -> set[str]:
    """Paths of unix sockets that somebody accepts connections at, by the kernel's table."""
    table = Path("/proc/net/unix")
    lines = table.read_text(errors="replace").splitlines()[1:] if table.exists() else []
    rows = [line.split(maxsplit=7) for line in lines]
    return {row[7] for row in rows if len(row) == 8 and int(row[3], 16) & _ACCEPTS}


def _bind(host: str, port: int, uds: str) -> socket.socket:
    if uds:
        _check_path(uds)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(socket.AF_UNIX if uds else family, socket.SOCK_STREAM)
    try:
        if uds:
            _listen_on_path(listener, uds)
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(BACKLOG)  # of two that got this far the second fails here
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"cannot listen on {uds or f'{host}:{port}'}: {error}") from error
    return listener


def _check_path(uds: str) -> None:
    """Refuse what the system could not bind, with the number that it keeps to itself."""
    length = len(os.fsencode(uds))
    if length > MAX_PATH_BYTES:
        raise ConfigError(
            f"the path of a unix socket has {length} bytes; at most {MAX_PATH_BYTES}: {quoted(uds)}"
        )


def _listen_on_path(listener: socket.socket, path: str) -> None:
    """Take a path. The folder is locked meanwhile: a socket that is bound and does not listen yet
    looks like one that was left behind.
    """
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        _remove_leftover(path)
        listener.bind(path)
        os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)
        listener.listen(BACKLOG)
    finally:
        os.close(folder)


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
