"""The surface of the project, pinned: a change to it is a decision, not an accident."""

from __future__ import annotations

import ast
import configparser
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from heddle.cli.main import COMMANDS, NESTED
from heddle.cli.output import Output

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "heddle"

PURE_ROOMS = (
    "errors",
    "units",
    "config",
    "layout",
    "kvcache",
    "scheduler",
    "step",
    "planner",
    "simulator",
    "view",
    "faults",
)
PURE_MODULES = ("heddle", "heddle.models", "heddle.models.config_json", "heddle.cli.main")

PUBLIC_NAMES = (
    "CompletionOutput",
    "ConfigError",
    "HeddleError",
    "LLM",
    "ModelFileError",
    "PromptTooLong",
    "RankFailed",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TopologyError",
    "UnsupportedError",
)

COMMON_FLAGS = "--debug --help --json -h"
LAYOUT_FLAGS = (
    "--block-size --cp-context-exchange --cp-kv-cache-interleave-size --cp-lanes "
    "--cp-start-rank-rotation --data-parallel-size --dcp-comm-backend "
    "--dcp-kv-cache-interleave-size --dcp-q-replicate --decode-context-parallel-size "
    "--decode-row-sharding --distributed-executor-backend --dtype --enable-expert-parallel "
    "--executor --kv-cache-dtype "
    "--no-cp-start-rank-rotation --no-dcp-q-replicate --no-enable-expert-parallel "
    "--pipeline-parallel-size --prefill-context-parallel-size --tensor-parallel-size "
    "-dcp -dp -pcp -pp -tp"
)
ENGINE_FLAGS = (
    "--attention-backend --context-workspace-tokens --cpu-comm-backend "
    "--cpu-distributed-timeout-seconds --deterministic --no-deterministic --quantization "
    "--cuda-graphs --no-cuda-graphs --enforce-eager --no-enforce-eager "
    "--enable-fault-injection --no-enable-fault-injection --faults "
    "--debug-kv --no-debug-kv --max-restarts --trace-file --trace-steps --verify-every "
    "--weights-manifest "
    "--enable-lora --lora-dir --lora-modules --max-lora-rank --max-loras --no-enable-lora "
    "--enable-prefix-caching --hf-overrides --kernels --kv-cache-memory-bytes "
    "--long-prefill-token-threshold "
    "--max-model-len --max-num-batched-tokens --max-num-partial-prefills --max-num-seqs "
    "--model-impl --no-enable-prefix-caching --num-gpu-blocks-override --num-threads --seed "
    "--speculative-config --startup-timeout --step-timeout "
    "--max-num-queued-reqs --max-num-queued-tokens --max-pinned-tokens --scheduling-policy "
    "--target-itl"
)
GENERATE_FLAGS = (
    "--chat --frequency-penalty --ignore-eos --lora --max-tokens --min-p --min-tokens "
    "--no-ignore-eos --presence-penalty --prompt-file --repetition-penalty --stop "
    "--temperature --top-k --top-p"
)
SERVE_FLAGS = (
    "--admin-api-key-file --admin-port --admin-uds --allow-insecure-bind --allowed-origins "
    "--api-key --api-key-file --cache-per-key --no-cache-per-key --chat-template --config "
    "--default-chat-template-kwargs "
    "--disable-access-log-for-endpoints --disable-log-stats --enable-auto-tool-choice "
    "--enable-log-requests --enable-tokenizer-info --generation-config --hide-cached-tokens "
    "--host --log-format --log-level --max-connections --max-log-len --max-logprobs "
    "--max-prompt-logprobs-tokens --metrics-compat --metrics-key --model "
    "--no-allow-insecure-bind --no-disable-log-stats --no-enable-auto-tool-choice "
    "--no-enable-log-requests --no-enable-tokenizer-info --no-hide-cached-tokens "
    "--no-metrics-key --no-trust-request-chat-template --port --print-config "
    "--reasoning-parser --request-timeout --self-check --served-model-name --shutdown-timeout "
    "--sse-keep-alive-interval --ssl-certfile --ssl-keyfile --stream-stall-timeout "
    "--tool-call-parser --trust-request-chat-template --uds"
)
CHAT_FLAGS = (
    "--api-key --frequency-penalty --max-tokens --min-p --model --presence-penalty "
    "--repetition-penalty --stop --system --temperature --top-k --top-p"
)
BATCH_FLAGS = (
    "--api-key --input-file --max-concurrency --max-retries --output-file "
    "--served-model-name --url -i -o"
)
LOAD_FLAGS = (
    "--api-key --base-url --burstiness --dataset-name --endpoint --goodput --host --ignore-eos "
    "--max-concurrency --metric-percentiles --model --num-prompts --percentile-metrics --port "
    "--random-input-len --random-output-len --random-prefix-len --ready-check-timeout-sec "
    "--request-rate --result-dir --save-result --seed --temperature --vocab-size"
)
PLAN_FLAGS = (
    "--concurrency --device --device-file --devices --hf-overrides --kv-cache-memory-bytes "
    "--max-model-len --max-num-batched-tokens --max-num-seqs --output-len --prefix-hit "
    "--prompt-len --tpot --trace --ttft"
)
SIMULATE_FLAGS = (
    "--bounds --device --device-file --devices --enable-prefix-caching --hf-overrides "
    "--kv-cache-memory-bytes --long-prefill-token-threshold --max-model-len "
    "--max-num-batched-tokens --max-num-partial-prefills --max-num-queued-reqs "
    "--max-num-queued-tokens --max-num-seqs --no-bounds --no-enable-prefix-caching --output-len "
    "--prompt-len --rate --requests --seed --sweep --synthetic --target-itl --tpot --trace --ttft"
)
VIEW_FLAGS = (
    "-o --output --api-key --seq-len --heads --device --devices --hf-overrides "
    "--kv-cache-memory-bytes --max-model-len --max-num-batched-tokens --max-num-seqs"
)
SURFACE = {
    "serve": f"{COMMON_FLAGS} {LAYOUT_FLAGS} {ENGINE_FLAGS} {SERVE_FLAGS}",
    "chat": f"{COMMON_FLAGS} {LAYOUT_FLAGS} {ENGINE_FLAGS} {CHAT_FLAGS}",
    "run-batch": f"{COMMON_FLAGS} {LAYOUT_FLAGS} {ENGINE_FLAGS} {BATCH_FLAGS}",
    "bench serve": f"{COMMON_FLAGS} {LOAD_FLAGS}",
    "generate": f"{COMMON_FLAGS} {LAYOUT_FLAGS} {ENGINE_FLAGS} {GENERATE_FLAGS}",
    "show": f"{COMMON_FLAGS} {LAYOUT_FLAGS} --heads --seq-len",
    "plan": f"{COMMON_FLAGS} {LAYOUT_FLAGS} {PLAN_FLAGS}",
    "view": f"{COMMON_FLAGS} {LAYOUT_FLAGS} {VIEW_FLAGS}",
    "simulate": f"{COMMON_FLAGS} {LAYOUT_FLAGS} {SIMULATE_FLAGS}",
    "verify": f"{COMMON_FLAGS} {LAYOUT_FLAGS} {ENGINE_FLAGS} --all --max-tokens --task --world",
    "doctor": f"{COMMON_FLAGS} {LAYOUT_FLAGS} {ENGINE_FLAGS} --dump --calibrate --manifest",
    "bench": f"{COMMON_FLAGS} {LAYOUT_FLAGS} {ENGINE_FLAGS} --max-tokens --new-rows --peers-dir "
    "--prompt-lens --rounds --streams --vs",
    "warmup": f"{COMMON_FLAGS} {LAYOUT_FLAGS} {ENGINE_FLAGS}",
}


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the package that holds code, by its dotted name."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.stat().st_size:
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=1200,
        check=False,
    )


