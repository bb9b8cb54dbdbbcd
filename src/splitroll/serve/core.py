"""The fleet as vLLM's own front end sees it: one EngineCore.

vLLM's server is an HTTP layer, a front end that tokenizes, detokenizes and formats (AsyncLLM), and
an EngineCore that generates. `FleetCore` takes the EngineCore's place: requests go to the
dispatcher, tokens come back. So an answer has the form that a plain vLLM server gives it, because
the same code makes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from splitroll.dispatch.assembly import GroupWork
from splitroll.dispatch.progress import Listener
from splitroll.engines.protocol import Candidates, Tokens
from splitroll.errors import EngineDied, SplitrollError
from splitroll.rollout import Rollout
from splitroll.types import Prompt, Sample, SamplingParams

log = logging.getLogger(__name__)

_AT_THE_END = 2**31
"""Tokens between two events of a request whose answer comes in one piece."""
_SESSIONS = 100_000
_FINISH = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}
_PLAIN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
)
"""What vLLM's sampling parameters and ours both have."""


_Key = tuple[Any, ...]
"""What siblings have in common, first their prompt: its tokens and its cache's salt."""


@dataclass(slots=True, eq=False)
class _Siblings:
    """Requests for samples of one prompt that came together.

    Attributes:
        held: of each request, the last tokens, until it is known why they are the last.
    """

    requests: Sequence[EngineCoreRequest]
    listener: Listener = field(default_factory=Listener)
    held: dict[int, Tokens] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)
    task: asyncio.Task[None] | None = None


