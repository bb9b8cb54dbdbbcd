"""The only owner of engine processes: launches, proves, watches and restarts them.

Invariants:
- an engine serves only after every pair that it is part of has been proven;
- a restarted engine has a new connector id, so that no peer can use what it knew of the old one;
- a death is reported once, by whoever sees it first: a failed call or the health check;
- when the fleet closes, every engine that it launched has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Sequence,
)
from dataclasses import dataclass, field
from typing import Any, Protocol

from splitroll.config.schema import Limits
from splitroll.engines.protocol import Engine, EngineCounters
from splitroll.errors import EngineDied, EngineStartError, ProofError, SplitrollError
from splitroll.fleet.prove import PairProof
from splitroll.placement import EngineSpec
from splitroll.types import Role

log = logging.getLogger(__name__)

_COUNTERS_LAG_S = 0.1
_RESTART_PAUSE_S = 1.0
"""Before a second attempt to restart an engine; doubled for each further one."""


class Launcher(Protocol):
    """Starts engines; the fleet's only way to make one."""

    async def launch(self, spec: EngineSpec, generation: int) -> Engine:
        """Start one incarnation of an engine; cleans up after itself when cancelled or failed.

        Raises:
            EngineStartError: with the engine's own error.
        """
        ...


Prover = Callable[[Sequence[Engine], Sequence[Engine]], Awaitable[list[PairProof]]]
"""Proves every pair of the given prefill and decode engines; raises ProofError."""


