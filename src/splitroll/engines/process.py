"""What must be changed inside vLLM's own processes, applied as a vLLM general plugin.

vLLM imports this in the actor, in EngineCore and in every worker. It acts only in the child
processes of a splitroll engine (`SPLITROLL_ENGINE` is set by the actor's environment). It, `forks`
and `mooncake_process` are the only modules that touch vLLM's, NIXL's and zmq's internals. Each
change says why it is there; all were seen with vllm 0.32.0 and nixl 1.5.1, and each can go once
upstream offers the setting.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import socket
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from splitroll.engines import forks, mooncake_process

ENGINE_ENV = "SPLITROLL_ENGINE"
"""Set to the engine's name in all processes of an engine of ours."""

ACTOR_ENV = "SPLITROLL_ACTOR"
"""Set to its own process id in an engine's actor, whose children the others are."""

WEIGHT_TRANSFER = "splitroll"
"""Name of our weight-transfer engine in vLLM's registry."""

PROGRESS_DELAY_US = 2000
"""Pause between two polls of NIXL's progress thread; 0, its default, burns a core when idle."""

ONLY_IF_CUT = "splitroll_only_if_cut"
"""In a request's connector parameters: hand KV out only if the request ended at its max_tokens."""

STEPS_KEPT = 512
"""Of an engine's last steps, until they are asked for."""

_installed = False


def install() -> None:
    """Apply all changes, once, in a child process of a splitroll engine."""
    global _installed
    is_actor = os.environ.get(ACTOR_ENV) == str(os.getpid())
    if _installed or ENGINE_ENV not in os.environ or is_actor:
        return
    _installed = True
    parent = multiprocessing.parent_process()  # none where Ray looks after it
    if parent is not None and not forks.are_used():
        forks.die_with(parent.pid)
        _exit_directly()
    _add_utilities()
    _offer_weight_transfer()
    _hold_side_channel_port()
    _hand_out_cuts_only()
    _load_once()
    if mooncake_process.BOOTSTRAP_PORT in os.environ:
        mooncake_process.cure()

    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _calm_progress_thread()
        _keep_affinity(current_platform)
        _keep_seeds_over_chunks()
        _make_stage_inputs()
        _leave_no_shared_memory()


def _exit_directly() -> None:
    """Processes with a NIXL agent crash in libnl's destructors at exit; skip those, as forks do.

    Registered early, hence called last of all exit handlers.
    """
    atexit.register(os._exit, 0)