class FleetCore(EngineCoreClient):  # type: ignore[misc]
    """See the module's docstring. Lives in the event loop of the rollout."""

    engine_ranks_managed = (0,)

    def __init__(self, rollout: Rollout) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self._rollout = rollout
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._arrived: list[tuple[_Key, EngineCoreRequest]] = []
        self._places: dict[str, tuple[_Siblings, int]] = {}
        self._leading: dict[tuple[Any, ...], asyncio.Event] = {}
        """By prompt, whether the KV of its first samples is there: others wait for it."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sessions: OrderedDict[str, None] = OrderedDict()

    # What vLLM's front end calls.

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Take a request.

        Raises:
            VLLMValidationError: when it asks for what a fleet cannot do.
        """
        if request.abort_immediately:
            return  # it tells a KV connector of a request that was refused; none has one here
        _check(request)
        key = _group_key(request)
        if not self._arrived:
            asyncio.get_running_loop().call_soon(self._start_arrived)
        self._arrived.append((key, request))

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._outputs.get()

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        """Let requests end that nobody waits for any more."""
        for request_id in request_ids:
            found = self._places.pop(request_id, None)
            if found is None:
                self._arrived = [one for one in self._arrived if one[1].request_id != request_id]
                continue
            siblings, index = found
            siblings.open.discard(index)
            if not siblings.open and siblings.task is not None:
                siblings.task.cancel()  # its requests are aborted on their engines
            else:
                self._spawn(siblings.listener.drop(index))

    async def reset_prefix_cache_async(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        engines = self._rollout.fleet.ready()
        asked = [engine.reset_prefix_cache(preempt=reset_running_requests) for engine in engines]
        self._rollout.dispatcher.allocator.forget_prefixes()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, EngineDied):
                raise answer
        return all(answer for answer in answers)  # a dead engine's cache is gone

    async def reset_mm_cache_async(self) -> None:
        """There is none."""

    async def reset_encoder_cache_async(self) -> None:
        """There is none."""

    async def get_weight_version_async(self) -> str:
        return version_name(self._rollout.fleet.weight_version)

    def end_all(self, client: AsyncLLM) -> None:
        """Answer whoever still waits: nothing more will come."""
        client.output_processor.propagate_error(EngineDeadError())

    def shutdown(self, timeout: float | None = None) -> None:
        for task in self._tasks:
            task.cancel()

    async def closed(self) -> None:
        """Return when nothing of the front door's runs any more."""
        self.shutdown()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # From requests to groups.

    def _start_arrived(self) -> None:
        """Make groups of what came in one turn of the loop: the n of one request, at least."""
        arrived, self._arrived = self._arrived, []
        groups: dict[_Key, list[EngineCoreRequest]] = {}
        for key, request in arrived:
            groups.setdefault(key, []).append(request)
        for key, requests in groups.items():
            siblings = _Siblings(requests, open=set(range(len(requests))))
            for index, request in enumerate(requests):
                self._places[request.request_id] = siblings, index
            siblings.task = self._spawn(self._generate(siblings, key))

    async def _generate(self, siblings: _Siblings, key: _Key) -> None:
        prompt = key[:2]
        listener = siblings.listener
        listener.on_tokens = functools.partial(self._pass_on, siblings)
        listener.on_end = functools.partial(self._end, siblings)
        listener.on_again = lambda index: siblings.held.pop(index, None)
        try:
            await self._wait_for_leader(prompt)
            leads = self._leading.setdefault(prompt, asyncio.Event())
            listener.on_kv = leads.set
            try:
                work = self._work(siblings.requests, key)
                await self._rollout.dispatcher.run(work, listener=listener)
            finally:
                leads.set()
                if self._leading.get(prompt) is leads:
                    del self._leading[prompt]
        except SplitrollError as exc:
            log.warning("%s: %s", siblings.requests[0].external_req_id, exc)
            self._fail(siblings)
        except asyncio.CancelledError:
            self._fail(siblings)
            raise
        except Exception:  # a fault of ours: nobody may wait for it for ever
            log.exception("%s", siblings.requests[0].external_req_id)
            self._fail(siblings)

    async def _wait_for_leader(self, prompt: tuple[Any, ...]) -> None:
        """Wait until samples of the same prompt that came before have its KV."""
        if (leader := self._leading.get(prompt)) is not None:
            limit_s = self._rollout.config.limits.prefill_timeout_s
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(leader.wait(), limit_s)

    def _work(self, requests: Sequence[EngineCoreRequest], key: _Key) -> GroupWork:
        first = requests[0]
        params = first.sampling_params
        seeds = [r.sampling_params.seed for r in requests]
        greedy = params.temperature == 0.0
        session = first.session_id
        continues = session is not None and self._has_begun(session)
        tokens, salt, (native, plain), streams, _ = key
        return GroupWork(
            prompt=Prompt(first.external_req_id or first.request_id, tokens),
            n=len(requests),
            sampling=_ours(params),
            seed=0,
            episode_id=session if continues else None,
            seeds=tuple(0 if greedy else random.getrandbits(63) if s is None else s for s in seeds),
            native=None if plain else native,
            stream=1 if streams else _AT_THE_END,
            local=params.prompt_logprobs is not None,
            goes_on=_goes_on(params),
            cache_salt=salt,
            logprobs=params.num_logprobs is not None,
            text=False,  # vLLM's front end makes it
        )

    def _has_begun(self, session: str) -> bool:
        """Return whether a session had a turn before, of those that are remembered."""
        before = session in self._sessions
        self._sessions[session] = None
        self._sessions.move_to_end(session)
        while len(self._sessions) > _SESSIONS:
            self._sessions.popitem(last=False)
        return before

    # From tokens to outputs.

    def _pass_on(self, siblings: _Siblings, index: int, tokens: Tokens) -> None:
        if (before := siblings.held.pop(index, None)) is not None:
            self._put(siblings, index, before)
        if tokens.last:
            siblings.held[index] = tokens  # the reason why comes next
        else:
            self._put(siblings, index, tokens)

    def _end(
        self, siblings: _Siblings, index: int, sample: Sample, stop_reason: int | str | None
    ) -> None:
        tokens = siblings.held.pop(index, None)
        reason = _FINISH[sample.finish_reason]
        self._put(siblings, index, tokens, finish_reason=reason, stop_reason=stop_reason)
        self._close(siblings, index)

    def _fail(self, siblings: _Siblings) -> None:
        for index in tuple(siblings.open):
            self._put(siblings, index, None, finish_reason=FinishReason.ERROR)
            self._close(siblings, index)

    def _close(self, siblings: _Siblings, index: int) -> None:
        siblings.open.discard(index)
        self._places.pop(siblings.requests[index].request_id, None)

    def _put(self, siblings: _Siblings, index: int, tokens: Tokens | None, **ending: Any) -> None:
        if index not in siblings.open:
            return
        tokens = tokens or Tokens((), ())
        request = siblings.requests[index]
        wanted = request.sampling_params.num_logprobs
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=list(tokens.token_ids),
            new_logprobs=None if wanted is None else _logprobs(tokens, wanted),
            new_prompt_logprobs_tensors=_prompt_logprobs(
                tokens.prompt_candidates, request.sampling_params.prompt_logprobs
            ),
            **ending,
        )
        version = version_name(tokens.weight_version) if tokens.token_ids else None
        self._outputs.put_nowait(EngineCoreOutputs(outputs=[output], weight_version=version))

    def _spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class FrontEnd(AsyncLLM):  # type: ignore[misc]
    """vLLM's front end with a fleet in the place of its EngineCore.

    Args:
        max_queued: sequences that may be unfinished at once.
    """

    def __init__(self, core: FleetCore, config: VllmConfig, max_queued: int) -> None:
        self._max_queued = max_queued
        with _core_made_by(core):
            # Nothing is executed here.
            super().__init__(config, executor_class=None, log_stats=False, log_requests=False)

    @property
    def is_full(self) -> bool:
        return bool(self.get_num_unfinished_requests() >= self._max_queued)

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
        """See AsyncLLM.

        Raises:
            VLLMValidationError: also for what vLLM finds wrong with a request and takes for a fault
                of the engine's.
        """
        try:
            async with contextlib.aclosing(super().generate(*args, **kwargs)) as outputs:
                async for output in outputs:
                    yield output
        except EngineGenerateError as exc:
            if isinstance(exc.__cause__, ValueError | TypeError):
                raise VLLMValidationError(str(exc.__cause__)) from exc
            raise

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """
        Raises:
            GracefulHTTPError: with status 429, when so many more would be too many now; with 400,
                when they always would.
        """
        if n > self._max_queued:
            message = f"n is {n}: at most {self._max_queued} sequences are taken at once"
            raise GracefulHTTPError(message, HTTPStatus.BAD_REQUEST)
        if self.get_num_unfinished_requests() + n > self._max_queued:
            message = f"over {self._max_queued} sequences would wait; try again later"
            raise GracefulHTTPError(message, HTTPStatus.TOO_MANY_REQUESTS)