class MemberState(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"


@dataclass(slots=True)
class Member:
    """One place in the fleet, and the engine that holds it now."""

    spec: EngineSpec
    state: MemberState = MemberState.STARTING
    engine: Engine | None = None
    generation: int = 0
    restarts: int = 0
    last_error: str | None = None
    seen: EngineCounters = field(default_factory=EngineCounters)
    """Counters of the present incarnation, as last read."""
    retired: EngineCounters = field(default_factory=EngineCounters)
    """Counters of incarnations that ended."""
    proving: EngineCounters = field(default_factory=EngineCounters)
    """What start-up proofs added to the counters."""


class Fleet:
    """A set of engines under supervision. Make one with `Fleet.open`."""

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        launcher: Launcher,
        prove: Prover | None,
        limits: Limits,
        *,
        elastic: bool = False,
    ) -> None:
        self.members = {spec.name: Member(spec) for spec in specs}
        self.weight_version = 0
        """Of all engines that serve."""
        self.proofs: list[PairProof] = []
        self._launcher = launcher
        self._prove = prove
        self._elastic = elastic
        self._limits = limits
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._joining = asyncio.Lock()
        self._listeners: list[Callable[[], None]] = []
        self._update_weights: Callable[[Engine], Awaitable[None]] | None = None
        self._unwatched: set[str] = set()

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        specs: Sequence[EngineSpec],
        launcher: Launcher,
        limits: Limits,
        make_prover: Callable[[Fleet], Prover] | None = None,
        on_state: Callable[[Fleet], None] = lambda fleet: None,
        *,
        elastic: bool = False,
    ) -> AsyncGenerator[Fleet, None]:
        """Start all engines in parallel, prove all pairs, supervise; close all at the end.

        Args:
            elastic: any engine may hand KV to any other, so that each ordered pair is one to prove.

        Raises:
            EngineStartError: the first engine that did not come up; the others are ended.
            ProofError: a pair does not hand off KV.
        """
        fleet = cls(specs, launcher, None, limits, elastic=elastic)
        if make_prover is not None:
            fleet._prove = make_prover(fleet)
        fleet.on_change(lambda: on_state(fleet))
        try:
            await fleet._start()
            yield fleet
        finally:
            await fleet._close()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call back whenever a member's state changes."""
        self._listeners.append(listener)

    def on_join(self, update_weights: Callable[[Engine], Awaitable[None]]) -> None:
        """Set what brings a restarted engine to the fleet's weight version before it serves."""
        self._update_weights = update_weights

    async def close_membership(self) -> None:
        """Return when no engine is joining; none joins until it is opened again."""
        await self._joining.acquire()

    def open_membership(self) -> None:
        self._joining.release()

    @contextlib.contextmanager
    def unwatched(self, engines: Iterable[Engine]) -> Generator[None, None, None]:
        """Check no health of engines meanwhile: one that loads weights answers nothing."""
        self._unwatched = {engine.info.name for engine in engines}
        try:
            yield
        finally:
            self._unwatched = set()

    def ready(self, *roles: Role) -> list[Engine]:
        """Return the engines that serve, of the given roles (all if none is given)."""
        return [
            member.engine
            for member in self.members.values()
            if member.state is MemberState.READY
            and member.engine is not None
            and (not roles or member.spec.role in roles)
        ]

    def up(self, *roles: Role) -> list[Engine]:
        """Return the engines that run, whether they serve or are yet to be proven."""
        return [
            member.engine
            for member in self.members.values()
            if member.engine is not None and (not roles or member.spec.role in roles)
        ]

    @property
    def given_up(self) -> str | None:
        """Why nothing will serve any more: all engines are given up; None while one is not."""
        members = self.members.values()
        if not all(member.state is MemberState.FAILED for member in members):
            return None
        return "; ".join(f"{m.spec.name} is given up: {m.last_error}" for m in members)

    async def wait_ready(self, *roles: Role, timeout_s: float) -> bool:
        """Wait until an engine of these roles serves; False when none can, or none does in time."""

        def settled() -> bool:
            mine = [m for m in self.members.values() if not roles or m.spec.role in roles]
            return bool(self.ready(*roles)) or all(m.state is MemberState.FAILED for m in mine)

        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(settled)
        except TimeoutError:
            return False
        return bool(self.ready(*roles))

    def report_death(self, engine: Engine, cause: str) -> None:
        """Take an engine out of service and restart it; does nothing if that is under way."""
        member = self.members[engine.info.name]
        if member.engine is not engine or member.state is not MemberState.READY:
            return
        log.warning("engine %s died: %s; restarting it", engine.info.name, cause)
        member.last_error = cause
        self._retire_counters(member)
        member.engine = None
        self._spawn(self._restart(member, engine))
        self._set_state(member, MemberState.RESTARTING)

    async def prove_all(self) -> None:
        """Prove all pairs that serve, as at the start.

        Raises:
            ProofError: a pair does not hand off KV.
        """
        async with self._joining:
            engines = self.ready()
            self.proofs = await self._prove_new(engines, engines)

    @contextlib.asynccontextmanager
    async def uncounted(self, engine: Engine) -> AsyncGenerator[None, None]:
        """Keep what an engine that is otherwise idle does meanwhile out of its counters."""
        member = self.members[engine.info.name]
        before = await engine.counters()
        yield
        after = await engine.counters()
        while (later := await self._counters_after(engine)) != after:
            after = later
        member.proving += after - before

    async def _counters_after(self, engine: Engine) -> EngineCounters:
        """Return the counters of a moment later: they lag behind by an engine step."""
        await asyncio.sleep(_COUNTERS_LAG_S)
        return await engine.counters()

    async def counters(self) -> dict[str, EngineCounters]:
        """Return each engine's counters: earlier incarnations included, proofs left out.

        Of an incarnation that died, they are those of the last health check.
        """
        await asyncio.gather(*(self._read_counters(m) for m in self.members.values()))
        return self._counted()

    async def counters_within(self, limit_s: float) -> dict[str, EngineCounters]:
        """Return the counters as `counters` does; of engines that do not answer in time, those of
        the last time that they did."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                return await self.counters()
        return self._counted()

    def _counted(self) -> dict[str, EngineCounters]:
        return {name: m.retired + m.seen - m.proving for name, m in self.members.items()}

    async def _start(self) -> None:
        launches = [
            asyncio.create_task(self._launch(member, member.generation))
            for member in self.members.values()
        ]
        try:
            for launch in asyncio.as_completed(launches):
                await launch
        except BaseException:
            for task in launches:
                task.cancel()
            await asyncio.gather(*launches, return_exceptions=True)
            raise
        engines = [member.engine for member in self.members.values() if member.engine is not None]
        self.proofs = await self._prove_new(engines, engines)
        for member in self.members.values():
            self._set_state(member, MemberState.READY)
        self._spawn(self._watch())

    async def _launch(self, member: Member, generation: int) -> Engine:
        limit_s = self._limits.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                member.engine = await self._launcher.launch(member.spec, generation)
        except TimeoutError as exc:
            raise EngineStartError(
                member.spec.name, f"it was not ready in {limit_s:g} s (limits.start_timeout_s)"
            ) from exc
        return member.engine

    async def _prove_new(self, new: Sequence[Engine], present: Sequence[Engine]) -> list[PairProof]:
        """Prove all pairs that have a new engine in them."""
        if self._prove is None:
            return []
        proofs: list[PairProof] = []
        try:
            for engine in new:
                if self._hands_out(engine):
                    proofs += await self._prove([engine], self._loaders(engine, present))
            for engine in new:
                others = [e for e in present if e not in new and engine in self._loaders(e, new)]
                if others:
                    proofs += await self._prove(others, [engine])
        except ProofError as exc:
            proofs += exc.proofs
            raise
        finally:
            await self._count_proofs(proofs)
        return proofs

    def _hands_out(self, engine: Engine) -> bool:
        return self._elastic or engine.info.role is Role.PREFILL

    def _loaders(self, source: Engine, engines: Sequence[Engine]) -> list[Engine]:
        """Return those of some engines that may load KV of another one."""
        if not self._hands_out(source):
            return []
        return [
            engine
            for engine in engines
            if engine is not source and (self._elastic or engine.info.role is Role.DECODE)
        ]

    async def _count_proofs(self, proofs: Sequence[PairProof]) -> None:
        """Keep what the proofs did apart from what is done for groups."""
        for proof in proofs:
            if proof.kv_bytes:
                for name, added in zip(
                    (proof.prefill, proof.decode), proof.counters(), strict=True
                ):
                    self.members[name].proving += added
        for name in {name for proof in proofs for name in (proof.prefill, proof.decode)}:
            await self._read_counters(self.members[name])

    async def _restart(self, member: Member, old: Engine) -> None:
        with contextlib.suppress(SplitrollError):
            await old.close()
        for attempt in range(self._limits.max_restarts):
            await asyncio.sleep(_RESTART_PAUSE_S * (2**attempt - 1))
            member.restarts += 1
            member.generation += 1
            try:
                engine = await self._launch(member, member.generation)
                await self._join(member, engine)
            except Exception as exc:  # a wall: whatever it was, the next attempt may succeed
                member.last_error = str(exc)
                log.warning("restart %d of %s: %s", member.restarts, member.spec.name, exc)
                await self._discard(member)
                continue
            log.info("engine %s is back", member.spec.name)
            return
        log.error("engine %s is given up: %s", member.spec.name, member.last_error)
        self._set_state(member, MemberState.FAILED)

    async def _join(self, member: Member, engine: Engine) -> None:
        """Prove a restarted engine against all that serve, and let it serve.

        One engine at a time, so that two that come back together prove their own pair too. A proof
        that a partner had no time for, or died in, says nothing about the engine: prove again.
        """
        end_s = time.monotonic() + self._limits.start_timeout_s
        while True:
            try:
                async with self._joining:
                    if self._update_weights is not None:
                        await self._update_weights(engine)
                    await self._prove_new([engine], [engine, *self.ready()])
                    self._set_state(member, MemberState.READY)
                    return
            except ProofError as exc:
                failed = [p for p in exc.proofs if p.problem is not None]
                conclusive = not all(proof.inconclusive for proof in failed)
                if conclusive or time.monotonic() > end_s:
                    raise
                await engine.health()
                log.warning("proof of %s is to be repeated: %s", member.spec.name, exc)
            await asyncio.sleep(_RESTART_PAUSE_S)

    async def _discard(self, member: Member) -> None:
        engine, member.engine = member.engine, None
        self._retire_counters(member)
        if engine is not None:
            with contextlib.suppress(SplitrollError):
                await engine.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._limits.health_interval_s)
            await asyncio.gather(*(self._check(member) for member in self.members.values()))

    async def _check(self, member: Member) -> None:
        engine = member.engine
        if engine is None or member.state is not MemberState.READY:
            return
        if member.spec.name in self._unwatched:
            return
        limit_s = self._limits.health_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await engine.health()
            await self._read_counters(member)
        except EngineDied as exc:
            self.report_death(engine, exc.cause)
        except TimeoutError:
            if member.spec.name not in self._unwatched:  # it may have begun to load weights
                self.report_death(engine, f"it answered no health check for {limit_s:g} s")
        except Exception as exc:  # a wall: supervision goes on whatever an engine answers
            self.report_death(engine, f"its health check failed: {type(exc).__name__}: {exc}")

    async def _read_counters(self, member: Member) -> None:
        if (engine := member.engine) is None:
            return
        with contextlib.suppress(SplitrollError, TimeoutError):
            async with asyncio.timeout(self._limits.health_timeout_s):
                counters = await engine.counters()
            if member.engine is engine:  # it may have died, and been counted, meanwhile
                member.seen = counters

    def _retire_counters(self, member: Member) -> None:
        member.retired += member.seen
        member.seen = EngineCounters()

    def _set_state(self, member: Member, state: MemberState) -> None:
        member.state = state
        for listener in self._listeners:
            try:
                listener()
            except Exception:  # a wall: a display must never stop the supervision
                log.exception("a listener to the fleet's state failed")
        self._spawn(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a fleet task failed", exc_info=error)

    async def _close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._discard(member) for member in self.members.values()))
