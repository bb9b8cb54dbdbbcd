"""What must be changed in Mooncake's connector inside vLLM's own processes; see `process`.

All were seen with vllm 0.32.0 and mooncake-transfer-engine-non-cuda.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from splitroll.engines.protocol import KvParams

BOOTSTRAP_PORT = "VLLM_MOONCAKE_BOOTSTRAP_PORT"
UNKNOWN_TRANSFER_S = 2.0
"""How long a prefill engine waits for a transfer that it does not know. Decode asks once prefill
has ended, and the worker learns of that a step of the engine later."""
_POLL_S = 0.005
_CLOSE_TIMEOUT_S = 2.0


def own_handle(asked: KvParams, engine_id: str, bootstrap: str) -> KvParams | None:
    """Return the handle to what a request left on its engine; the connector itself answers nothing.

    Args:
        asked: the request's own parameters.
        bootstrap: the engine's bootstrap address.
    """
    if not asked.get("do_remote_decode") or not asked.get("transfer_id"):
        return None
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": asked["transfer_id"],
        "remote_engine_id": engine_id,
        "remote_bootstrap_addr": bootstrap,
    }


def cure() -> None:
    """Apply all changes; only in engines with Mooncake's connector."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import (
        mooncake_connector,
        mooncake_utils,
    )

    _keep_bootstrap_at_home(mooncake_connector, mooncake_utils.MooncakeBootstrapServer)
    worker_class = mooncake_connector.MooncakeConnectorWorker
    _refuse_unknown_transfers(mooncake_connector, worker_class)
    _forget_what_was_never_known(worker_class)
    _keep_connections(mooncake_connector, worker_class)
    _have_a_device()


def _keep_bootstrap_at_home(connector: Any, server_class: Any) -> None:
    """The bootstrap server listens on all interfaces, and lets anybody register; workers look for
    it at loopback, or where the first data-parallel rank is. It is where its peers look for it."""
    host = os.environ.get("VLLM_HOST_IP")
    if not host:
        return
    original = server_class.__init__

    def init(self: Any, everywhere: str, port: int) -> None:
        original(self, host, port)

    def address(config: Any) -> tuple[str, int]:
        return host, int(os.environ[BOOTSTRAP_PORT])

    server_class.__init__ = init
    connector.get_mooncake_bootstrap_addr = address


def _refuse_unknown_transfers(connector: Any, worker_class: Any) -> None:
    """A decode engine that asks for a transfer that has ended, or never was, waits for it until the
    time limit of all transfers, which is the lease of their KV. Tell it soon."""
    original = worker_class.send_kv_to_decode
    status = connector.MooncakeXferResponseStatus

    async def send_kv_to_decode(self: Any, identity: bytes, sock: Any, meta: Any) -> None:
        unknown = await _unknown(self.reqs_need_send, meta.req_blocks)
        for request_id in unknown:
            del meta.req_blocks[request_id]
        if unknown:
            response = connector.MooncakeXferResponse(
                status=status.CONTINUE if meta.req_blocks else status.FINISH,
                err_reqs=unknown,
                err_msg="no such transfer: it was used, given back or has expired",
            )
            await sock.send_multipart((identity, self._encoder.encode(response)))
        if meta.req_blocks:
            await original(self, identity, sock, meta)

    worker_class.send_kv_to_decode = send_kv_to_decode


async def _unknown(known: Any, asked: Any) -> list[str]:
    """Return the requests for transfers that are not known, after giving them a moment to be."""
    loop = asyncio.get_running_loop()
    end = loop.time() + UNKNOWN_TRANSFER_S
    while True:
        unknown = [name for name, (transfer, _) in asked.items() if transfer not in known]
        if not unknown or loop.time() > end:
            return unknown
        await asyncio.sleep(_POLL_S)


