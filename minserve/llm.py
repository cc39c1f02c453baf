"""Text in, text out: the engine with its model, tokenizer and memory, as one object.

Why: `LLM` is where the rooms meet. It resolves a model, chooses a compute type, sizes the KV pool, builds scheduler, runner and
engine, and turns prompts into requests and tokens into text. It holds no scheduling and no mathematics of its own.

Invariant: outputs do not depend on what else is being served; whatever raises, the requests of the call are ended and their
blocks returned; a call from another thread (a widget's callback) waits its turn on the lock.

Taught in notebook 00.
"""

import gc
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from minserve.core.block_manager import BlockManager
from minserve.core.clock import WallClock
from minserve.core.engine import Engine, ModelLimits
from minserve.core.policies import Policy
from minserve.core.policy_names import needs_step_times, parse_policy
from minserve.core.pressure import Pressure
from minserve.core.records import RequestRecord
from minserve.core.request import FinishReason, InvalidRequest, Request, SamplingParams
from minserve.core.scheduler import Scheduler, SchedulerConfig
from minserve.core.trace import Trace
from minserve.interface import Completion, EngineConfig, Prompt, RequestOutput, RequestShed, as_list, as_params
from minserve.model import costs, zoo
from minserve.model.config import ModelConfig
from minserve.model.cuda_graphs import wants_graphs
from minserve.model.decoder import Decoder
from minserve.model.kv_cache import KVCache
from minserve.model.kv_formats import require_format
from minserve.model.quantized_linear import Storage
from minserve.model.runner import ModelRunner
from minserve.model.sampler import Sampler
from minserve.model.sizing import PoolPlan, choose_device, choose_dtype, plan_pool, wants_weight_copy
from minserve.model.tokenizer import Detokenizer, Tokenizer
from minserve.model.triton_weights import choose_weight_kernels
from minserve.quantize.serving import open_weights


@dataclass(slots=True)
class _Live:
    """A request under way and the text that its tokens have made so far."""

    request: Request
    record: RequestRecord  # held here too: the trace may let go of it before the call ends
    detokenizer: Detokenizer
    pieces: list[str]  # not yet fetched by a stream