def _add_utilities() -> None:
    """Add utility calls to EngineCore: its load (vLLM's metrics go stale when an engine is idle),
    and an abort that tells what it found."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import RequestStatus

    def splitroll_describe(core: Any) -> tuple[int, int, int, str, list[int]]:
        cache = core.scheduler.kv_cache_config
        spec = cache.kv_cache_groups[0].kv_cache_spec
        rank_bytes = sum(
            group.kv_cache_spec.page_size_bytes * len(group.layer_names)
            for group in cache.kv_cache_groups
        )
        ranks = core.vllm_config.parallel_config.tensor_parallel_size
        stages = core.vllm_config.parallel_config.pipeline_parallel_size
        if stages > 1:  # the scheduler's own description is that of the first stage
            here = sum(len(group.layer_names) for group in cache.kv_cache_groups)
            layers = core.vllm_config.model_config.get_total_num_hidden_layers()
            rank_bytes = rank_bytes * layers // here
        kv_dtype = str(getattr(spec, "dtype", "")).removeprefix("torch.")
        children = (child.pid for child in multiprocessing.active_children())
        pids = [os.getpid(), *(pid for pid in children if pid is not None)]
        return cache.num_blocks - 1, spec.block_size, rank_bytes * ranks, kv_dtype, pids

    def splitroll_load(core: Any) -> tuple[int, int, int, int]:
        scheduler = core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        # One block of the pool is the null block, which is never free.
        held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        running, waiting = scheduler.get_request_counts()
        # Finished here, but their KV is kept for others to pull.
        pinned = sum(request.is_finished() for request in scheduler.requests.values())
        return running, waiting, held, pinned

    def splitroll_abort(core: Any, request_ids: list[str]) -> list[str]:
        aborted = core.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        return [request.request_id for request in aborted]

    def splitroll_steps(core: Any) -> list[StepRow]:
        watch = _watch_of(core.scheduler)
        rows = list(watch.rows)
        watch.rows.clear()
        return rows

    _watch_steps(Scheduler)
    EngineCore.splitroll_steps = splitroll_steps
    EngineCore.splitroll_abort = splitroll_abort
    EngineCore.splitroll_describe = splitroll_describe
    EngineCore.splitroll_load = splitroll_load


StepRow = tuple[float, int, int, int, int]
"""The fields of `StepStats`, in their order."""


class _StepWatch:
    """The last steps of one scheduler."""

    def __init__(self) -> None:
        self.rows: deque[StepRow] = deque(maxlen=STEPS_KEPT)
        self.ended_s = 0.0


def _watch_of(scheduler: Any) -> _StepWatch:
    watch: _StepWatch | None = getattr(scheduler, "splitroll_watch", None)
    if watch is None:
        watch = scheduler.splitroll_watch = _StepWatch()
    return watch


def _watch_steps(scheduler_class: Any) -> None:
    """Time every step and note what was in it: vLLM's own statistics do not say how many tokens
    of context a step read, nor how long it took."""
    schedule, update = scheduler_class.schedule, scheduler_class.update_from_output

    def timed_schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        begun_s = time.perf_counter()
        output = schedule(self, *args, **kwargs)
        output.splitroll_scheduled_s = begun_s
        return output

    def timed_update(self: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        watch = _watch_of(self)
        counts = _step_counts(self.requests, output.num_scheduled_tokens)
        result = update(self, output, *args, **kwargs)
        now_s = time.perf_counter()
        # With async scheduling the next step is scheduled before this one has ended.
        begun_s = max(output.splitroll_scheduled_s, watch.ended_s)
        watch.ended_s = now_s
        if output.total_num_scheduled_tokens:
            watch.rows.append((now_s - begun_s, *counts))
        return result

    scheduler_class.schedule = timed_schedule
    scheduler_class.update_from_output = timed_update


def _step_counts(
    requests: Mapping[str, Any], scheduled: Mapping[str, int]
) -> tuple[int, int, int, int]:
    """Return (sequences, context tokens, prefill tokens, prefill pairs) of a step."""
    sequences = context = prefill = pairs = 0
    for request_id, tokens in scheduled.items():
        if (request := requests.get(request_id)) is None:
            continue
        before = request.num_computed_tokens - tokens  # it counts what is scheduled as computed
        if before >= request.num_prompt_tokens:
            sequences += 1
            context += before + tokens
        else:
            prefill += tokens
            pairs += tokens * before + tokens * tokens // 2
    return sequences, context, prefill, pairs


def _offer_weight_transfer() -> None:
    """Register our weight-transfer engine, and let a worker load an offer in one call: vLLM's API
    takes three, and each waits for the engine's loop and its core."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.v1.worker.worker_base import WorkerBase

    WeightTransferEngineFactory.register_engine(
        WEIGHT_TRANSFER, "splitroll.engines.weight_loader", "OfferedWeights"
    )

    def splitroll_load_weights(worker: Any, offer: Any) -> tuple[float, dict[str, str]]:
        worker._weight_update_active = False  # stays set when an update's last step fails
        worker.start_weight_update()
        worker.update_weights({"offer": offer})
        worker.finish_weight_update()
        engine = worker.weight_transfer_engine
        return engine.seconds, engine.checksums

    WorkerBase.splitroll_load_weights = splitroll_load_weights


def _hold_side_channel_port() -> None:
    """Let the process that binds NIXL's side channel choose its port and hold it until then.

    vLLM takes the port from the environment, where somebody else may have taken it meanwhile, and
    a failed bind in its listener thread hangs the start for ever. Port 0 means: choose one here.
    """
    from vllm import envs
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_scheduler
    from vllm.utils.network_utils import make_zmq_socket

    scheduler_class = base_scheduler.NixlBaseConnectorScheduler
    original_init = scheduler_class.__init__
    original_zmq_ctx = base_scheduler.zmq_ctx
    held: dict[str, socket.socket] = {}

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        host = self.side_channel_host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        port = self.side_channel_port if envs.VLLM_NIXL_SIDE_CHANNEL_PORT else 0
        try:
            listener.bind((host, port))
        except OSError as exc:
            raise OSError(exc.errno, f"NIXL side channel {host}:{port}: {exc.strerror}") from exc
        listener.listen()
        self.side_channel_port = listener.getsockname()[1]
        held[base_scheduler.make_zmq_path("tcp", host, self.side_channel_port)] = listener

    def zmq_ctx(socket_type: Any, addr: str) -> Any:
        listener = held.pop(addr, None)
        if listener is None:
            return original_zmq_ctx(socket_type, addr)
        return _ListeningContext(make_zmq_socket, socket_type, addr, listener)

    scheduler_class.__init__ = init
    base_scheduler.zmq_ctx = zmq_ctx


