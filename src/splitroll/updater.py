"""Carries a weight update through the fleet; `splitroll.weights.update` says what comes when.

Invariants:
- one update at a time, and no engine joins during one;
- between settling and resuming, no KV is in flight between engines and nothing is computed;
- an update ends published on every engine that serves, or with the old version, or fenced.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from splitroll.config.schema import Weights
from splitroll.dispatch.dispatcher import Dispatcher
from splitroll.engines.protocol import Engine
from splitroll.errors import (
    ConfigError,
    Conflict,
    EngineDied,
    LegError,
    Problem,
    WeightUpdateFailed,
)
from splitroll.fleet.fleet import Fleet
from splitroll.handoff.legs import Handoff
from splitroll.model import checkpoint_folder
from splitroll.rest import Rest
from splitroll.weights.manifest import (
    Manifest,
    ParamSpec,
    checkpoint_manifest,
    compare,
    wire_manifest,
)
from splitroll.weights.offer import LoadedWeights, Receiver, WeightOffer
from splitroll.weights.segment import WriterGone
from splitroll.weights.transport import Outbox, Transport
from splitroll.weights.update import FLEET, Died, Done, Event, Failed, Outcome, Phase, Update

if TYPE_CHECKING:
    from splitroll.weights.ranks import Conductor, Share, TrainerRanks
    from splitroll.weights.source import Source

T = TypeVar("T")

log = logging.getLogger(__name__)

_POLL_S = 0.002
_CLOSE_TIMEOUT_S = 30.0
_SAMPLED_PARAMETERS = 8


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """How a weight update went.

    Attributes:
        nbytes: of the weights that were sent.
        seconds: by phase; see `splitroll.weights.update.Phase`.
        write_s: that the trainer took to write them, in part while engines loaded.
        load_s: from asking the first engine to load to the last one's answer.
        pause_s: from the first engine's pause to the last one's going on.
        total_s: from the call to its return.
        engines: that were updated; one that died meanwhile is not among them.
        verified: parameters whose checksum was compared.
    """

    version: int
    nbytes: int
    seconds: Mapping[str, float]
    write_s: float
    load_s: float
    pause_s: float
    total_s: float
    engines: tuple[str, ...]
    verified: int


@dataclass(slots=True)
class _Transaction:
    """What one update has at hand."""

    version: int
    checksums: tuple[str, ...]
    outbox: Outbox
    writing: asyncio.Task[Mapping[str, str]]
    engines: dict[str, Engine] = field(default_factory=dict)
    causes: dict[str, str] = field(default_factory=dict)
    loaded: dict[str, LoadedWeights] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    paused_s: float = 0.0
    write_s: float = 0.0
    given_up: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def give_up(self) -> None:
        """Stop who reads and who writes it; what has begun is undone."""
        self.given_up.set()
        self.outbox.abandon()


class _Trainer:
    """The trainer's side of one update: a thread of its own, and the other ranks."""

    def __init__(self, conductor: Conductor) -> None:
        self.conductor = conductor
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="splitroll-weights")

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Run blocking work after all that was asked before, also if we are cancelled."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    @contextlib.asynccontextmanager
    async def inside(self, context: AbstractContextManager[T]) -> AsyncGenerator[T, None]:
        """Enter and leave a context in the thread; what was entered is left, also if cancelled."""
        entering = asyncio.ensure_future(self.run(context.__enter__))
        try:
            yield await asyncio.shield(entering)
        finally:
            await asyncio.wait([entering])
            if entering.exception() is None:
                await self.run(context.__exit__, None, None, None)

    async def close(self, outcome: int | BaseException, limit_s: float) -> None:
        """Tell the other ranks how it ended."""
        try:
            async with asyncio.timeout(limit_s):
                await self.run(self.conductor.close, outcome)
        except Exception as exc:  # a wall: how the update itself ended matters more
            log.error("the other trainer ranks were not told how the update ended: %s", exc)
        finally:
            self._thread.shutdown(wait=False)