def _forget_what_was_never_known(worker_class: Any) -> None:
    """A request that is aborted while it waits was never told to the worker, which raises when it
    is to forget it, and then forgets none of those after it."""
    original = worker_class.record_send_reqs

    async def record_send_reqs(self: Any, metadata: Any) -> None:
        known = {*self.reqs_need_send, *(name for name, _ in metadata.reqs_to_send.values())}
        metadata.reqs_not_processed = metadata.reqs_not_processed & known
        await original(self, metadata)

    worker_class.record_send_reqs = record_send_reqs


def _keep_connections(connector: Any, worker_class: Any) -> None:
    """A pull opens a connection of its own, which then stays in TIME_WAIT for a minute, and waits
    for an answer until the lease of the KV has ended, even one of an engine that is gone."""
    pool = _Connections(connector.make_zmq_socket)
    original = worker_class.shutdown

    def shutdown(self: Any) -> None:
        loop = getattr(self, "receiver_loop", None)
        if loop is not None and loop.is_running():
            closing = asyncio.run_coroutine_threadsafe(pool.close(), loop)
            with contextlib.suppress(TimeoutError):
                closing.result(_CLOSE_TIMEOUT_S)  # the context's end waits for its sockets
        original(self)

    connector.make_zmq_socket = pool.connection
    worker_class.shutdown = shutdown


class _Connections:
    """Connections to prefill engines, each of one pull at a time. Lives in one event loop."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._idle: dict[str, list[_Connection]] = {}

    @contextlib.contextmanager
    def connection(self, *args: Any, **options: Any) -> Iterator[_Connection]:
        """Take the place of `make_zmq_socket` as the connector calls it: to pull, and only then."""
        address = args[1]
        idle = self._idle.setdefault(address, [])
        while idle:
            if not (connection := idle.pop()).is_lost:
                break
            connection.close()
        else:
            connection = _Connection(self._make(*args, **options), self._forget)
        try:
            yield connection
        except BaseException:
            connection.close()  # an answer may still come
            raise
        if connection.is_lost:
            connection.close()
        else:
            idle.append(connection)

    def _forget(self, connection: _Connection) -> None:
        """Close an idle connection to an engine that is gone, which would be tried for ever."""
        for idle in self._idle.values():
            if connection in idle:
                idle.remove(connection)
                connection.close()

    async def close(self) -> None:
        for idle in self._idle.values():
            while idle:
                idle.pop().close()


class _Connection:
    """A zmq socket whose `recv` fails as soon as its peer is gone."""

    def __init__(self, sock: Any, on_lost: Callable[[_Connection], None]) -> None:
        import zmq

        self._sock = sock
        # A connection that breaks proves nothing: who pushes may go on, and blocks must not be
        # given to others meanwhile. One that is refused does: nobody listens there any more.
        refused = zmq.EVENT_CLOSED  # type: ignore[attr-defined]
        self._monitor = sock.get_monitor_socket(refused)
        self._lost = asyncio.ensure_future(self._watch())
        self._lost.add_done_callback(lambda _: on_lost(self))
        self._is_closed = False
        self.setsockopt = sock.setsockopt
        self.send = sock.send

    @property
    def is_lost(self) -> bool:
        return self._lost.done()

    async def _watch(self) -> None:
        import zmq
        from zmq.utils.monitor import recv_monitor_message

        with contextlib.suppress(zmq.ZMQError):  # type: ignore[attr-defined]
            await recv_monitor_message(self._monitor)

    async def recv(self) -> bytes:
        answer = asyncio.ensure_future(self._sock.recv())
        try:
            await asyncio.wait([answer, self._lost], return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return bytes(answer.result())
        finally:
            answer.cancel()
        raise ConnectionError("the prefill engine is gone")

    def close(self) -> None:
        import zmq

        if self._is_closed:
            return
        self._is_closed = True
        self._lost.cancel()
        with contextlib.suppress(zmq.ZMQError):  # type: ignore[attr-defined]
            self._sock.disable_monitor()
        self._monitor.close(linger=0)
        self._sock.close(linger=0)


def _have_a_device() -> None:
    """Mooncake's worker asks for the accelerator's index where there is none."""
    import torch

    if not torch.accelerator.is_available():
        torch.accelerator.current_device_index = lambda: 0