@contextlib.contextmanager
def _core_made_by(core: FleetCore) -> Iterator[None]:
    """Let vLLM's factory return our core: AsyncLLM takes none as an argument."""

    def make(**arguments: Any) -> FleetCore:
        return core

    own = EngineCoreClient.make_async_mp_client
    EngineCoreClient.make_async_mp_client = staticmethod(make)
    try:
        yield
    finally:
        EngineCoreClient.make_async_mp_client = staticmethod(own)


def version_name(version: int) -> str:
    """Return a weight version as vLLM's API has it: before any was pushed, "default"."""
    return str(version) if version else "default"


def _check(request: EngineCoreRequest) -> None:
    """
    Raises:
        VLLMValidationError: naming what a fleet cannot do.
    """
    params = request.sampling_params
    asked = {
        "images, audio or video": request.mm_features,
        "prompt_embeds": request.prompt_embeds is not None,
        "a LoRA adapter": request.lora_request is not None,
        "pooling": params is None,
        "prompt_logprob_token_ids": params and params.prompt_logprob_token_ids is not None,
        "trace_decode_token_ids": params and params.trace_decode_token_ids is not None,
        "repetition_detection": params and params.repetition_detection is not None,
        "kv_hints": request.kv_hints is not None,
        "kv_transfer_params": params and "kv_transfer_params" in (params.extra_args or {}),
        "ec_transfer_params": params and "ec_transfer_params" in (params.extra_args or {}),
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise VLLMValidationError(f"this fleet does not take {what}")


def _group_key(request: EngineCoreRequest) -> _Key:
    params = request.sampling_params
    streams = params.output_kind is not RequestOutputKind.FINAL_ONLY
    tokens = tuple(request.prompt_token_ids)
    return tokens, request.cache_salt, _encoded(params), streams, request.session_id


def _encoded(params: Any) -> tuple[bytes, bool]:
    """Return vLLM's parameters without what differs between siblings, encoded by its own library,
    and whether ours say the same."""
    bare = params.clone()
    bare.seed, bare.n, bare.output_kind = None, 1, RequestOutputKind.DELTA
    ours = {name: getattr(bare, name) for name in _PLAIN}
    plain = type(params)(
        **ours,
        max_tokens=bare.max_tokens,
        min_tokens=bare.min_tokens,
        stop=bare.stop,
        stop_token_ids=bare.stop_token_ids,
        output_kind=RequestOutputKind.DELTA,
    )
    skipped = ("skip_clone", "detokenize", "skip_special_tokens", "spaces_between_special_tokens")
    same = all(
        getattr(plain, name) == getattr(bare, name)
        for name in bare.__struct_fields__
        if not name.startswith("_") and name not in skipped
    )
    return msgspec.msgpack.encode(bare), same


def _goes_on(params: Any) -> bool:
    """Return whether a sample may go on in another request: nothing looks at its own output only,
    or tells of its prompt."""
    looks = (
        params.structured_outputs,
        params.bad_words,
        params.thinking_token_budget is not None,
        params.presence_penalty,
        params.frequency_penalty,
        params.prompt_logprobs is not None,
    )
    return not any(looks)


def _ours(params: Any) -> SamplingParams:
    return SamplingParams(
        **{name: getattr(params, name) for name in _PLAIN},
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop=tuple(params.stop or ()),
        stop_token_ids=tuple(params.stop_token_ids or ()),
    )


def _logprobs(tokens: Tokens, wanted: int) -> LogprobsLists | None:
    """Return log-probabilities as EngineCore gives them: a row per token."""
    if not tokens.token_ids:
        return None
    rows = [_row(candidates, wanted) for candidates in tokens.candidates]
    return LogprobsLists(
        np.array([[token for token, _ in row] for row in rows]),
        np.array([[value for _, value in row] for row in rows]),
        np.array([candidates[0][2] for candidates in tokens.candidates]),
    )


def _prompt_logprobs(
    candidates: Sequence[Candidates], wanted: int | None
) -> LogprobsTensors | None:
    if wanted is None or not candidates:
        return None
    rows = [_row(one, wanted) for one in candidates]
    return LogprobsTensors(
        torch.tensor([[token for token, _ in row] for row in rows]),
        torch.tensor([[value for _, value in row] for row in rows], dtype=torch.float32),
        torch.tensor([one[0][2] for one in candidates]),
    )


def _row(candidates: Candidates, wanted: int) -> list[tuple[int, float]]:
    """Return the position's own token, then the most likely ones, itself among them if it is."""
    (token, value, rank), *others = candidates
    likely = [(t, v) for t, v, _ in others]
    if wanted < 0 or len(likely) < wanted:
        likely.insert(rank - 1, (token, value))
    return [(token, value), *likely]