class Updater:
    """Updates the weights of a fleet.

    Args:
        checkpoint: folder, or Hugging Face id, of the model that engines start from.
        fleet_id: part of the names of files, which other fleets may write beside ours.
        address: of this host, as engines reach it.
        elsewhere: returns the names of engines on other hosts.

    Attributes:
        rest: what brings the fleet to rest, for updates as for pauses.
    """

    def __init__(
        self,
        fleet: Fleet,
        dispatcher: Dispatcher,
        handoff: Handoff,
        settings: Weights,
        checkpoint: str,
        fleet_id: str,
        address: str = "127.0.0.1",
        elsewhere: Callable[[Fleet], Sequence[str]] = lambda fleet: (),
    ) -> None:
        self._fleet = fleet
        self._barrier = dispatcher.barrier
        self._fleet_id = fleet_id
        self._address = address
        self._elsewhere = elsewhere
        self._transport: Transport | None = None
        self._settings = settings
        self._checkpoint = checkpoint
        self.rest = Rest(fleet, dispatcher.barrier, handoff, settings)
        self._transaction: _Transaction | None = None
        self._held = contextlib.ExitStack()
        self._letting_go: asyncio.Task[None] | None = None
        fleet.on_join(self._bring)

    async def update(
        self,
        weights: Any,
        version: int | None = None,
        *,
        partial: bool = False,
        ranks: TrainerRanks | None = None,
    ) -> UpdateReport:
        """See `Rollout.update_weights`."""
        from splitroll.weights.ranks import Conductor  # late: see _opened

        # What concerns the trainer's side runs in one thread, in order: what the ranks tell each
        # other must not cross, and reading weights takes long.
        trainer = _Trainer(Conductor(ranks))
        outcome: int | BaseException = RuntimeError("the update was cancelled")
        before = self._fleet.weight_version
        try:
            await self.rest.scaled()
            version = self._check_version(version)
            report = await self._update(weights, version, partial, trainer)
        except Exception as exc:
            outcome = exc
            raise
        finally:
            if self._fleet.weight_version > before:  # also when the cancellation came too late
                outcome = self._fleet.weight_version
            await trainer.close(outcome, self._settings.timeout_s)
        return report

    async def _update(
        self, weights: Any, version: int, partial: bool, trainer: _Trainer
    ) -> UpdateReport:
        begun_s = time.monotonic()
        self.rest.updating = version
        try:
            wanted = self._manifest()
            await trainer.run(trainer.conductor.open, version, wanted)
            async with trainer.inside(self._reading(weights, wanted, partial)) as source:
                shares = await trainer.run(trainer.conductor.shares, source.manifest)
                parts = self._parts(shares, wanted, partial)
                transaction = self._begin(version, parts, shares, source, trainer)
                try:
                    update = await self._run(transaction)
                finally:
                    await self._end_writing(transaction)
            nbytes = sum(spec.nbytes for part in parts for spec in part)
            return self._conclude(transaction, update, nbytes, begun_s)
        finally:
            self.rest.updating = None
            await self.rest.thaw()  # `resume` may have come meanwhile

    async def hold(self) -> dict[str, Engine]:
        """Bring the fleet to rest for an update whose steps somebody else drives; returns the
        engines that take part, paused. `release` or `give_up` ends it.

        Raises:
            ConfigError: another update is under way.
            WeightUpdateFailed: it did not come to rest; it goes on as it was.
        """
        await self.rest.scaled()
        version = self._check_version(None)
        self.rest.updating = version
        fenced = self._barrier.is_fenced
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                self._barrier.shut(partial=self._settings.in_flight == "abort")
                if self._settings.in_flight == "drain":
                    await self._barrier.drained()
                engines = await self.rest.come_to_rest(self._held)
                await asyncio.gather(*(self.rest.stop(engine) for engine in engines))
                if not engines:
                    raise LegError("the fleet", "no engine serves")
        except BaseException as exc:  # nothing has changed yet, whatever it was
            await self._let_go_on(fenced=fenced)
            if not isinstance(exc, Exception):
                raise
            cause = "it did not come to rest in time" if isinstance(exc, TimeoutError) else exc
            serving = None if fenced else self._fleet.weight_version
            raise WeightUpdateFailed(version, serving, [str(cause)]) from exc
        return {engine.info.name: engine for engine in engines}

    def next_version(self, version: int | None) -> int:
        """Return the version of the update that `hold` began.

        Raises:
            ConfigError: it is not above the present one.
        """
        busy, self.rest.updating = self.rest.updating, None
        try:
            return self._check_version(version)
        finally:
            self.rest.updating = busy

    async def release(self, version: int) -> None:
        """Publish what was loaded since `hold`, and let the fleet go on.

        Raises:
            WeightUpdateFailed: an engine did not follow, or none is left; the fleet is fenced.
        """
        engines = self._fleet.ready()
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await asyncio.gather(*(self._publish(engine, version) for engine in engines))
            if not engines:
                raise LegError("the fleet", "no engine is left of those that took part")
        except Exception as exc:  # a wall: whatever it was, engines may now differ
            cause = str(exc) or type(exc).__name__
            self.give_up(cause)
            raise WeightUpdateFailed(version, None, [cause]) from exc
        if self._transport is not None:  # what it keeps is no longer what is served
            self._transport.close()
            self._transport = None
        self._fleet.weight_version = version
        await self._let_go_on(fenced=False)

    def give_up(self, cause: str) -> None:
        """End what `hold` began: engines may have anything, and serve nothing until an update
        succeeds."""
        self.rest.updating = None
        self._held.close()
        self._barrier.fence(cause)

    async def _let_go_on(self, *, fenced: bool) -> None:
        """End what `hold` began, also when we are cancelled; nobody else begins an update before
        all is as it was."""
        self._letting_go = asyncio.create_task(self._let_all_go_on(fenced))
        await asyncio.shield(self._letting_go)

    async def _let_all_go_on(self, fenced: bool) -> None:
        try:
            self._held.close()
            if fenced:
                self._barrier.fence("a weight update failed")
                return
            engines = [e for e in self._fleet.ready() if not self.rest.stays_still(e)]
            await asyncio.gather(*(self.rest.go_on(engine) for engine in engines))
            self.rest.open_membership()
            self._barrier.reopen()
        finally:
            self.rest.updating = None
            await self.rest.thaw()  # `resume` may have come meanwhile

    async def _publish(self, engine: Engine, version: int) -> None:
        if not await engine.reset_prefix_cache(preempt=True):
            raise LegError(engine.info.name, "it refused to drop its KV caches")
        await engine.set_weight_version(version)

    async def close(self) -> None:
        """End an update that is under way, and let go of what the transport keeps."""
        if (transaction := self._transaction) is not None:
            transaction.give_up()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await transaction.ended.wait()
        if self._transport is not None:
            self._transport.close()

    def _opened(self) -> Transport:
        if self._transport is None:
            # Imported late: torch takes seconds, and a fleet that is never updated needs none.
            from splitroll.weights.transports import make_transport

            self._transport = make_transport(self._settings, self._fleet_id, self._address)
        return self._transport

    def _check_version(self, version: int | None) -> int:
        current = self._fleet.weight_version
        if self.rest.keeps_still and self._settings.in_flight == "drain":
            hint = "resume first, or set weights.in_flight to keep or abort"
            found = "paused with what is under way kept"
            allowed = "no sample half-way, with weights.in_flight: drain"
            raise Conflict([Problem("update_weights", found, allowed, hint)])
        afar = self._elsewhere(self._fleet)
        if self._settings.transport in ("shm", "ipc") and afar:
            found = f"{self._settings.transport}, with {', '.join(afar)} on other hosts"
            hint = "use disk or nccl: shared memory ends at the host"
            raise ConfigError([Problem("weights.transport", found, "disk or nccl", hint)])
        if self.rest.updating is not None:
            hint = "wait for it: one update at a time"
            found = f"version {self.rest.updating} is being pushed"
            raise Conflict([Problem("update_weights", found, "no update under way", hint)])
        if version is None:
            return current + 1
        if type(version) is not int or version <= current:
            allowed = f"a whole number above {current}, which the fleet serves"
            hint = "leave it out, or count on"
            raise ConfigError([Problem("version", repr(version), allowed, hint)])
        return version

    @contextlib.contextmanager
    def _reading(self, weights: Any, wanted: Manifest, partial: bool) -> Iterator[Source]:
        """Read what this rank of the trainer gave; completed by what is served, if partial."""
        from splitroll.weights.source import Source, reading  # late: see _opened

        with reading(weights, wanted) as source:
            if partial:
                given = dict(source.tensors)
                kept = {name: t for name, t in self._serving() if name not in given}
                source = Source({**kept, **given})
            yield source

    def _parts(self, shares: Sequence[Share], wanted: Manifest, partial: bool) -> list[Manifest]:
        """Return what each rank sends, as it is sent.

        Raises:
            ConfigError: with every difference from the engines' manifest.
        """
        from splitroll.weights.ranks import assign  # late: see _opened

        if partial and len(shares) > 1:
            hint = "let one rank send them"
            raise ConfigError([Problem("partial", "True, with ranks", "False", hint)])
        one_sender = self._opened().one_sender
        parts, problems = assign([share.manifest for share in shares], one_sender=one_sender)
        if one_sender and any(parts[1:]):
            hint = "give every rank the whole model (FSDP shards are gathered)"
            found = "parameters that only another rank than the first has"
            problems.append(Problem("weights", found, "all of them on the first rank", hint))
        problems += compare([spec for part in parts for spec in part], wanted)
        if problems:
            if not partial and any(p.found == "nothing" for p in problems):
                hint = "to send some and keep the others, pass partial=True"
                allowed = "all of the engines' parameters"
                problems.append(Problem("weights", "not all", allowed, hint))
            raise ConfigError(problems)
        by_name = {spec.name: spec for spec in wanted}
        return [tuple(by_name[spec.name] for spec in part) for part in parts]

    def _manifest(self) -> Manifest:
        engines = self._fleet.up()
        dtype = engines[0].info.dtype if engines else "float32"
        return wire_manifest(checkpoint_manifest(checkpoint_folder(self._checkpoint)), dtype)

    def _serving(self) -> Any:
        """Yield the parameters that the fleet serves now."""
        from splitroll.weights.disk import read_files

        self._current_offer()
        if self._transport is None or self._transport.current() is None:
            return read_files(checkpoint_folder(self._checkpoint))
        return self._transport.read()

    def _begin(
        self,
        version: int,
        parts: Sequence[Manifest],
        shares: Sequence[Share],
        source: Source,
        trainer: _Trainer,
    ) -> _Transaction:
        """Begin to write, on all ranks."""
        from splitroll.weights.ranks import Plan  # late: see _opened

        outbox = self._opened().begin(
            version, parts, [share.pid for share in shares], self._receivers()
        )
        checksums = self._checksums(version, [spec for part in parts for spec in part])
        begun_s = time.monotonic()

        def write_all() -> Mapping[str, str]:
            trainer.conductor.plan(Plan(outbox.plan, checksums))
            written: Mapping[str, str] | Exception
            try:
                written = outbox.plan.write(0, source, checksums)
            except Exception as exc:  # a wall: the other ranks are to be told, whatever it is
                written = exc
            sums = trainer.conductor.written(written)
            outbox.seal()
            return sums

        async def write() -> Mapping[str, str]:
            try:
                return await trainer.run(write_all)
            except BaseException:
                transaction.give_up()
                raise
            finally:
                transaction.write_s = time.monotonic() - begun_s

        transaction = _Transaction(version, checksums, outbox, asyncio.create_task(write()))
        return transaction

    def _receivers(self) -> list[Receiver]:
        infos = [engine.info for engine in self._fleet.ready()]
        return [Receiver(info.name, str(info.pids), info.world_size) for info in infos]

    def _checksums(self, version: int, sent: Iterable[ParamSpec]) -> tuple[str, ...]:
        """Choose whose checksums are compared: of a sample, others at each version."""
        names = [spec.name for spec in sent]
        match self._settings.verify:
            case "none":
                return ()
            case "full":
                return tuple(names)
            case "sample":
                names.sort(key=lambda name: hashlib.sha256(f"{version} {name}".encode()).digest())
                return tuple(names[:_SAMPLED_PARAMETERS])

    async def _run(self, transaction: _Transaction) -> Update:
        """Run the update to its end, also when we are cancelled: what has begun ends consistent."""
        self._transaction = transaction
        running = asyncio.create_task(self._carry_out(transaction))
        cancelled = False
        try:
            while not running.done():
                try:
                    await asyncio.shield(running)
                except asyncio.CancelledError:
                    cancelled = True
                    transaction.give_up()
        finally:
            self._transaction = None
            transaction.ended.set()
        update = running.result()
        if cancelled:
            self._settle(transaction, update)
            raise asyncio.CancelledError
        return update

    async def _carry_out(self, transaction: _Transaction) -> Update:
        try:
            return await self._go_through(transaction)
        except BaseException as exc:
            # Whatever it was: engines may hold anything now.
            self._barrier.fence(f"the update broke off: {type(exc).__name__}: {exc}")
            raise

    async def _go_through(self, transaction: _Transaction) -> Update:
        settings = self._settings
        transaction.engines = {engine.info.name: engine for engine in self._fleet.ready()}
        fenced = self._barrier.is_fenced
        update = Update.begin(transaction.engines, settings.on_failure, fenced=fenced)
        with contextlib.ExitStack() as held:
            while update.outcome is None:
                phase, begun_s = update.phase, time.monotonic()
                if phase is Phase.PAUSE and not transaction.paused_s:
                    transaction.paused_s = begun_s
                if phase is Phase.SETTLE:
                    event = await self._settle_handles(transaction, held)
                    # Engines may have joined, or died, while the fleet drained.
                    update = replace(update, engines=frozenset(transaction.engines)).after(event)
                else:
                    asked = [
                        asyncio.create_task(self._ask(phase, who, transaction, update.restoring))
                        for who in update.waiting
                    ]
                    for event in await asyncio.gather(*asked):
                        update = update.after(event)
                spent_s = transaction.seconds.get(phase.value, 0.0)
                transaction.seconds[phase.value] = spent_s + time.monotonic() - begun_s
            if transaction.paused_s:
                transaction.paused_s = time.monotonic() - transaction.paused_s
            self._admit_again(transaction, update)
            for name in update.lost | update.died:
                cause = transaction.causes.get(name, "a weight update failed on it")
                self._fleet.report_death(transaction.engines[name], cause)
        return update

    def _admit_again(self, transaction: _Transaction, update: Update) -> None:
        if update.outcome is Outcome.PUBLISHED:
            self._fleet.weight_version = transaction.version
            self._opened().commit(transaction.outbox)
        if update.outcome is Outcome.FENCED:
            # Nor does an engine join: those that it would be proven against are paused.
            self._barrier.fence(_told(update))
            return
        self.rest.open_membership()
        self._barrier.reopen()

    async def _settle_handles(self, transaction: _Transaction, held: contextlib.ExitStack) -> Event:
        """See that no KV is in flight, hold the membership, and wait for the first weights."""
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                engines = await self.rest.come_to_rest(held)
                transaction.engines = {engine.info.name: engine for engine in engines}
                while not transaction.outbox.is_readable:
                    if transaction.writing.done():
                        transaction.writing.result()
                        break
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            limit_s = self._settings.timeout_s
            return Failed(FLEET, f"not settled in {limit_s:g} s (weights.timeout_s)")
        except Exception as exc:  # a wall: nothing has changed yet, whatever the trainer raised
            return Failed(FLEET, f"{type(exc).__name__}: {exc}")
        return Done(FLEET)

    async def _ask(
        self, phase: Phase, who: str, transaction: _Transaction, restoring: bool
    ) -> Event:
        """Have an engine, or the fleet, go through a phase."""
        limit_s = self._settings.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                if phase is Phase.GATE:
                    await self._shut(transaction)
                elif who == FLEET:
                    await asyncio.shield(transaction.writing)
                else:
                    await self._do(phase, transaction.engines[who], transaction, restoring)
        except EngineDied as exc:
            transaction.causes[who] = exc.cause
            return Died(who)
        except TimeoutError:
            cause = f"no answer in {limit_s:g} s (weights.timeout_s)"
            if who == FLEET:
                doing = "work in flight" if phase is Phase.GATE else "the trainer's writing"
                return Failed(who, f"{doing} did not end in {limit_s:g} s (weights.timeout_s)")
            # An engine that does not answer cannot be asked to go back either.
            transaction.causes[who] = cause
            return Died(who)
        except LegError as exc:
            return Failed(who, exc.cause)
        except Exception as exc:  # a wall: whatever it is, the transaction ends consistent
            return Failed(who, f"{type(exc).__name__}: {exc}")
        return Done(who)

    async def _shut(self, transaction: _Transaction) -> None:
        """Let nothing begin; with `drain` wait for what has, unless the trainer fails meanwhile."""
        self._barrier.shut(partial=self._settings.in_flight == "abort")
        if self._settings.in_flight != "drain":
            return
        drained = asyncio.ensure_future(self._barrier.drained())
        given_up = asyncio.ensure_future(transaction.given_up.wait())
        try:
            await asyncio.wait([drained, given_up], return_when=asyncio.FIRST_COMPLETED)
        finally:
            drained.cancel()
            given_up.cancel()
        if transaction.given_up.is_set():
            raise WriterGone("the trainer gave the update up")

    async def _do(
        self, phase: Phase, engine: Engine, transaction: _Transaction, restoring: bool
    ) -> None:
        name = engine.info.name
        match phase:
            case Phase.PAUSE:
                await self.rest.stop(engine)
            case Phase.LOAD:
                offer = self._current_offer()
                if not restoring:
                    offer = transaction.outbox.offer(transaction.checksums)
                transaction.loaded[name] = await engine.load_weights(offer)
            case Phase.VERIFY:
                if not restoring:
                    sent = await asyncio.shield(transaction.writing)
                    _compare_checksums(name, sent, transaction.loaded[name])
            case Phase.CLEAR:
                if not await engine.reset_prefix_cache(preempt=True):
                    raise LegError(name, "it refused to drop its KV caches")
            case Phase.PUBLISH:
                version = self._fleet.weight_version if restoring else transaction.version
                await engine.set_weight_version(version)
            case Phase.RESUME:
                if not self.rest.stays_still(engine):
                    await engine.resume()

    def _current_offer(self) -> WeightOffer:
        """Return where the version that the fleet serves is.

        Raises:
            LookupError: the transport keeps none; see `Weights.path`.
        """
        current = None if self._transport is None else self._transport.current()
        if current is not None:
            return current
        if self._fleet.weight_version:
            raise LookupError(
                f"weights.transport {self._settings.transport} keeps no copy of version "
                f"{self._fleet.weight_version}: push weights again, and set weights.path"
            )
        names = tuple(spec.name for spec in self._manifest())
        return WeightOffer(folder=self._checkpoint, names=names)

    def check_copy(self) -> None:
        """
        Raises:
            Conflict: an engine that joins could not be brought to the version that is served.
        """
        try:
            if self._fleet.weight_version:
                self._current_offer()
        except LookupError as exc:
            allowed, hint = "weights that who joins can load", "set weights.path, and push again"
            raise Conflict([Problem("scale", str(exc), allowed, hint)]) from exc

    async def _bring(self, engine: Engine) -> None:
        """Bring a restarted engine to the version that the fleet serves, before it is proven."""
        version = self._fleet.weight_version
        if version == 0:
            return
        if self._barrier.is_fenced:  # it serves nothing before the next update, which brings all
            await engine.set_weight_version(version)
            return
        limit_s = self._settings.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await engine.pause()
                await engine.load_weights(self._current_offer())
                if not await engine.reset_prefix_cache(preempt=True):
                    raise LegError(engine.info.name, "it refused to drop its KV caches")
                await engine.set_weight_version(version)
                await engine.resume()
        except TimeoutError as exc:
            cause = f"it did not load weight version {version} in {limit_s:g} s"
            raise LegError(engine.info.name, cause) from exc

    async def _end_writing(self, transaction: _Transaction) -> None:
        """Wait for the writer, which reads the trainer's tensors."""
        if not transaction.writing.done():
            transaction.give_up()
            await asyncio.wait([transaction.writing], timeout=self._settings.timeout_s)
        if not transaction.writing.done():
            log.error("the trainer's tensors are still being read: do not change them")

    def _conclude(
        self, transaction: _Transaction, update: Update, nbytes: int, begun_s: float
    ) -> UpdateReport:
        self._settle(transaction, update)
        if update.outcome is not Outcome.PUBLISHED:
            serving = None if update.outcome is Outcome.FENCED else self._fleet.weight_version
            causes = [_told(update)]
            if (error := _written_with(transaction)) is not None:
                causes.append(f"the trainer's weights: {type(error).__name__}: {error}")
            raise WeightUpdateFailed(transaction.version, serving, causes)
        return UpdateReport(
            version=transaction.version,
            nbytes=nbytes,
            seconds=dict(transaction.seconds),
            write_s=transaction.write_s,
            load_s=transaction.seconds.get(Phase.LOAD.value, 0.0),
            pause_s=transaction.paused_s,
            total_s=time.monotonic() - begun_s,
            engines=tuple(sorted(update.engines)),
            verified=len(transaction.checksums),
        )

    def _settle(self, transaction: _Transaction, update: Update) -> None:
        if update.outcome is not Outcome.PUBLISHED:
            self._opened().discard(transaction.outbox)


def _compare_checksums(engine: str, sent: Mapping[str, str], loaded: LoadedWeights) -> None:
    for worker, received in enumerate(loaded.checksums):
        for name, checksum in sent.items():
            if received.get(name) != checksum:
                raise LegError(
                    engine,
                    f"parameter {name}: worker {worker} received {received.get(name, 'nothing')}, "
                    f"the trainer sent {checksum} (SHA-256)",
                )


def _told(update: Update) -> str:
    return "; ".join(f"{f.who}, {f.phase.value}: {f.cause}" for f in update.failures)


def _written_with(transaction: _Transaction) -> BaseException | None:
    writing = transaction.writing
    return writing.exception() if writing.done() and not writing.cancelled() else None