def test_pure_rooms_load_no_tensor_library():
    pure = [
        name for name, _ in modules() if name.split(".")[1:2] and name.split(".")[1] in PURE_ROOMS
    ]
    assert len(pure) > 20
    code = (
        "import importlib, sys\n"
        f"for name in {pure + list(PURE_MODULES)!r}: importlib.import_module(name)\n"
        "heavy = {'torch', 'transformers', 'safetensors', 'tokenizers', 'huggingface_hub'}\n"
        "heavy |= {'numba', 'triton'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = python("-c", code)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_torch_distributed_has_one_home():
    homes = {name for name, path in modules() if "torch.distributed" in set(imports_of(path))}
    assert homes == {"heddle.comm.torch_group"}


def imports_of(path: Path) -> Iterator[str]:
    """Dotted names that a file imports or reaches by attribute."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"


def test_public_names_are_these_and_all_resolve():
    import heddle

    assert tuple(heddle.__all__) == PUBLIC_NAMES
    for name in PUBLIC_NAMES:
        assert getattr(heddle, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing"):
        _ = heddle.nothing


@pytest.mark.parametrize("command", SURFACE)
def test_the_flags_of_a_command_are_these(command):
    module = importlib.import_module("heddle.cli." + re.sub("[- ]", "_", command))
    parser = module.create_parser({}, Output())
    assert set(parser.flags) == set(SURFACE[command].split())


def test_the_commands_are_these():
    assert {*COMMANDS, *NESTED} == set(SURFACE)


TESTED_ELSEWHERE = {
    "heddle.engine.helper_process": "engine/grammar/test_trial.py",
    "heddle.server.job": "server/test_serving_requests.py",
    # Formats of tool calls are tables for one reader.
    "heddle.server.pieces": "server/test_tool_parsers.py",
    "heddle.server.tool_parsers.call_object": "server/test_tool_parsers.py",
    "heddle.server.tool_parsers.call_text": "server/test_tool_parsers.py",
    "heddle.server.tool_parsers.hermes": "server/test_tool_parsers.py",
    "heddle.server.tool_parsers.shape": "server/test_tool_parsers.py",
    "heddle.server.tool_parsers.json_object": "server/test_tool_text.py",
    "heddle.server.tool_parsers.marks": "server/test_tool_text.py",
    "heddle.server.tool_parsers.forced": "server/test_tools.py",
    # An executor is tested by what it promises, with all of its parts.
    "heddle.engine.executors.base": "engine/test_executors_local.py",
    "heddle.engine.executors.create": "engine/test_executors_local.py",
    "heddle.engine.executors.forkserver": "engine/test_executors_processes.py",
    "heddle.engine.executors.inline": "engine/test_executors_local.py",
    "heddle.engine.executors.launch_info": "engine/test_executors_torchrun.py",
    "heddle.engine.executors.launcher": "engine/test_executors_processes.py",
    "heddle.engine.executors.lifecycle": "engine/test_executors_local.py",
    "heddle.engine.executors.processes": "engine/test_executors_processes.py",
    "heddle.engine.executors.rank_process": "engine/test_executors_processes.py",
    "heddle.engine.executors.rank_world": "engine/test_executors_processes.py",
    "heddle.engine.executors.ray_cluster": "engine/test_executors_ray.py",
    "heddle.engine.executors.ray_executor": "engine/test_executors_ray.py",
    "heddle.engine.executors.ray_host": "engine/test_executors_ray.py",
    "heddle.engine.executors.ray_ranks": "engine/test_executors_ray.py",
    "heddle.engine.executors.seat": "engine/test_executors_processes.py",
    "heddle.engine.executors.threads": "engine/test_executors_local.py",
    "heddle.engine.executors.torchrun": "engine/test_executors_torchrun.py",
    "heddle.engine.executors.wrapped": "server/test_step_timer.py",
    # Families that differ in nothing but tables of names and blocks.
    "heddle.models.bamba": "models/test_recurrent_families.py",
    "heddle.models.minimax": "models/test_recurrent_families.py",
    "heddle.models.qwen3_next": "models/test_recurrent_families.py",
    # Loops, formats and the plain form of one kernel are one law.
    "heddle.kernels.paged_decode.kernel": "kernels/paged_decode/test_numba_cpu.py",
    "heddle.kernels.paged_decode.loops": "kernels/paged_decode/test_numba_cpu.py",
    "heddle.kernels.paged_decode.reference": "kernels/paged_decode/test_numba_cpu.py",
    "heddle.kernels.paged_decode.widen": "kernels/tiled_attention/test_numba_cpu.py",
    # A batch is what plans are made of.
    "heddle.step.batch": "step/test_build.py",
    "heddle.step.local_query_context": "attention/test_distributed_rows.py",
    # The walk and the tiles of a product are seen in the product alone.
    "heddle.kernels.linear.tiles": "kernels/linear/test_numba_cpu.py",
    "heddle.kernels.linear.quantized_rows": "kernels/linear/test_quantized_tiles.py",
    "heddle.attention.exchange.weighted": "attention/exchange/test_kernels.py",
    # A codec and the form of it that computes are one law.
    "heddle.kernels.row_encode.reference": "attention/test_quantized_rows.py",
    "heddle.verify.report": "verify/test_certify.py",
    "heddle.verify.runs": "verify/test_certify.py",
}


def test_every_module_has_a_test_file():
    untested = []
    for name, path in modules():
        if path.name in ("__init__.py", "__main__.py") or not holds_logic(path):
            continue
        if not any(home.exists() for home in homes_of_tests(name)):
            untested.append(name)
    assert untested == []


def homes_of_tests(name: str) -> Iterator[Path]:
    """Files that may hold the tests of a module, most of them not there."""
    tests = ROOT / "tests"
    *rooms, stem = name.split(".")[1:]
    yield from tests.joinpath(*rooms).glob(f"test_{stem}*.py")
    if name in TESTED_ELSEWHERE:
        yield tests / TESTED_ELSEWHERE[name]
    if name.startswith("heddle.engine.executors."):
        yield from tests.joinpath("engine").glob(f"test_executor_{stem}*.py")


def holds_logic(path: Path) -> bool:
    """False for files of protocols, constants and plain field lists: there is nothing to get
    wrong."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and any(
            isinstance(part, ast.If | ast.For | ast.While | ast.Raise | ast.comprehension)
            for part in ast.walk(node)
        ):
            return True
    return False


