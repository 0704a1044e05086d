"""What a page shows, as one document; each source gives what it knows of it.

    {title, source, layouts[{name, layout, places, timeline}], plan, simulation, server, notes[]}

`layout` is the document of `heddle show --json`; `places` say by rank where it is; `plan` and
`simulation` are those of their commands, as they are; `timeline` is that of
`heddle.view.timeline`. What a source does not know is null.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from heddle.config import ParallelConfig
from heddle.errors import ConfigError
from heddle.layout.rules import validate
from heddle.planner import document as planner_document
from heddle.view import ownership
from heddle.view.timeline import from_trace, header_of

SOURCES = (
    "a document of heddle show, plan or simulate --json, a file that --trace-file wrote, or the "
    "answer of /server_info"
)
MAX_RANKS = 8192
"""That a mesh is drawn of."""


def of_layout(
    name: str,
    parallel: ParallelConfig,
    layout: Mapping[str, Any],
    *,
    heads: tuple[int, int] | None = None,
    seq_lens: Sequence[int] = (64,),
    timeline: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One entry of `layouts`.

    Args:
        name: for the choice between layouts.
        parallel: legal degrees.
        layout: the same as the object that all commands print.
        heads: (query, kv) head counts; None: not known.
        seq_lens: lengths whose ownership is drawn.
        timeline: of a step; None: not known.
    Raises:
        ConfigError: it has more ranks than a page shows.
    """
    if parallel.world_size > MAX_RANKS:
        raise ConfigError(
            f"world_size={parallel.world_size:,} is more than a page shows; it is at most "
            f"{MAX_RANKS:,}; fewer replicas (-dp) show the same groups"
        )
    described = ownership.describe(parallel, layout=layout, heads=heads, seq_lens=seq_lens)
    return {
        "name": name,
        "layout": described,
        "places": ownership.places(parallel),
        "timeline": timeline,
    }


