"""`make test-clients`: clients of others, in environments of their own, against `heddle serve`.

    lm-eval    local-completions (token ids, echo and logprobs, remote tokenizer) and
               local-chat-completions, on the small tasks in `tasks/`
    guidellm   a short run of streams, non-ASCII prompts among them

Nothing of the client is changed or patched. What happened is kept in `last_run.json`.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / ".venv-clients"
CLIENTS = {"lm-eval": ["lm-eval[api]==0.4.13"], "guidellm": ["guidellm==0.8.1"]}
TORCH = "torch==2.13.0"
"""The build that is installed beside us, lest a client brings another one."""
SERVE = ("serve", "demo", "--port", "0", "--json", "--enable-tokenizer-info")
NUM_REQUESTS = 4
"""As many as there are prompts."""
TASKS = ("heddle_facts", "heddle_says")


def main() -> int:
    for name, requirements in CLIENTS.items():
        set_up(name, requirements)
    process = subprocess.Popen(
        [sys.executable, "-m", "heddle", *SERVE],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        found = {
            "lm-eval local-completions": evaluate(url, "completions"),
            "lm-eval local-chat-completions": evaluate(url, "chat"),
            "guidellm": guide(url),
        }
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait()
    found["server exit code"] = code
    record = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "clients": CLIENTS,
        "results": found,
    }
    (HERE / "last_run.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))
    return 0 if is_good(found) else 1


def is_good(found: dict[str, Any]) -> bool:
    """The demo knows its facts by log-probability, and every request was answered."""
    return (
        found["lm-eval local-completions"]["heddle_facts"]["acc"] >= 5 / 6
        and "heddle_says" in found["lm-eval local-chat-completions"]
        and found["guidellm"] == {"successful": NUM_REQUESTS, "errored": 0, "incomplete": 0}
        and found["server exit code"] == 0
    )


def set_up(name: str, requirements: list[str]) -> None:
    """An environment of a client, once."""
    folder = ENVIRONMENTS / name
    if (folder / ".installed").exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *requirements, TORCH], check=True)
    (folder / ".installed").touch()


def evaluate(url: str, kind: str) -> dict[str, Any]:
    """Values of the tasks, by lm-eval."""
    output = ENVIRONMENTS / f"lm-eval-{kind}-{time.time_ns()}"
    words = ["--include_path", str(HERE / "tasks"), "--output_path", str(output)]
    common = "model=demo,num_concurrent=4,max_retries=1"
    if kind == "chat":
        words += ["--model", "local-chat-completions", "--apply_chat_template"]
        words += ["--tasks", TASKS[1]]
        words += ["--model_args", f"{common},base_url={url}/v1/chat/completions"]
    else:
        words += ["--model", "local-completions", "--tasks", ",".join(TASKS)]
        where = f"base_url={url}/v1/completions,tokenizer_backend=remote"
        words += ["--model_args", f"{common},{where}"]
    run("lm-eval", "lm_eval", *words)
    (file,) = output.rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    return {
        task: {name.partition(",")[0]: v for name, v in values.items() if isinstance(v, float)}
        for task, values in results.items()
    }


def guide(url: str) -> dict[str, int]:
    """How many requests went well, by guidellm."""
    output = ENVIRONMENTS / "guidellm.json"
    run(
        "guidellm",
        "guidellm",
        "run",
        "--disable-progress",
        *("--backend", f"kind=openai_http,target={url},model=demo"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--data", f"kind=json_file,path={HERE / 'tasks' / 'prompts.jsonl'}"),
        *("--output", f"kind=json,path={output}"),
    )
    (benchmark,) = json.loads(output.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    return {name: int(totals[name]) for name in ("successful", "errored", "incomplete")}


def run(client: str, program: str, *words: str) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    command = [str(ENVIRONMENTS / client / "bin" / program), *words]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, **offline})


if __name__ == "__main__":
    sys.exit(main())
