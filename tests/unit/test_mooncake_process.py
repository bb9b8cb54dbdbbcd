"""What is changed in Mooncake's connector, over real sockets and without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
import zmq
import zmq.asyncio

from splitroll.engines import mooncake_process
from splitroll.engines.mooncake_process import (
    _Connections,
    _forget_what_was_never_known,
    _keep_connections,
    _refuse_unknown_transfers,
)


def make(context: Any, address: str, kind: int, **options: Any) -> Any:
    sock = context.socket(kind)
    sock.connect(address)
    return sock


class Peer:
    """A prefill engine's listener: answers each message, and remembers who sent it."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self.sock = self.context.socket(zmq.ROUTER)
        self.address = f"tcp://127.0.0.1:{self.sock.bind_to_random_port('tcp://127.0.0.1')}"
        self.seen: list[bytes] = []
        self.is_mute = False
        self._task = asyncio.create_task(self._answer())

    async def _answer(self) -> None:
        while True:
            identity, message = await self.sock.recv_multipart()
            self.seen.append(identity)
            if not self.is_mute:
                await self.sock.send_multipart((identity, message))

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.context.destroy(linger=0)


@pytest_asyncio.fixture
async def peer() -> AsyncIterator[Peer]:
    one = Peer()
    yield one
    await one.close()


@pytest_asyncio.fixture
async def context() -> AsyncIterator[Any]:
    one = zmq.asyncio.Context()
    yield one
    one.destroy(linger=0)


async def pull(pool: _Connections, context: Any, address: str) -> bytes:
    with pool.connection(context, address, zmq.DEALER, bind=False, linger=0) as sock:
        sock.setsockopt(zmq.RCVTIMEO, 60_000)
        await sock.send(b"hello")
        return bytes(await sock.recv())


async def test_one_connection_serves_all_pulls_in_turn(peer: Peer, context: Any) -> None:
    pool = _Connections(make)
    for _ in range(20):
        assert await pull(pool, context, peer.address) == b"hello"
    assert len(set(peer.seen)) == 1
    await pool.close()


async def test_pulls_at_once_have_a_connection_each(peer: Peer, context: Any) -> None:
    pool = _Connections(make)
    for _ in range(5):
        await asyncio.gather(*(pull(pool, context, peer.address) for _ in range(3)))
    assert len(set(peer.seen)) == 3
    await pool.close()


async def test_a_pull_from_an_engine_that_dies_fails_at_once(peer: Peer, context: Any) -> None:
    pool = _Connections(make)
    await pull(pool, context, peer.address)
    peer.is_mute = True
    waiting = asyncio.create_task(pull(pool, context, peer.address))
    while len(peer.seen) < 2:
        await asyncio.sleep(0.01)
    await peer.close()
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(waiting, 2)
    with pytest.raises(ConnectionError):  # nor is anything left of what was connected
        await asyncio.wait_for(pull(pool, context, peer.address), 2)


async def test_an_answer_that_came_too_late_reaches_nobody(peer: Peer, context: Any) -> None:
    pool = _Connections(make)
    peer.is_mute = True
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(pull(pool, context, peer.address), 0.2)
    peer.is_mute = False
    assert await pull(pool, context, peer.address) == b"hello"
    assert len(set(peer.seen)) == 2
    await pool.close()


async def test_a_worker_ends_with_connections_kept(peer: Peer) -> None:
    class Worker:
        def __init__(self) -> None:
            self.context = zmq.asyncio.Context()
            self.receiver_loop = asyncio.get_running_loop()

        def shutdown(self) -> None:
            self.context.term()  # waits for all sockets

    connector = SimpleNamespace(make_zmq_socket=make)
    _keep_connections(connector, Worker)
    worker = Worker()
    with connector.make_zmq_socket(worker.context, peer.address, zmq.DEALER) as sock:
        await sock.send(b"hello")
        await sock.recv()
    await asyncio.wait_for(asyncio.to_thread(worker.shutdown), 5)


class Status:
    FINISH, CONTINUE, ERROR = range(3)


def connector() -> Any:
    return SimpleNamespace(
        MooncakeXferResponse=lambda **fields: SimpleNamespace(**fields),
        MooncakeXferResponseStatus=Status,
    )


class Worker:
    """The parts of Mooncake's worker that are changed."""

    def __init__(self, *known: str) -> None:
        self.reqs_need_send = dict.fromkeys(known, object())
        self._encoder = SimpleNamespace(encode=lambda response: response)
        self.sent: list[Any] = []

    async def send_kv_to_decode(self, identity: bytes, sock: Any, meta: Any) -> None:
        self.sent.append(dict(meta.req_blocks))

    async def record_send_reqs(self, metadata: Any) -> None:
        for transfer, _ in metadata.reqs_to_send.values():
            self.reqs_need_send.setdefault(transfer, object())
        for transfer in metadata.reqs_not_processed:
            del self.reqs_need_send[transfer]


@pytest.fixture
def worker_class(monkeypatch: pytest.MonkeyPatch) -> type[Worker]:
    monkeypatch.setattr(mooncake_process, "UNKNOWN_TRANSFER_S", 0.1)
    return type("Patched", (Worker,), {})


class Answers:
    def __init__(self) -> None:
        self.told: list[Any] = []

    async def send_multipart(self, parts: tuple[bytes, Any]) -> None:
        self.told.append(parts[1])


async def asked(worker: Any, **transfers: str) -> list[Any]:
    answers = Answers()
    meta = SimpleNamespace(req_blocks={name: (t, [[1]]) for name, t in transfers.items()})
    await worker.send_kv_to_decode(b"id", answers, meta)
    return answers.told


async def test_a_transfer_that_is_known_is_made(worker_class: Any) -> None:
    _refuse_unknown_transfers(connector(), worker_class)
    worker = worker_class("t1")
    assert await asked(worker, r1="t1") == []
    assert worker.sent == [{"r1": ("t1", [[1]])}]


async def test_a_transfer_that_was_used_is_refused_soon(worker_class: Any) -> None:
    _refuse_unknown_transfers(connector(), worker_class)
    worker = worker_class()
    (answer,) = await asyncio.wait_for(asked(worker, r1="used"), 1)
    assert (answer.status, answer.err_reqs) == (Status.FINISH, ["r1"])
    assert worker.sent == []


async def test_those_that_are_known_are_not_kept_from_it(worker_class: Any) -> None:
    _refuse_unknown_transfers(connector(), worker_class)
    worker = worker_class("t2")
    (answer,) = await asked(worker, r1="used", r2="t2")
    assert (answer.status, answer.err_reqs) == (Status.CONTINUE, ["r1"])
    assert worker.sent == [{"r2": ("t2", [[1]])}]


async def test_a_transfer_that_becomes_known_meanwhile_is_waited_for(worker_class: Any) -> None:
    _refuse_unknown_transfers(connector(), worker_class)
    worker = worker_class()
    asking = asyncio.create_task(asked(worker, r1="t1"))
    await asyncio.sleep(0.03)
    worker.reqs_need_send["t1"] = object()
    assert await asking == []
    assert worker.sent == [{"r1": ("t1", [[1]])}]


async def test_what_was_aborted_before_it_began_is_forgotten_quietly(worker_class: Any) -> None:
    _forget_what_was_never_known(worker_class)
    worker = worker_class("t1")
    metadata = SimpleNamespace(
        reqs_to_send={"r2": ("t2", [])}, reqs_not_processed={"never", "t1", "t2"}
    )
    await worker.record_send_reqs(metadata)
    assert worker.reqs_need_send == {}