def page_document(
    title: str,
    source: str,
    layouts: Sequence[Mapping[str, Any]],
    *,
    plan: Mapping[str, Any] | None = None,
    simulation: Mapping[str, Any] | None = None,
    server: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """The whole document; arguments as its fields."""
    return {
        "title": title,
        "source": source,
        "layouts": list(layouts),
        "plan": plan,
        "simulation": simulation,
        "server": server,
        "notes": list(notes),
    }


def from_json(found: Any, name: str, seq_lens: Sequence[int]) -> dict[str, Any]:
    """The page of a document that another command wrote.

    Args:
        found: as read.
        name: of the file or server, for the title.
        seq_lens: lengths whose ownership is drawn where the document has none.
    Raises:
        ConfigError: it is none that a page can be made of.
    """
    try:
        if isinstance(found, list):
            return _of_trace(found, name, seq_lens)
        if isinstance(found, Mapping):
            for is_one, read in _READERS:
                if is_one(found):
                    return read(found, name, seq_lens)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(
            f"{name}: it lacks what its kind must have ({type(error).__name__}: {error}); "
            "heddle view reads documents of this version"
        ) from error
    raise ConfigError(f"{name}: nothing that a page can be made of; heddle view reads {SOURCES}")


def layout_of_engine(parallel: ParallelConfig, *, block_size: int, executor: str) -> dict[str, Any]:
    """The `layout` object of an engine that runs.

    Args:
        parallel: legal degrees.
        block_size: tokens of a page on one rank.
        executor: where its ranks live.
    """
    return {**planner_document.layout(parallel, block_size), "executor": executor}


def parallel_of(layout: Mapping[str, Any]) -> ParallelConfig:
    """The degrees of a `layout` object.

    Raises:
        ConfigError: they are not legal.
    """
    parallel = ParallelConfig(
        tensor_parallel_size=layout["tp"],
        prefill_context_parallel_size=layout["pcp"],
        decode_context_parallel_size=layout["dcp"],
        pipeline_parallel_size=layout["pp"],
        data_parallel_size=layout["dp"],
        kv_interleave_size=layout["interleave"],
        enable_expert_parallel=bool(layout.get("expert_parallel", False)),
    )
    verdict = validate(parallel, block_size=layout["block_size"])
    if not verdict.legal:
        raise ConfigError(f"the layout is not legal: {verdict.reasons[0]}")
    return parallel


def _of_trace(
    events: Sequence[Mapping[str, Any]], name: str, seq_lens: Sequence[int]
) -> dict[str, Any]:
    timeline, header = from_trace(events), header_of(events)
    if header is None:
        raise ConfigError("it does not say of which engine it is, as --trace-file does")
    layout = header["layout"]
    lens = _lens_of(timeline) or seq_lens
    entry = of_layout("as traced", parallel_of(layout), layout, seq_lens=lens, timeline=timeline)
    shown, all_steps = len(timeline["steps"]), timeline["num_steps"]
    notes = [] if shown == all_steps else [f"{shown} of {all_steps} traced steps are shown"]
    return page_document(name, "trace", [entry], notes=notes)


def _lens_of(timeline: Mapping[str, Any]) -> list[int]:
    """The longest prompts that a trace begins."""
    found = {
        int(request["rows"])
        for step in timeline["steps"]
        for request in step["requests"]
        if request["rows"] > 1
    }
    return sorted(found, reverse=True)[:4]


def _of_plan(found: Mapping[str, Any], name: str, seq_lens: Sequence[int]) -> dict[str, Any]:
    model = found["model"]
    heads = None if model["is_latent"] else (model["query_heads"], model["kv_heads"])
    lens = [*seq_lens, found["workload"]["prompt_len"]]
    layouts = []
    for entry in found["recommended"]:
        parallel = parallel_of(entry["layout"])
        layouts.append(
            of_layout(
                f"for {', '.join(entry['roles'])}",
                parallel,
                entry["layout"],
                heads=heads or (model["query_heads"], 1),
                seq_lens=lens,
            )
        )
    title = f"{model['name']} on {found['device']['devices']} x {found['device']['name']}"
    return page_document(title, "plan", layouts, plan=found, notes=[f"from {name}"])


def _of_simulation(found: Mapping[str, Any], name: str, seq_lens: Sequence[int]) -> dict[str, Any]:
    layout = found["layout"]
    entry = of_layout("as simulated", parallel_of(layout), layout, seq_lens=seq_lens)
    title = f"{found['model']['name']} on {found['device']['name']}, simulated"
    return page_document(title, "simulation", [entry], simulation=found, notes=[f"from {name}"])


def _of_server(found: Mapping[str, Any], name: str, seq_lens: Sequence[int]) -> dict[str, Any]:
    if "engine" not in found:
        raise ConfigError(f"the server is {found['phase']}; ask again when it is ready")
    engine = found["engine"]
    parallel = ParallelConfig(**engine["parallel"])
    layout = layout_of_engine(
        parallel, block_size=engine["cache"]["block_size"], executor=engine["executor"]
    )
    entry = of_layout("as it runs", parallel, layout, seq_lens=seq_lens)
    title = f"{', '.join(found['models'])} at {name}"
    return page_document(title, "server", [entry], server=found)


def _of_show(found: Mapping[str, Any], name: str, _: Sequence[int]) -> dict[str, Any]:
    if not found["legal"]:
        raise ConfigError(f"a refused layout has no page: {'; '.join(found['reasons'])}")
    entry = {
        "name": "as shown",
        "layout": found,
        "places": ownership.places(parallel_of(found["layout"])),
        "timeline": None,
    }
    return page_document(name, "layout", [entry], notes=found.get("step", {}).get("reasons", ()))


Reader = Callable[[Mapping[str, Any], str, Sequence[int]], dict[str, Any]]
_READERS: tuple[tuple[Callable[[Mapping[str, Any]], bool], Reader], ...] = (
    (lambda found: str(found.get("schema", "")).startswith("heddle-simulate/"), _of_simulation),
    (lambda found: "candidates" in found and "recommended" in found, _of_plan),
    (lambda found: ("legal" in found and "groups" in found) or "reasons" in found, _of_show),
    (lambda found: "phase" in found and "server" in found, _of_server),
    (lambda found: "traceEvents" in found, lambda f, n, s: _of_trace(f["traceEvents"], n, s)),
)
