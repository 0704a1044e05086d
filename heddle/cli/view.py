"""`heddle view`: one page, in one file, of a layout, a plan, a simulation, a trace or a server."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heddle.cli.flags import ENGINE_FLAGS, add_layout_flags, command_parser, layout_config
from heddle.cli.output import Output
from heddle.cli.parser import CommandParser
from heddle.cli.remote import is_url
from heddle.cli.summaries import SUMMARIES
from heddle.cli.values import heads, integer, size
from heddle.errors import ConfigError, HeddleError

SUMMARY = SUMMARIES["view"]
_SOCKET = "unix:"
_MAX_FILE_BYTES = 512 << 20
_TIMEOUT_SECONDS = 10.0
_MAX_TOKENS = 1 << 30
_DECODES = 8


def create_parser(environment: Mapping[str, str], output: Output) -> CommandParser:
    """What is shown, where it is written, and the layout where nothing else says it."""
    parser = command_parser("view", SUMMARY, environment, output)
    parser.add_argument(
        "source",
        metavar="SOURCE",
        nargs="?",
        help="a file of plan, simulate or show --json, or of --trace-file; the URL of a server's "
        "admin port, or unix:PATH of its admin socket; or a MODEL as of show",
    )
    parser.declare(
        "view",
        "-o",
        "--output",
        metavar="FILE",
        default="heddle.html",
        help="page to write, beside which nothing is needed",
    )
    parser.declare("view", "--api-key", metavar="KEY", help="admin key to show to the server")
    parser.declare(
        "view",
        "--seq-len",
        type=size,
        nargs="+",
        default=[64],
        metavar="TOKENS",
        help="lengths whose rows and tokens are drawn",
    )
    parser.declare(
        "view",
        "--heads",
        type=heads,
        metavar="QUERY/KV",
        help="head counts in place of a MODEL, as 32/8",
    )
    parser.declare(
        "view",
        "--device",
        default="CPU",
        metavar="NAME",
        help="sheet of the devices on which the step of a MODEL is priced, such as H200",
    )
    parser.declare(
        "view", "--devices", type=integer, metavar="N", help="how many there are; one per rank"
    )
    for flag in ENGINE_FLAGS:
        if flag.field in (
            "max_model_len",
            "kv_cache_memory_bytes",
            "max_num_batched_tokens",
            "max_num_seqs",
            "hf_overrides",
        ):
            flag.declare(parser, "view")
    add_layout_flags(parser)
    return parser


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Make the page and write it."""
    from heddle.view.page import render

    try:
        page = render(document_of(arguments)).encode()
    except ValueError as error:
        if isinstance(error, HeddleError):
            raise
        raise ConfigError(f"{arguments.source}: {error}; numbers of a page are finite") from error
    path = Path(arguments.output).expanduser()
    write_whole(path, page)
    if output.as_json:
        output.document({"file": str(path), "bytes": len(page)})
    else:
        output.text(f"{path}: {len(page):,} bytes; open it in a browser")
    return 0


def write_whole(path: Path, page: bytes) -> None:
    """Write a file, so that nobody sees a part of it.

    Raises:
        ConfigError: it cannot be written there.
    """
    try:
        path = path.resolve()  # a link stays, and leads to the page
        if path.is_dir():
            raise ConfigError(f"output={path} is a folder; name a file in it")
        if path.exists() and not path.is_file():
            raise ConfigError(
                f"output={path} is a device or a pipe, which a page would replace; name a file"
            )
        descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(page)
            Path(part).chmod(0o644)
            os.replace(part, path)
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise
    except ConfigError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"output={path} cannot be written: {error}; it is a file in a folder that is there"
        ) from error


