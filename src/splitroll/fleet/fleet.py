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
import math
import time
from collections import Counter
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
from splitroll.config.topology import KvRoles
from splitroll.engines.protocol import Engine, EngineCounters
from splitroll.errors import EngineDied, EngineStartError, LegError, ProofError, SplitrollError
from splitroll.fleet.prove import PairProof
from splitroll.placement import EngineSpec
from splitroll.types import Role

log = logging.getLogger(__name__)

_COUNTERS_LAG_S = 0.1
_PLACE_POLL_S = 5.0
_NONE = KvRoles()
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

    async def relocate(self, spec: EngineSpec, others: Sequence[EngineSpec]) -> EngineSpec:
        """Return where an engine is to be started again: where it was, or, when that node is gone,
        on another one.

        Raises:
            NoPlace: there is no room for it now.
        """
        ...


Prover = Callable[[Sequence[Engine], Sequence[Engine]], Awaitable[list[PairProof]]]
"""Proves every pair of the given prefill and decode engines; raises ProofError."""


class MemberState(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    LEAVING = "leaving"
    FAILED = "failed"


@dataclass(slots=True)
class Member:
    """One place in the fleet, and the engine that holds it now."""

    spec: EngineSpec
    state: MemberState = MemberState.STARTING
    engine: Engine | None = None
    is_leaving: bool = False
    restarting: asyncio.Task[None] | None = None
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
        kv_roles: KvRoles = _NONE,
    ) -> None:
        self.members = {spec.name: Member(spec) for spec in specs}
        self.departed: dict[str, Member] = {}
        """Members that left; their counters still count."""
        self.weight_version = 0
        """Of all engines that serve."""
        self.proofs: list[PairProof] = []
        self._launcher = launcher
        self._prove = prove
        self._kv_roles = kv_roles
        self._limits = limits
        self._generations: Counter[str] = Counter()
        self._is_closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._parting: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._joining = asyncio.Lock()
        self._placing = asyncio.Lock()
        self._still = asyncio.Event()
        self._still.set()
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
        kv_roles: KvRoles = _NONE,
    ) -> AsyncGenerator[Fleet, None]:
        """Start all engines in parallel, prove all pairs, supervise; close all at the end.

        Args:
            kv_roles: which engines hand KV to which: each such pair is one to prove.

        Raises:
            EngineStartError: the first engine that did not come up; the others are ended.
            ProofError: a pair does not hand off KV.
        """
        fleet = cls(specs, launcher, None, limits, kv_roles=kv_roles)
        if make_prover is not None:
            fleet._prove = make_prover(fleet)
        fleet.on_change(lambda: on_state(fleet))
        try:
            await fleet._start()
            yield fleet
        finally:
            await fleet._close()

    @property
    def is_closing(self) -> bool:
        """Whether its end has begun."""
        return self._is_closing

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

    def working(self) -> list[Engine]:
        """Return the engines that have, or may have, work: those that serve, and those that are to
        leave."""
        states = (MemberState.READY, MemberState.LEAVING)
        return [m.engine for m in self.members.values() if m.engine and m.state in states]

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
        member = self.members.get(engine.info.name)
        if member is None or member.engine is not engine or member.state is not MemberState.READY:
            return
        log.warning("engine %s died: %s; restarting it", engine.info.name, cause)
        member.last_error = cause
        self._retire_counters(member)
        member.engine = None
        member.restarting = self._spawn(self._restart(member, engine))
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
        members = {**self.departed, **self.members}
        return {name: m.retired + m.seen - m.proving for name, m in members.items()}

    async def _start(self) -> None:
        launches = [asyncio.create_task(self._launch(member)) for member in self.members.values()]
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

    async def _launch(self, member: Member) -> Engine:
        limit_s = self._limits.start_timeout_s
        # Never used before by an engine of that name, whoever had it.
        generation = self._generations[member.spec.name]
        self._generations[member.spec.name] += 1
        try:
            async with asyncio.timeout(limit_s):
                member.engine = await self._launcher.launch(member.spec, generation)
        except TimeoutError as exc:
            raise EngineStartError(
                member.spec.name, f"it was not ready in {limit_s:g} s (limits.start_timeout_s)"
            ) from exc
        if self._is_closing:  # somebody's call of `join` goes on beside the fleet's own end
            await self._discard(member)
            raise EngineStartError(member.spec.name, "the fleet is closed")
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
        return engine.info.role in self._kv_roles.sources

    def _loaders(self, source: Engine, engines: Sequence[Engine]) -> list[Engine]:
        """Return those of some engines that may load KV of another one."""
        if not self._hands_out(source):
            return []
        return [
            engine
            for engine in engines
            if engine is not source and engine.info.role in self._kv_roles.loaders
        ]

    async def _count_proofs(self, proofs: Sequence[PairProof]) -> None:
        """Keep what the proofs did apart from what is done for groups."""
        for proof in proofs:
            if proof.kv_bytes:
                for name, added in zip(
                    (proof.prefill, proof.decode), proof.counters(), strict=True
                ):
                    if (member := self.members.get(name)) is not None:
                        member.proving += added
        for name in {name for proof in proofs for name in (proof.prefill, proof.decode)}:
            if (member := self.members.get(name)) is not None:
                await self._read_counters(member)

    async def _restart(self, member: Member, old: Engine | None = None) -> None:
        if old is not None:
            await self._end(old)
        for attempt in range(self._limits.max_restarts):
            await asyncio.sleep(_RESTART_PAUSE_S * (2**attempt - 1))
            await self._find_place(member)
            if member.is_leaving:
                return
            member.restarts += 1
            try:
                engine = await self._launch(member)
                await self._join(member, engine)
            except Exception as exc:  # a wall: whatever it was, the next attempt may succeed
                member.last_error = str(exc)
                log.warning("restart %d of %s: %s", member.restarts, member.spec.name, exc)
                await self._discard(member)
                continue
            except BaseException:  # it is to leave, or the fleet closes
                await self._discard(member)
                raise
            log.info("engine %s is back", member.spec.name)
            return
        if not member.is_leaving:
            log.error("engine %s is given up: %s", member.spec.name, member.last_error)
            self._set_state(member, MemberState.FAILED)

    async def _find_place(self, member: Member) -> None:
        """Wait for a place where an engine can be started again, as long as there is none."""
        while not member.is_leaving:
            try:
                async with self._placing:  # so that no two take the same one
                    others = [
                        other.spec
                        for other in self.members.values()
                        if other is not member and other.state is not MemberState.FAILED
                    ]
                    member.spec = await self._launcher.relocate(member.spec, others)
                return
            except Exception as exc:  # a wall: the cluster may answer again
                if member.last_error != str(exc):
                    log.warning("%s: waiting for a place: %s", member.spec.name, exc)
                member.last_error = str(exc)
            await asyncio.sleep(_PLACE_POLL_S)

    @property
    def placing(self) -> asyncio.Lock:
        """Held while places are looked for, so that no two engines take the same one."""
        return self._placing

    def admit(self, spec: EngineSpec) -> None:
        """Take in an engine that is to `join`: its place is its own from now."""
        member = self.members[spec.name] = Member(spec)
        self._set_state(member, MemberState.STARTING)

    async def join(self, name: str) -> dict[str, float]:
        """Start an engine beside those that serve, bring it to their weights, prove it with all of
        them, and let it serve.

        Returns:
            The seconds of each phase.

        Raises:
            EngineStartError: it did not come up, or did not load the fleet's weights.
            ProofError: it does not hand off KV with some other engine.
        """
        member = self.members[name]
        begun_s = time.monotonic()
        try:
            engine = await self._launch(member)
            launched_s = time.monotonic()
            phases = await self._join(member, engine)
        except BaseException as exc:
            self._depart(member)  # first: whoever gives up may do so twice
            await self._discard(member)
            if isinstance(exc, EngineDied | LegError):
                raise EngineStartError(name, exc.cause) from exc
            raise
        return {"start": launched_s - begun_s, **dict(engine.info.start_s), **phases}

    def dismiss(self, name: str) -> None:
        """Forget an engine that was admitted, if it has neither joined nor departed."""
        member = self.members.get(name)
        if member is not None and member.state is MemberState.STARTING:
            self._depart(member)

    @contextlib.contextmanager
    def scaling(self) -> Generator[None, None, None]:
        """Engines are told to join or leave meanwhile; weight updates wait for the end."""
        self._still.clear()
        try:
            yield
        finally:
            self._still.set()

    async def scaled(self) -> None:
        """Wait until no engine is told to join or leave."""
        while not self._still.is_set():
            await self._still.wait()

    async def take_out(self, name: str) -> Engine | None:
        """Let an engine be given nothing more; it goes on with what it has. None if it is down."""
        member = self.members[name]
        member.is_leaving = True
        if (restarting := member.restarting) is not None:
            restarting.cancel()  # which ends what it had launched
            await asyncio.gather(restarting, return_exceptions=True)
        if member.state is not MemberState.FAILED:
            self._set_state(member, MemberState.LEAVING)
        return member.engine

    def put_back(self, name: str) -> None:
        """Let an engine that was to leave serve again: proven again if others have joined since,
        or started again if it is down."""
        member = self.members[name]
        member.is_leaving = False
        if member.engine is not None and self._is_proven(member.engine):
            self._set_state(member, MemberState.READY)
        elif member.state is not MemberState.FAILED:
            again = self._restart(member) if member.engine is None else self._rejoin(member)
            member.restarting = self._spawn(again)
            self._set_state(member, MemberState.RESTARTING)

    def _is_proven(self, engine: Engine) -> bool:
        """Return whether every pair of this engine with one that serves is proven."""
        if self._prove is None:
            return True
        proven = {(proof.prefill, proof.decode) for proof in self.proofs}
        others = self.ready()
        pairs = [(engine, other) for other in self._loaders(engine, others)]
        pairs += [(other, engine) for other in others if self._loaders(other, [engine])]
        return all((one.info.name, other.info.name) in proven for one, other in pairs)

    async def _rejoin(self, member: Member) -> None:
        """Prove an engine that runs with those that serve, or start it again."""
        assert member.engine is not None
        try:
            await self._join(member, member.engine)
        except Exception as exc:  # a wall: see _restart
            member.last_error = str(exc)
            log.warning("%s is started again: %s", member.spec.name, exc)
            await self._discard(member)
            await self._restart(member)

    async def part(self, name: str) -> None:
        """End an engine that was taken out, and forget its place; this goes on when we are
        cancelled."""
        parting = asyncio.create_task(self._part(self.members[name]))
        self._parting.add(parting)
        parting.add_done_callback(self._parting.discard)
        await asyncio.shield(parting)

    async def _part(self, member: Member) -> None:
        if member.engine is not None:
            await self._read_counters(member)
        await self._discard(member)
        self._depart(member)

    def _depart(self, member: Member) -> None:
        del self.members[member.spec.name]
        self.departed[member.spec.name] = member
        self._set_state(member, MemberState.LEAVING)

    async def _join(self, member: Member, engine: Engine) -> dict[str, float]:
        """Prove a new engine against all that serve, and let it serve; returns the phases' seconds.

        One engine at a time, so that two that come together prove their own pair too. A proof
        that a partner had no time for, or died in, says nothing about the engine: prove again.
        """
        end_s = math.inf
        while True:
            try:
                async with self._joining:
                    begun_s = time.monotonic()
                    end_s = min(end_s, begun_s + self._limits.start_timeout_s)
                    if self._update_weights is not None:
                        await self._update_weights(engine)
                    updated_s = time.monotonic()
                    proofs = await self._prove_new([engine], [engine, *self.ready()])
                    name = member.spec.name
                    kept = [p for p in self.proofs if name not in (p.prefill, p.decode)]
                    self.proofs = [*kept, *proofs]
                    self._set_state(member, MemberState.READY)
                    proven_s = time.monotonic()
                    return {"weights": updated_s - begun_s, "proof": proven_s - updated_s}
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
            await self._end(engine)

    async def _end(self, engine: Engine) -> None:
        try:
            await engine.close()
        except Exception as exc:  # a wall: its place in the fleet must be free for another
            log.warning("%s did not close: %s: %s", engine.info.name, type(exc).__name__, exc)

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

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a fleet task failed", exc_info=error)

    async def _close(self) -> None:
        self._is_closing = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._parting, return_exceptions=True)
        await asyncio.gather(*(self._discard(member) for member in self.members.values()))
