"""The offline API: load once, generate many times.

    with LLM("demo", prefill_context_parallel_size=2, decode_context_parallel_size=2) as llm:
        for output in llm.generate(["The loom was", "A heddle is"]):
            print(output.outputs[0].text)

Thin by intent: `Driver` has the logic. No signal handlers are installed.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, Self

from heddle.config.engine import EngineConfig, ResolvedConfig
from heddle.config.sampling import RequestOutputKind, SamplingParams
from heddle.engine.args import engine_config
from heddle.engine.driver import Driver
from heddle.engine.executors.base import Executor, RankProgress
from heddle.engine.executors.create import create_executor
from heddle.engine.executors.launch_info import LaunchInfo
from heddle.engine.executors.succession import RESTARTABLE, Succession
from heddle.engine.inputs import PromptInput, parse_prompt, split_prompts
from heddle.engine.machine import resolve_here
from heddle.engine.outputs import RequestMetrics, RequestOutput
from heddle.engine.progress import line_on_terminal, loading_bar, progress_bar
from heddle.engine.recovery.budget import RestartBudget
from heddle.engine.recovery.restarts import Restarts
from heddle.engine.room import check_room
from heddle.engine.shadow.create import open_shadow
from heddle.engine.shadow.shadow import Shadow
from heddle.engine.tokenizer import Tokenizer, check_tokenizer, load_tokenizer
from heddle.engine.trace import StepRecord
from heddle.engine.trace_file import TraceFile
from heddle.errors import HeddleError, RequestError, counted, quoted
from heddle.kernels.warmup import OnLine, compile_elsewhere, operations

Watch = Callable[[Executor], Executor]
OnPlan = Callable[[ResolvedConfig], None]


class LLM:
    """A loaded model over any layout. A context manager; `close` ends its ranks."""

    def __init__(
        self,
        model: str,
        *,
        tensor_parallel_size: int = 1,
        prefill_context_parallel_size: int = 1,
        decode_context_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        data_parallel_size: int = 1,
        max_model_len: int | None = None,
        seed: int = 0,
        **engine_args: Any,
    ) -> None:
        """Load a model and start its ranks.

        Args:
            model: `demo`, a folder, a `.gguf` file or a hub id.
            tensor_parallel_size: ranks over heads; multiplies the world.
            prefill_context_parallel_size: ranks over new rows; multiplies the world.
            decode_context_parallel_size: ranks over stored KV; adds none.
            pipeline_parallel_size: stages of layers; multiplies the world.
            data_parallel_size: replicas that share the requests; multiplies the world.
            max_model_len: window in tokens; None: the model's.
            seed: of requests that name none.
            engine_args: every other setting, by the name of its flag with underscores.
        Raises:
            TypeError: an unknown setting.
            ConfigError, TopologyError: a setting or the layout is not legal.
            ModelFileError, UnsupportedError: the model cannot be read or run.
        """
        self._open(
            engine_config(
                model,
                tensor_parallel_size=tensor_parallel_size,
                prefill_context_parallel_size=prefill_context_parallel_size,
                decode_context_parallel_size=decode_context_parallel_size,
                pipeline_parallel_size=pipeline_parallel_size,
                data_parallel_size=data_parallel_size,
                max_model_len=max_model_len,
                seed=seed,
                **engine_args,
            )
        )

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        *,
        launch: LaunchInfo | None = None,
        on_progress: RankProgress | None = None,
        on_compile: OnLine | None = None,
        watch: Watch | None = None,
        on_plan: OnPlan | None = None,
    ) -> Self:
        """The same, from a whole configuration.

        Args:
            config: what to run.
            launch: what a launcher told this process; the executor `torchrun` needs it.
            on_progress: told (rank, done, total) while weights load; None: a bar on a terminal.
            on_compile: given a line for each kernel that is compiled first; None: on a terminal.
            watch: puts something between the driver and its ranks, to see what they are asked for.
            on_plan: told what will run, before anything is compiled or loaded.
        """
        llm = cls.__new__(cls)
        llm._open(config, launch, on_progress, on_compile, watch, on_plan)
        return llm

    @property
    def plan(self) -> ResolvedConfig:
        """The resolved layout, with the reason of each choice."""
        return self._driver.resolved

    @property
    def driver(self) -> Driver:
        """The engine's loop, for callers that stream, abort or verify."""
        return self._driver

    @property
    def shadow(self) -> Shadow | None:
        """What holds live rows against one rank; None without `verify_every`."""
        return self._shadow

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: str | Sequence[str | None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts.

        Args:
            prompts: text, a list of token ids, `{"prompt": ...}`, `{"prompt_token_ids": ...}`,
                `{"prompt_embeds": ...}`, or a list of these.
            sampling_params: one for all, or one per prompt.
            use_tqdm: show a bar on a terminal.
            lora_request: name of the adapter of all prompts, or one per prompt; None: none.
            priority: one per prompt; lower is served earlier, with the policy `priority`.
        Returns:
            One output per prompt, in order. In a list, a request that is refused or fails has
            `.error` set, and the others go on.
        Raises:
            RequestError: the only prompt is refused or fails.
            RankFailed: the engine has failed.
        """
        items, is_list = split_prompts(prompts)
        ranks = _priority_per_prompt(priority, len(items))
        jobs = [
            _Job(_prompt_text(item), partial(parse_prompt, item), rank)
            for item, rank in zip(items, ranks, strict=True)
        ]
        return self._run(jobs, sampling_params, is_list, use_tqdm, lora_request)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations.

        Args:
            messages: one conversation, a list of `{"role", "content"}`, or a list of conversations.
            sampling_params: one for all, or one per conversation.
            use_tqdm: show a bar on a terminal.
            chat_template: Jinja source; None: the model's own.
            add_generation_prompt: open the assistant's turn.
            continue_final_message: go on with the last message instead.
            tools: JSON schemas for templates that describe tools.
            chat_template_kwargs: further variables of the template.
            lora_request: name of the adapter of all conversations, or one per conversation.
        Returns:
            As `generate`.
        """
        _check_conversation(messages)
        is_list = bool(messages) and not isinstance(messages[0], Mapping)

        def render(conversation: Any) -> PromptInput:
            if self._tokenizer is None:
                raise RequestError("this model has no tokenizer, hence no chat template")
            _check_conversation(conversation)
            text = self._tokenizer.apply_chat_template(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            # The template writes all special tokens itself: adding more would double the first.
            return PromptInput(text=text, add_special_tokens=False)

        conversations = list(messages) if is_list else [messages]
        jobs = [_Job(None, partial(render, talk)) for talk in conversations]
        return self._run(jobs, sampling_params, is_list, use_tqdm, lora_request)

    def get_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None when it has none."""
        return self._tokenizer

    def get_metrics(self) -> dict[str, int]:
        """Counters since the start, and how many sequences run and wait now."""
        return {
            **self._driver.counters.totals(),
            "num_requests_running": self._driver.num_running,
            "num_requests_waiting": self._driver.num_waiting,
        }

    def step_trace(self) -> list[StepRecord]:
        """The last steps, oldest first: their rows, and why each exchange was chosen."""
        records = (record for replica in self._driver.replicas for record in replica.records)
        return sorted(records, key=lambda record: (record.step, record.replica))

    def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter, which `lora_request` may name from then on.

        Args:
            name: of the adapter.
            path: a PEFT folder inside `lora_dir`; absolute, or relative to it.
        Raises:
            ConfigError: adapters are off, the name is in use, the path lies outside, or all slots
                are taken.
            ModelFileError, UnsupportedError: the adapter is damaged, does not fit, or is of a kind
                that is not built.
        """
        with self._take_turn():
            self._driver.load_adapter(name, path)

    def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter; KV computed with it is found by nobody.

        Raises:
            RequestError: there is none of this name, or open requests use it.
        """
        with self._take_turn():
            self._driver.unload_adapter(name)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self._driver.reset_prefix_cache()

    def close(self) -> None:
        """End the ranks and free what they held; a second call does nothing."""
        self._is_closed = True
        self._driver.stop_restarts()
        if self._shadow is not None:
            self._shadow.close()
        self._driver.close()
        self._driver.executor.close()
        self._executors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(
        self,
        config: EngineConfig,
        launch: LaunchInfo | None = None,
        on_progress: RankProgress | None = None,
        on_compile: OnLine | None = None,
        watch: Watch | None = None,
        on_plan: OnPlan | None = None,
    ) -> None:
        resolved = resolve_here(config, launch)
        check_room(resolved, launch)
        trace = TraceFile.create(resolved)
        self._is_closed = False
        self._shadow: Shadow | None = None
        self._turn = threading.Lock()
        self._tokenizer = load_tokenizer(resolved.model_path)
        check_tokenizer(self._tokenizer, resolved.model_path, resolved.model.vocab_size)
        if on_plan is not None:
            on_plan(resolved)
        needed = operations(resolved.kernels, resolved.backend, resolved.kv_cache_dtype)
        compile_elsewhere(needed, on_compile or line_on_terminal)
        with loading_bar() if on_progress is None else nullcontext(on_progress) as report:
            # Which function makes executors is decided now, for all of them.
            self._executors = Succession(create_executor, watch, launch)
            executor = self._executors.next(resolved, report)
            restarts = _restarts(config, resolved, self._executors)
            self._driver = Driver(
                resolved, executor, self._tokenizer, restarts=restarts, trace=trace
            )
            try:
                executor.start()
                if resolved.verify_every:
                    self._shadow = open_shadow(config, resolved, LLM.from_config)
                    self._driver.on_probe = self._shadow.offer
            except BaseException:
                executor.close()
                self._executors.close()
                raise

    def _run(
        self,
        jobs: Sequence[_Job],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        is_list: bool,
        use_tqdm: bool,
        adapters: str | Sequence[str | None] | None,
    ) -> list[RequestOutput]:
        with self._take_turn():
            each = _params_per_prompt(sampling_params, len(jobs))
            names = _adapter_per_prompt(adapters, len(jobs))
            return self._complete(list(zip(jobs, each, names, strict=True)), is_list, use_tqdm)

    @contextmanager
    def _take_turn(self) -> Iterator[None]:
        """Be the only one who steps the driver, and find it idle."""
        if self._is_closed:
            raise HeddleError("this LLM is closed; make a new one")
        # Two loops over one driver would run into each other's steps and break the engine.
        if not self._turn.acquire(blocking=False):
            raise HeddleError(
                "another thread is in generate or chat of this LLM; take turns, or pass all "
                "prompts at once"
            )
        try:
            if self._driver.has_work:
                raise HeddleError(
                    "requests that were added to the driver are open; step it until they end, or "
                    "abort them first"
                )
            yield
        finally:
            self._turn.release()

    def _complete(
        self,
        jobs: Sequence[tuple[_Job, SamplingParams, str | None]],
        is_list: bool,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        places: dict[str, int] = {}
        with progress_bar(len(jobs), enabled=use_tqdm) as advance:
            try:
                for index, job in enumerate(jobs):
                    refusal = self._admit(*job, index, places)
                    if refusal is not None:
                        outputs[index] = refusal
                        advance()
                while self._driver.has_work:
                    for output in self._driver.step():
                        outputs[places.pop(output.request_id)] = output
                        advance()
            except BaseException:
                for request_id in places:
                    self._driver.abort(request_id)
                raise
        if not is_list and (error := outputs[0].error) is not None:
            raise error
        return [outputs[index] for index in range(len(jobs))]

    def _admit(
        self,
        job: _Job,
        params: SamplingParams,
        adapter: str | None,
        index: int,
        places: dict[str, int],
    ) -> RequestOutput | None:
        try:
            request_id = self._driver.add(
                job.prompt(), params, adapter=adapter, priority=job.priority
            )
            places[request_id] = index
        except RequestError as refusal:
            return _refused(job, index, refusal)
        return None


def _restarts(
    config: EngineConfig, resolved: ResolvedConfig, executors: Succession
) -> Restarts | None:
    """Who starts ranks anew; None: nobody, or somebody outside."""
    if not config.max_restarts or resolved.executor not in RESTARTABLE:
        return None
    budget = RestartBudget(config.max_restarts, time.monotonic)
    return Restarts(executors.next, budget, executors.closing)


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """A prompt that is parsed when its turn comes, so that one bad prompt refuses itself alone."""

    text: str | None
    prompt: Callable[[], PromptInput]
    priority: int = 0


def _prompt_text(item: Any) -> str | None:
    text = item.get("prompt") if isinstance(item, Mapping) else item
    return text if isinstance(text, str) else None


def _check_conversation(messages: Any) -> None:
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise RequestError(
            f"a conversation is a list of messages, not {type(messages).__name__}; "
            "wrap one message in a list"
        )


def _params_per_prompt(
    given: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """One per prompt; a caller of `generate` wants whole answers, whatever kind was asked for."""
    if given is None or isinstance(given, SamplingParams):
        params = [given or SamplingParams()] * count
    else:
        # What is no list at all is taken for one bad value, so that the message below names it.
        params = list(given) if isinstance(given, Iterable) else [given]
    for each in params:
        if not isinstance(each, SamplingParams):
            raise RequestError(
                f"sampling_params is a SamplingParams or a list of them; {type(each).__name__} "
                "found"
            )
    if len(params) != count:
        raise RequestError(
            f"{len(params)} sampling_params for {counted(count, 'prompt')}; give one, or one per "
            "prompt"
        )
    final = RequestOutputKind.FINAL_ONLY
    return [dataclasses.replace(each, output_kind=final) for each in params]


def _priority_per_prompt(given: Sequence[int] | None, count: int) -> list[int]:
    if given is None:
        return [0] * count
    ranks = list(given)
    if len(ranks) != count or not all(type(rank) is int for rank in ranks):
        raise RequestError(
            f"priority is one whole number per prompt, or None; {counted(count, 'prompt')}, "
            f"{quoted(ranks)} found"
        )
    return ranks


def _adapter_per_prompt(given: str | Sequence[str | None] | None, count: int) -> list[str | None]:
    """One name per prompt; None: the model alone."""
    if given is None or isinstance(given, str):
        return [given] * count
    names: list[Any] = list(given) if isinstance(given, (list, tuple)) else [given]
    for name in names:
        if name is not None and not isinstance(name, str):
            raise RequestError(
                f"lora_request is the name of an adapter, None, or a list of these; "
                f"{type(name).__name__} found"
            )
    if len(names) != count:
        raise RequestError(
            f"{counted(len(names), 'lora_request')} for {counted(count, 'prompt')}; give one, or "
            "one per prompt"
        )
    return names


def _refused(job: _Job, index: int, refusal: RequestError) -> RequestOutput:
    now = time.monotonic()
    return RequestOutput(
        request_id=f"refused-{index}",
        prompt=job.text,
        prompt_token_ids=(),
        prompt_logprobs=None,
        outputs=(),
        finished=True,
        metrics=RequestMetrics(arrival_time=now, finished_time=now),
        num_cached_tokens=0,
        error=refusal,
    )