class LLM:
    """A model being served in this process.

    with LLM() as llm:
        print(llm.generate("The capital of France is", max_tokens=8)[0].text)
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        policy: Policy | str | None = None,
        calibration: str | Path | None = None,
        verbose: bool = True,
        **fields: Any,
    ):
        """Load `model` (a directory, a hub id, None for the default) with the settings of `EngineConfig`.

        `policy` is an object or words ("cap:most=8"; `core.policy_names` has them all), None for continuous batching. For one that
        predicts steps, `calibration` names the device: a file of `minserve calibrate`, or a name of the simulator's catalogue.
        Raises ValueError for an unknown setting, UnsupportedModel, ModelUnavailable or PoolTooSmall with the reason.
        """
        self.config = config = EngineConfig.from_fields(fields)
        if isinstance(policy, str) and not needs_step_times(policy):
            policy = parse_policy(policy)  # a typing error should not cost the loading of a model
        self.model_path = zoo.resolve(model, progress=verbose)
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        device = choose_device(config.device)
        self.dtype = choose_dtype(config.dtype, device)
        require_format(config.kv_cache_dtype, ModelConfig.from_directory(self.model_path).head_dim, device)  # before the weights
        self.tokenizer = Tokenizer(self.model_path)
        decoder = self._open_decoder(self.model_path, device, progress=verbose)
        self.pool: PoolPlan = self._plan_pool(decoder)
        cache = KVCache(decoder.config, self.pool.num_blocks, config.block_size, self.pool.kv_cache_dtype, device)
        self._runner = ModelRunner(decoder, cache, Sampler(self.tokenizer.num_tokens_known), backend=config.attention_backend)
        if wants_graphs(config.cuda_graphs, self._runner.operations.name, device):
            self._runner.record_graphs(config.max_running, self.pool.max_model_len)
        if isinstance(policy, str):
            policy = self._predicting_policy(policy, calibration, decoder)
        limits = ModelLimits(self.pool.max_model_len, decoder.config.vocab_size, self.tokenizer.eos_ids)
        self.engine = Engine(self._make_scheduler(policy), self._runner, WallClock(), limits, self._new_trace())
        self._live: dict[str, _Live] = {}
        self._lock = threading.RLock()
        self._is_closed = False
        if verbose:
            print(self.describe(), file=sys.stderr)

    def _open_decoder(self, path: Path, device: torch.device, progress: bool = True) -> Decoder:
        config = self.config
        storage = Storage(
            copy=wants_weight_copy(config.weight_copy, ModelConfig.from_directory(path), self.dtype, device),
            kernels=choose_weight_kernels(config.attention_backend, device),
        )
        return Decoder.from_directory(path, self.dtype, device, open_weights(path, config.weights, progress=progress), storage)

    def _plan_pool(self, decoder: Decoder) -> PoolPlan:
        config = self.config
        return plan_pool(
            decoder.config,
            block_size=config.block_size,
            kv_cache_dtype=config.kv_cache_dtype,
            dtype=self.dtype,
            device=decoder.device,
            num_blocks=config.num_blocks,
            kv_cache_bytes=config.kv_cache_bytes,
            memory_fraction=config.kv_memory_fraction,
            max_model_len=config.max_model_len,
            max_running=config.max_running,
        )

    def _predicting_policy(self, words: str, calibration: str | Path | None, decoder: Decoder) -> Policy:
        spec = costs.choose_spec(calibration, decoder.device)
        times = costs.step_times(decoder, self.model_path, self.config.weights, self.dtype, self.pool.kv_cache_dtype, spec)
        return parse_policy(words, times)

    def _make_scheduler(self, policy: Policy | None) -> Scheduler:
        config, pool = self.config, self.pool
        blocks = BlockManager(
            pool.num_blocks,
            config.block_size,
            prefix_caching=config.prefix_caching,
            namespace=f"{self.model_path}|{config.weights}|{self.dtype}|{pool.kv_cache_dtype}",
        )
        settings = SchedulerConfig(
            token_budget=config.token_budget,
            max_running=config.max_running,
            watermark_blocks=int(config.watermark * pool.num_blocks),
            max_chunk_tokens=config.max_chunk_tokens,
            reserve_whole_answers=config.reserve_whole_answers,
        )
        return Scheduler(settings, blocks, policy)

    def describe(self) -> str:
        """Model and compute type, memory, and who attends, in a line each."""
        self._refuse_when_closed()
        return f"{self.model_path.name}: {self._runner.decoder.describe()}\n{self.pool.describe()}\n{self._runner.describe()}"

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def trace(self) -> Trace:
        return self.engine.trace

    def pressure(self) -> Pressure:
        """How full the pool is now, and how many requests run and wait."""
        with self._lock:
            return self.engine.scheduler.pressure()

    def reset_trace(self) -> Trace:
        """Start a new trace, and return the one so far. Raises RuntimeError while requests are under way."""
        with self._lock:
            self._refuse_when_busy("start a new trace")
            old, self.engine.trace = self.engine.trace, self._new_trace()
            return old

    def _new_trace(self) -> Trace:
        return Trace(self.config.max_trace_records, self.config.keep_snapshots)

    # --- serving ----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        salt: str = "",
        progress: bool = True,
        **fields: Any,
    ) -> list[RequestOutput]:
        """Answer a string, a list of token ids, or a list of either kind; one output a prompt, in their order.

        `params` are for all prompts or a list with one for each; sampling fields may be given by name instead. Raises InvalidRequest
        before anything runs if any prompt cannot be served. Whom the policy sends away has finish_reason "shed", and error says why.
        `progress` shows a bar on work that takes longer than a second.
        """
        prompts = as_list(prompts)
        groups = self._submit(prompts, as_params(params, fields, len(prompts)), priority, salt)
        requests = [request for group in groups for request in group]
        try:
            self._serve(requests, progress)
            texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
            return [self._output(group, text) for group, text in zip(groups, texts, strict=True)]
        finally:
            self._forget(requests)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation ([{"role": ..., "content": ...}, ...]) or a list of them, through the model's chat template."""
        one = not messages or isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if one else messages
        return self.generate([self.tokenizer.chat(conversation) for conversation in conversations], params, **options)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **fields: Any) -> Generator[str, None, None]:
        """The answer piece by piece, as soon as a piece is safe to show. Leaving the loop early gives the request up."""
        [request_params] = as_params(params, fields, 1)
        if request_params.n != 1:
            raise InvalidRequest(f"a stream has one answer, got n = {request_params.n}")
        [requests] = self._submit([prompt], [request_params], 0, "")
        live = self._live[requests[0].request_id]
        try:
            while not live.request.is_finished:
                self._step_for(live.request)
                yield from self._fetch(live)
            yield from self._fetch(live)
            if live.request.finish_reason is FinishReason.ERROR:
                raise RuntimeError(f"request {live.request.request_id} failed: {live.request.error}")
            if live.request.finish_reason is FinishReason.SHED:
                raise RequestShed(f"request {live.request.request_id} was sent away: {live.request.error}")
        finally:
            self._forget(requests)

    def chat_stream(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **fields: Any
    ) -> Generator[str, None, None]:
        """`stream` for a conversation."""
        return self.stream(self.tokenizer.chat(messages), params, **fields)

    def abort(self, request_id: str) -> bool:
        with self._lock:
            return self.engine.abort(request_id)

    # --- inside -----------------------------------------------------------------------------------

    def _submit(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], priority: int, salt: str) -> list[list[Request]]:
        """Queue all prompts, or none of them if one is refused."""
        groups: list[list[Request]] = []
        with self._lock:
            self._refuse_when_closed()
            try:
                for prompt, own in zip(prompts, params, strict=True):
                    ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
                    groups.append(self.engine.add(ids, own, priority=priority, salt=salt))
            except BaseException:
                self._forget([request for group in groups for request in group])
                raise
            for request in (request for group in groups for request in group):
                p = request.params
                detokenizer = Detokenizer(self.tokenizer, stop=p.stop, min_tokens=p.min_tokens, stop_ids=request.stop_ids)
                self._live[request.request_id] = _Live(request, self.trace.requests[request.request_id], detokenizer, [])
        return groups

    def _serve(self, requests: Sequence[Request], progress: bool) -> None:
        with tqdm(total=len(requests), disable=not progress, delay=1.0, unit="request", leave=False) as bar:
            for request in requests:
                while not request.is_finished:
                    self._step_for(request)
                    bar.set_postfix(
                        running=len(self.engine.scheduler.running),
                        waiting=len(self.engine.scheduler.waiting),
                        blocks=self.engine.scheduler.blocks.num_used_blocks,
                        refresh=False,
                    )
                    bar.update(sum(r.is_finished for r in requests) - bar.n)

    def _step_for(self, request: Request) -> None:
        """One step, unless another thread's step has ended the request meanwhile."""
        with self._lock:
            if request.is_finished:
                return
            self._refuse_when_closed()
            output = self.engine.step()
            if self.engine.is_held_up:  # the policy waits for more to come
                self.engine.wait()
            for ready, token_id in output.tokens:
                live = self._live.get(ready.request_id)
                if live is not None:
                    self._take_token(live, token_id)

    def _take_token(self, live: _Live, token_id: int) -> None:
        live.pieces.append(live.detokenizer.push(token_id))
        if live.detokenizer.stopped:
            if live.request.is_finished:  # the last token also completed a stop string: the text ended there
                live.request.finish_reason = FinishReason.STOP
            self.engine.finish(live.request, FinishReason.STOP)
        elif live.request.is_finished:
            live.pieces.append(live.detokenizer.finish())

    def _fetch(self, live: _Live) -> Generator[str, None, None]:
        with self._lock:
            text, live.pieces = "".join(live.pieces), []
        if text:
            yield text

    def _forget(self, requests: Sequence[Request]) -> None:
        """The call is over, however it ended: give up what still runs and keep nothing of it."""
        with self._lock:
            for request in requests:
                self.engine.finish(request, FinishReason.ABORT)
                self._live.pop(request.request_id, None)

    def _output(self, group: Sequence[Request], prompt: str | None) -> RequestOutput:
        first = group[0]
        return RequestOutput(
            request_id=first.request_id,
            prompt=prompt,
            prompt_ids=first.prompt_ids,
            outputs=[self._completion(request) for request in group],
            num_cached_tokens=first.num_cached_tokens,
            metrics=self._live[first.request_id].record,
        )

    def _completion(self, request: Request) -> Completion:
        return Completion(
            index=request.sample_index,
            text=self._live[request.request_id].detokenizer.text,
            token_ids=request.output_ids,
            finish_reason=str(request.finish_reason),
            logprobs=request.logprobs if request.params.logprobs is not None else None,
            error=request.error,
        )

    # --- life -------------------------------------------------------------------------------------

    def load_weights(self, model: str | Path) -> None:
        """Serve other weights of the same shape from now on. Everything cached was computed with the old ones and is forgotten.

        Raises RuntimeError while requests are under way, ValueError if the configurations differ.
        """
        with self._lock:
            self._refuse_when_busy("change the weights")
            path, old = zoo.resolve(model), self._runner.decoder
            if ModelConfig.from_directory(path) != old.config:
                raise ValueError(f"{path} is not the same kind of model as {self.model_path}: load it with a new LLM")
            self._runner.use(self._open_decoder(path, old.device))
            self.model_path = path
            self.engine.scheduler.blocks.flush_cache()

    def close(self) -> None:
        """Give the memory back. Closing twice is fine; serving afterwards is an error."""
        with self._lock:
            if not self._is_closed:
                self._forget([live.request for live in self._live.values()])
                self._is_closed = True
                del self._runner, self.engine.runner
                gc.collect()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _refuse_when_busy(self, what: str) -> None:
        self._refuse_when_closed()
        num_busy = len(self.engine.scheduler.running) + len(self.engine.scheduler.waiting)
        if num_busy:
            raise RuntimeError(f"cannot {what} while {num_busy} requests are under way")

    def _refuse_when_closed(self) -> None:
        if self._is_closed:
            raise RuntimeError("this LLM is closed; make a new one to serve again")