def test_the_module_table_of_the_docs_is_the_import_order():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[a-z`, ]+`) \|", text, re.MULTILINE)
    documented = [room.strip("`") for row in rows for room in row.split(", ")]
    parser = configparser.ConfigParser()
    parser.read(ROOT / ".importlinter")
    layers = parser["importlinter:contract:rooms"]["layers"].split("\n")[1:]
    order = [room for layer in reversed(layers) for room in layer.split(" | ")]
    assert documented == order
    on_disk = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert set(order) == on_disk | {"errors", "units"}


def test_the_changelog_keeps_unreleased_on_top():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE)[0] == "[Unreleased]"
    assert "### Added" in text


def test_links_between_pages_lead_somewhere():
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    checked = 0
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
                checked += 1
    assert checked > 10


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200


def readme_commands() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def test_make_targets_of_the_readme_exist():
    targets = {line.split()[1] for line in readme_commands() if line.startswith("make ")}
    assert {"demo", "test"} <= targets
    for target in targets:
        done = subprocess.run(
            ["make", "--dry-run", target], capture_output=True, text=True, cwd=ROOT, check=False
        )
        assert done.returncode == 0, done.stderr


def test_make_bench_runs_every_benchmark():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    listed = re.findall(r"^BENCHMARKS := (.*)$", text, re.MULTILINE)[0].split()
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {
        "support",
        "roofline",
        "soak",
    }
    assert set(listed) == scripts
    assert len(listed) == len(scripts)


def commands_that_end() -> list[str]:
    """Those of the server are held by `tests/server/test_readme.py`."""
    others = ("make ", "heddle serve", "curl ")
    return [line for line in readme_commands() if not line.startswith(others)]


@pytest.mark.dist
@pytest.mark.parametrize("command", commands_that_end())
def test_a_command_of_the_readme_runs(command):
    import shlex

    words = shlex.split(command)
    assert words[0] == "heddle"
    done = python("-m", *words)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_examples_in_the_docs_hold(page):
    import doctest

    failures, _ = doctest.testfile(str(page), module_relative=False)
    assert failures == 0