def document_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the page shows."""
    source: str | None = arguments.source
    if (longest := max(arguments.seq_len)) > _MAX_TOKENS:
        raise ConfigError(
            f"seq_len={longest} is not legal; it is at most {_MAX_TOKENS:,} "
            f"(nearest: {_MAX_TOKENS})"
        )
    if source is not None and (is_url(source) or source.startswith(_SOCKET)):
        return _of_server(source, arguments)
    if source is not None and (found := _read_document(Path(source).expanduser())) is not None:
        from heddle.view.document import from_json

        return from_json(found, Path(source).name, arguments.seq_len)
    return _of_layout(arguments)


def _read_document(path: Path) -> Any:
    """The JSON of a file; None: it is no such file, but may be a model."""
    from heddle.view.timeline import read_events

    if not path.is_file() or path.suffix == ".gguf":
        return None
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(
                f"{path}: {path.stat().st_size:,} bytes are more than a page is made of, "
                f"{_MAX_FILE_BYTES:,}; trace fewer steps with --trace-steps"
            )
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if text.lstrip().startswith("["):
        try:
            return read_events(text)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: it is not JSON that can be read ({error})") from error
    is_model = isinstance(found, Mapping) and "architectures" in found
    return None if is_model else found


def _of_server(source: str, arguments: argparse.Namespace) -> dict[str, Any]:
    import httpx2

    from heddle.view.document import from_json

    socket = source.removeprefix(_SOCKET) if source.startswith(_SOCKET) else None
    key = arguments.api_key
    if socket is not None and not Path(socket).is_socket():
        raise ConfigError(
            f"{source}: there is no socket; a server makes the one of its --admin-uds"
        )
    transport = httpx2.HTTPTransport(uds=socket) if socket else httpx2.HTTPTransport()
    try:
        with httpx2.Client(transport=transport, timeout=_TIMEOUT_SECONDS) as client:
            answer = client.get(
                f"{'http://localhost' if socket else source.rstrip('/')}/server_info",
                headers={"Authorization": f"Bearer {key}"} if key else {},
            )
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        raise ConfigError(f"{source} cannot be reached: {type(error).__name__}: {error}") from error
    if answer.status_code != 200:
        raise ConfigError(
            f"{source} answers {answer.status_code} to /server_info; that is a route of the admin "
            "port (--admin-port, with --api-key) or socket (unix:PATH of --admin-uds). The live "
            "page of the public port is its / in a browser"
        )
    try:
        found = answer.json()
    except ValueError as error:
        raise ConfigError(f"{source} answers no JSON to /server_info") from error
    return from_json(found, source, arguments.seq_len)


def _of_layout(arguments: argparse.Namespace) -> dict[str, Any]:
    """A layout of the command line, with a priced step if its model is known."""
    from heddle.cli.plan import find_model
    from heddle.errors import TopologyError
    from heddle.layout.layout_object import degrees_text, layout_object
    from heddle.layout.rules import validate
    from heddle.view.document import of_layout, page_document

    name = arguments.source
    if name is not None and arguments.heads is not None:
        raise ConfigError("MODEL and --heads are both given; give one")
    model, path = find_model(name, arguments.hf_overrides) if name is not None else (None, "")
    parallel = layout_config(arguments)
    verdict = validate(
        parallel, block_size=arguments.block_size, model=model, heads=arguments.heads
    )
    if not verdict.legal:
        raise TopologyError(verdict.reasons, tuple(near.flags for near in verdict.nearest))
    layout = layout_object(parallel, block_size=arguments.block_size, executor=arguments.executor)
    shown = arguments.heads
    timeline, notes = None, list[str]()
    if model is not None:
        shown = (model.num_query_heads, model.num_kv_heads)
        timeline, notes = _priced(arguments, parallel, model, path)
    entry = of_layout(
        "as given",
        parallel,
        layout,
        heads=shown,
        seq_lens=arguments.seq_len,
        timeline=timeline,
    )
    words = degrees_text(layout)
    title = words if name is None else f"{name}, {words}"
    return page_document(title, "layout", [entry], notes=notes)


def _priced(
    arguments: argparse.Namespace, parallel: Any, model: Any, path: str
) -> tuple[dict[str, Any] | None, list[str]]:
    """A chunk of a prompt and a decode step, as the planner prices them; None: it does not fit."""
    from heddle.cli.plan import find_sheet, settings_of
    from heddle.planner.batches import Rows
    from heddle.planner.memory import plan_engine
    from heddle.planner.settings import DoesNotFit
    from heddle.view.model_step import describe

    sheet = find_sheet(arguments.device, None)
    arguments.devices = arguments.devices or parallel.world_size
    arguments.model = arguments.source
    try:
        engine = plan_engine(settings_of(arguments, sheet, model, path), parallel)
    except DoesNotFit as error:
        return None, [f"no step is priced on {sheet.name}: {error}"]
    length = min(max(arguments.seq_len), engine.room.longest_prompt)
    chunk = min(length, engine.chunk)
    steps = [
        (f"the last {chunk:,} rows of a prompt of {length:,}", [Rows(length - chunk, chunk)]),
        (f"{_DECODES} decodes behind {length:,} tokens", [Rows(length, 1)] * _DECODES),
    ]
    words = "measured" if sheet.is_measured else "not calibrated"
    return describe(engine, steps), [f"seconds are those of the sheet {sheet.name}, {words}"]
