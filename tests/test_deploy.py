"""Deployment files: their commands are ours, their paths are the server's, their shape is known."""

from __future__ import annotations

import configparser
import io
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from heddle.cli.flags import engine_arguments
from heddle.cli.output import Output
from heddle.cli.serve import create_parser
from heddle.cli.server_flags import server_config
from heddle.engine.args import engine_config
from heddle.server.app import create_app
from heddle.server.config import ServerConfig
from heddle.server.metrics import Metrics
from heddle.server.serving import Serving

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
REQUIRED = json.loads((ROOT / "tests/data/deploy/required.json").read_text(encoding="utf-8"))
YAML_FILES = sorted(path.name for path in DEPLOY.glob("*.yaml"))
DOCKERFILES = ("Dockerfile", "Dockerfile.cuda")
SCRIPT = "heddle.sbatch"


def read(name: str) -> str:
    return (DEPLOY / name).read_text(encoding="utf-8")


def documents(name: str) -> list[Any]:
    """A file as data: documents of YAML, or the sections of a unit."""
    if name.endswith(".service"):
        parser = configparser.ConfigParser(interpolation=None)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string(read(name))
        return [{section: dict(parser[section]) for section in parser.sections()}]
    return list(yaml.safe_load_all(read(name)))


def nodes(value: Any) -> Iterator[dict[str, Any]]:
    """All mappings of a document."""
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from nodes(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from nodes(inner)


def commands(name: str) -> list[list[str]]:
    """Command lines of a file, launchers and all."""
    if name in DOCKERFILES:
        entry, default = (
            json.loads(found)
            for found in re.findall(r"^(?:ENTRYPOINT|CMD) (\[.*\])$", read(name), re.MULTILINE)
        )
        return [entry + default]
    if name.endswith(".service"):
        return [shlex.split(documents(name)[0]["Service"]["ExecStart"])]
    if name == SCRIPT:
        (call,) = re.findall(r"exec (torchrun .*?)'", read(name), re.DOTALL)
        return [shlex.split(call.replace("\\\n", ""))]
    found = [n for n in nodes(documents(name)) if "image" in n]
    return [[*each.get("command", ()), *each.get("args", ())] for each in found]


def words_of(command: list[str]) -> list[str]:
    """What `heddle serve` is given."""
    names = [Path(word).name for word in command]
    at = names.index("serve")
    assert at == 0 or names[at - 1] == "heddle"
    return command[at + 1 :]


FILES = (*DOCKERFILES, "heddle.service", SCRIPT, *YAML_FILES)


def test_every_file_is_looked_at() -> None:
    assert {path.name for path in DEPLOY.iterdir()} == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_commands_are_taken_by_our_own_parser(name: str) -> None:
    found = commands(name)
    assert found
    for command in found:
        log = io.StringIO()
        arguments = create_parser({}, Output(stream=io.StringIO(), log=log)).parse(
            words_of(command)
        )
        settings = server_config(arguments)
        config = engine_config(arguments.place, **engine_arguments(arguments))
        assert log.getvalue() == ""
        assert settings.port == 8000
        assert settings.has_keys or settings.allow_insecure_bind
        if "torchrun" in command:
            flags = dict(pairwise(command))
            flags |= dict(word.split("=", 1) for word in command if "=" in word)
            assert config.parallel.world_size == 2 * int(flags["--nproc-per-node"])
            assert config.startup_timeout_seconds == 600


def value_at(document: Any, path: str) -> Any:
    """What stands at a dotted path; a key may itself hold dots."""
    if path == "":
        return document
    parts = path.split(".")
    for size in range(1, len(parts) + 1):
        key: Any = ".".join(parts[:size])
        if isinstance(document, list):
            key = int(key)
        elif key not in document:
            continue
        return value_at(document[key], ".".join(parts[size:]))
    raise KeyError(path)


@pytest.mark.parametrize("name", sorted(REQUIRED))
def test_files_have_the_shape_that_is_asked_for(name: str) -> None:
    found = documents(name)
    for path, expected in REQUIRED[name].items():
        root: Any = found[0] if name.endswith(".service") else found
        assert value_at(root, path) == expected, path


def test_what_is_asked_for_can_be_missed() -> None:
    with pytest.raises(KeyError):
        value_at({"a": {"b": 1}}, "a.c")


@pytest.mark.parametrize("name", ["kubernetes.yaml", "leaderworkerset.yaml"])
def test_probes_are_paths_of_the_server(name: str) -> None:
    serving = Serving(ServerConfig(), "m")
    routes = {r.path for r in create_app(serving, Metrics("m").route()).routes}  # type: ignore[attr-defined]
    asked = {n["httpGet"]["path"] for n in nodes(documents(name)) if "httpGet" in n}
    assert asked == {"/health", "/ready"}
    scraped = {n.get("prometheus.io/path", "/metrics") for n in nodes(documents(name))}
    assert asked | scraped <= routes
    ports = [n["containerPort"] for n in nodes(documents(name)) if "containerPort" in n]
    assert ports == [8000]


@pytest.mark.parametrize("name", ["kubernetes.yaml", "leaderworkerset.yaml"])
def test_a_pod_has_time_to_end_and_to_begin(name: str) -> None:
    pods = [n for n in nodes(documents(name)) if "containers" in n]
    assert pods
    for pod in pods:
        (container,) = pod["containers"]
        words = [*container.get("command", ()), *container.get("args", ())]
        flags = dict(word.split("=", 1) for word in words if word.startswith("--"))
        sleep = 0
        if "lifecycle" in container:
            sleep = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
            probe = container["startupProbe"]
            seconds = probe["periodSeconds"] * probe["failureThreshold"]
            assert seconds > int(flags["--startup-timeout"])
        grace = pod["terminationGracePeriodSeconds"]
        assert grace >= sleep + int(flags["--shutdown-timeout"])
        names = {volume["name"] for volume in pod["volumes"]}
        assert names == {mount["name"] for mount in container["volumeMounts"]}


def test_the_unit_waits_longer_than_the_server_drains() -> None:
    (unit,) = documents("heddle.service")
    command = shlex.split(unit["Service"]["ExecStart"])
    drain = int(command[command.index("--shutdown-timeout") + 1])
    assert int(unit["Service"]["TimeoutStopSec"]) > drain
    assert unit["Service"]["Environment"] == f"HOME=/var/cache/{unit['Service']['CacheDirectory']}"


@pytest.mark.parametrize("name", FILES)
def test_no_file_names_a_registry(name: str) -> None:
    images = re.findall(r"(?:^ARG BASE=|image: |^FROM )(\S+)", read(name), re.MULTILINE)
    for image in images:
        assert "." not in image.partition("/")[0].partition(":")[0]
    assert not re.search(r"https?://(?!127\.0\.0\.1|\$LEADER)", read(name))


@pytest.mark.parametrize("name", DOCKERFILES)
def test_images_run_as_somebody_and_copy_what_exists(name: str) -> None:
    text = read(name)
    assert re.search(r"^USER heddle$", text, re.MULTILINE)
    assert "EXPOSE 8000" in text
    assert "http://127.0.0.1:8000/health" in text
    for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source


def test_the_script_is_shell() -> None:
    done = subprocess.run(
        ["bash", "-n", str(DEPLOY / SCRIPT)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