def _hand_out_cuts_only() -> None:
    """A sample that ended by itself has no use for a handle, which would pin its KV; the connector
    makes one for whatever finished by length or by a stop."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import pull_scheduler
    from vllm.v1.request import RequestStatus

    scheduler_class = pull_scheduler.NixlPullConnectorScheduler
    original = scheduler_class.request_finished

    def request_finished(self: Any, request: Any, block_ids: Any) -> Any:
        params = request.kv_transfer_params
        cut = request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        if params and params.get(ONLY_IF_CUT) and not cut:
            params["do_remote_decode"] = False
            self._reqs_not_processed.add(request.request_id)
            self._reqs_need_save.pop(request.request_id, None)
        return original(self, request, block_ids)

    scheduler_class.request_finished = request_finished


def _load_once() -> None:
    """A request that has loaded a handle, and is to hand one out, keeps the first one's parameters.
    When it is preempted, the connector promises its KV once more and never loads it, so that the
    request waits for ever. Then its prompt is to be computed as any other's."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import pull_scheduler

    scheduler_class = pull_scheduler.NixlPullConnectorScheduler
    original = scheduler_class.get_num_new_matched_tokens

    def get_num_new_matched_tokens(
        self: Any, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        if (request.kv_transfer_params or {}).get("_remote_blocks_processed"):
            return 0, False
        found: tuple[int, bool] = original(self, request, num_computed_tokens)
        return found

    scheduler_class.get_num_new_matched_tokens = get_num_new_matched_tokens


class _ListeningContext:
    """A zmq socket on a listener that is already bound, closed with its context."""

    def __init__(self, make: Any, socket_type: Any, addr: str, listener: socket.socket) -> None:
        import zmq

        self._context: Any = zmq.Context()  # type: ignore[attr-defined]
        self._make = make
        self._arguments = (self._context, addr, socket_type)
        self._listener = listener

    def __enter__(self) -> Any:
        return self._make(*self._arguments, bind=True, listener=self._listener)

    def __exit__(self, *exc: object) -> None:
        self._context.destroy(linger=0)


def _calm_progress_thread() -> None:
    """NIXL's Python API fixes the progress thread's delay at 0, and vLLM offers no setting."""
    try:
        from nixl import _bindings
    except ImportError:
        return  # a colocated engine needs no NIXL; a split one fails with vLLM's own error
    original = _bindings.nixlAgent

    def agent(name: str, config: Any) -> Any:
        config.pthrDelay = PROGRESS_DELAY_US
        return original(name, config)

    _bindings.nixlAgent = agent


def _keep_affinity(platform: Any) -> None:
    """vLLM's NIXL worker pins itself to the last core of each NUMA node, so that all engines of a
    host share one core; our placement decides instead."""
    type(platform).discover_numa_topology = classmethod(lambda cls: [])


def _make_stage_inputs() -> None:
    """A pipeline stage copies its input into a buffer that the first warm-up makes, of which there
    is none on CPU without compilation; then its first step ends the engine."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner.sync_and_gather_intermediate_tensors

    def sync_and_gather_intermediate_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return original(self, *args, **kwargs)

    GPUModelRunner.sync_and_gather_intermediate_tensors = sync_and_gather_intermediate_tensors


def _leave_no_shared_memory() -> None:
    """Ranks on CPU exchange tensors in shared memory of 4 MB each, which nobody removes. Once all
    have it open, its name is of no more use."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    original = _CPUSHMDistributed._init_cpu_shm

    def init_cpu_shm(self: Any) -> int:
        handle: int = original(self)  # ends with a barrier
        name = f"{self.group_name}_{self.communicator.rank}"
        Path("/dev/shm", name).unlink(missing_ok=True)
        return handle

    _CPUSHMDistributed._init_cpu_shm = init_cpu_shm


def _keep_seeds_over_chunks() -> None:
    """A seeded request whose prompt is computed in chunks kills vLLM's CPU engine.

    The token sampled after each chunk but the last is thrown away, and vLLM rewinds the request's
    generator by an offset, which only CUDA generators have. Put its state back instead.
    """
    import numpy as np
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original_sample = GPUModelRunner._sample
    original_bookkeeping = GPUModelRunner._bookkeeping_sync

    def discarded(runner: Any) -> list[int]:
        batch = runner.input_batch
        rows = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0]
        return [int(row) for row in rows if int(row) in batch.generators]

    def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = [self.input_batch.generators[row] for row in discarded(self)]
        states = [generator.get_state() for generator in generators]
        output = original_sample(self, *args, **kwargs)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        return output

    def bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        hidden = {row: generators.pop(row) for row in discarded(self)}
        try:
            return original_bookkeeping(self, *args, **kwargs)
        finally:
            generators.update(hidden)

    GPUModelRunner._sample = sample
    GPUModelRunner._bookkeeping_sync = bookkeeping_sync
