"""Weights through vLLM's own GPU transports, NCCL broadcast and CUDA IPC. Never run on a GPU by us.

vLLM's weight-transfer engine of the same name runs in every worker. One trainer rank sends; the
others take part in gathering. Engines join the trainer's NCCL group when they load their first
version; an engine that came or went since makes a new group.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from splitroll.weights.disk import DiskOutbox, DiskPlan, DiskTransport
from splitroll.weights.manifest import Manifest, worker_ranks
from splitroll.weights.offer import NativeOffer, Receiver, WeightOffer
from splitroll.weights.source import Source, materialize

Backend = Literal["nccl", "ipc"]
Send = Callable[["NativePlan", Source], None]


@dataclass(slots=True)
class NativePlan:
    """See `splitroll.weights.transport.WritePlan`.

    Attributes:
        offer: what engines are told; of IPC it is complete once handles to all parameters are made.
        copy: writes the same to files, for restarts and roll-backs; None keeps no copy.
    """

    offer: NativeOffer
    world_size: int
    copy: DiskPlan | None

    def write(self, rank: int, source: Source, checksums: Sequence[str]) -> Mapping[str, str]:
        if rank == 0:
            _SENDERS[self.offer.backend](self, source)
        else:
            for name in source.tensors:
                source.take_part(name)
        return {} if self.copy is None else self.copy.write(rank, source, checksums)


class NativeOutbox:
    """See `splitroll.weights.transport.Outbox`."""

    def __init__(self, plan: NativePlan, copy: DiskOutbox | None) -> None:
        self.plan = plan
        self.copy = copy

    @property
    def is_readable(self) -> bool:
        """NCCL sends only while engines receive; IPC has something to read once handles exist."""
        return self.plan.offer.backend == "nccl" or "ipc_handles" in self.plan.offer.update

    def offer(self, checksums: Sequence[str] = ()) -> WeightOffer:
        return WeightOffer(native=self.plan.offer)

    def seal(self) -> None:
        if self.copy is not None:
            self.copy.seal()

    def abandon(self) -> None:
        if self.copy is not None:
            self.copy.abandon()


class NativeTransport:
    """See the module's docstring.

    Args:
        address: of this host, as engines reach it.
        copies: keeps the version that serves in files; None keeps none.
    """

    one_sender = True

    def __init__(self, backend: Backend, address: str, copies: DiskTransport | None) -> None:
        self._backend = backend
        self._address = address
        self._copies = copies
        self._joined: tuple[Receiver, ...] = ()
        self._rendezvous = ("", 0)

    def begin(
        self,
        version: int,
        shares: Sequence[Manifest],
        writers: Sequence[int],
        receivers: Sequence[Receiver],
    ) -> NativeOutbox:
        if tuple(receivers) != self._joined:
            self._joined = tuple(receivers)
            self._rendezvous = (self._address, _free_port(self._address))
        (manifest, *_) = shares
        offer = native_offer(self._backend, manifest, receivers, self._rendezvous)
        copy = None
        if self._copies is not None:
            copy = self._copies.begin(version, shares, writers, receivers)
        world_size = 1 + sum(receiver.workers for receiver in receivers)
        plan = NativePlan(offer, world_size, None if copy is None else copy.plan)
        return NativeOutbox(plan, copy)

    def commit(self, outbox: NativeOutbox) -> None:
        if self._copies is not None and outbox.copy is not None:
            self._copies.commit(outbox.copy)

    def discard(self, outbox: NativeOutbox) -> None:
        self._joined = ()  # a collective that failed leaves its group unusable
        if self._copies is not None and outbox.copy is not None:
            self._copies.discard(outbox.copy)

    def current(self) -> WeightOffer | None:
        return None if self._copies is None else self._copies.current()

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._copies is not None:
            yield from self._copies.read()

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()


def native_offer(
    backend: Backend,
    manifest: Manifest,
    receivers: Sequence[Receiver],
    rendezvous: tuple[str, int],
) -> NativeOffer:
    """Return what every engine needs to receive; pure.

    In the NCCL group the trainer is rank 0, and an engine's workers follow from its `rank_offset`.
    """
    address, port = rendezvous
    workers = {receiver.name: receiver.workers for receiver in receivers}
    init: dict[str, dict[str, Any]] = {name: {"packed": False} for name in workers}
    if backend == "nccl":
        world_size = 1 + sum(workers.values())
        init = {
            name: {
                "master_address": address,
                "master_port": port,
                "rank_offset": ranks[0],
                "world_size": world_size,
                "packed": True,
            }
            for name, ranks in worker_ranks(workers).items()
        }
    update = {
        "names": [spec.name for spec in manifest],
        "dtype_names": [spec.dtype for spec in manifest],
        "shapes": [list(spec.shape) for spec in manifest],
    }
    return NativeOffer(backend, f"{address}:{port}", init, update)


def _send_nccl(plan: NativePlan, source: Source) -> None:
    from vllm.distributed.weight_transfer import nccl_engine

    init = next(iter(plan.offer.init.values()))
    if plan.offer.rendezvous not in _ENDPOINTS:
        for endpoint in _ENDPOINTS.values():
            endpoint.shutdown()
        _ENDPOINTS.clear()
        info = nccl_engine.NCCLTrainerInitInfo(
            rank=0,
            master_address=init["master_address"],
            master_port=init["master_port"],
            world_size=plan.world_size,
        )
        _ENDPOINTS[plan.offer.rendezvous] = (
            nccl_engine.NCCLTrainerWeightTransferEngine.trainer_init(
                info, client=_Driven(), source=_AsSent(plan, source)
            )
        )
    endpoint = _ENDPOINTS[plan.offer.rendezvous]
    endpoint.source = _AsSent(plan, source)
    endpoint.send_weights()


def _share_ipc(plan: NativePlan, source: Source) -> None:
    from torch.multiprocessing.reductions import reduce_tensor

    device = torch.accelerator.current_device_index()
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    _KEPT.clear()
    handles = []
    for _, tensor in _AsSent(plan, source):
        _KEPT.append(tensor.contiguous())  # a handle does not keep its memory alive
        handles.append({uuid: reduce_tensor(_KEPT[-1])[1]})
    plan.offer.update["ipc_handles"] = handles


_SENDERS: dict[Backend, Send] = {"nccl": _send_nccl, "ipc": _share_ipc}
_ENDPOINTS: dict[str, Any] = {}
"""vLLM's trainer ends by rendezvous; one at a time."""
_KEPT: list[torch.Tensor] = []
"""Tensors of the last IPC update, until the next."""


class _AsSent:
    """A source in the dtypes and the order of the offer, as vLLM's WeightSource."""

    def __init__(self, plan: NativePlan, source: Source) -> None:
        self._update = plan.offer.update
        self._source = source

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        rows = zip(
            self._update["names"], self._update["dtype_names"], self._update["shapes"], strict=True
        )
        return [ParamMeta(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in rows]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype in zip(self._update["names"], self._update["dtype_names"], strict=True):
            yield name, materialize(self._source.tensors[name]).to(getattr(torch, dtype))


class _Driven:
    """vLLM's client of the engines' side, which our transaction drives itself."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


def _free_port(address: str) -> int:
    """Return a port that is free now.

    vLLM's rendezvous binds it later, and takes no socket that is held for it. A port that was taken
    meanwhile fails the update, and the next one takes another.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
