"""Weight updates whose steps a trainer asks for one by one, in vLLM's weight-transfer protocol:

    init (once), then for each update: start, update (any number of parts), finish

With `weights.transport: shm` or `disk` a part names a folder of safetensors files; the update is
one transaction of ours, at its finish, with all that belongs to it: verification, roll-back, copies
for engines that restart. With `nccl` and `ipc` the steps go to all engines as they come, and what
cannot be completed leaves the fleet fenced: GPU memory keeps no old version.

Every step is taken once, however often its request is repeated, and a trainer that falls silent in
the middle of an update is given up after `weights.timeout_s`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from splitroll.config.schema import Weights
from splitroll.engines.protocol import Engine, TransferStep
from splitroll.errors import (
    ConfigError,
    Conflict,
    EngineDied,
    LegError,
    Problem,
    WeightUpdateFailed,
)
from splitroll.updater import Updater, UpdateReport

_RETRIED_S = 30.0
"""Within which the same request to join is the same one, sent again."""

Answer = Mapping[str, Any]


@dataclass(slots=True)
class _Session:
    """An update between its start and its finish.

    Attributes:
        engines: that take part, where steps go to engines.
        folders: of its parts, where they are files.
    """

    engines: Mapping[str, Engine] = field(default_factory=dict)
    folders: list[Path] = field(default_factory=list)


class DrivenUpdates:
    """See the module's docstring.

    Args:
        push: gives all engines a version whole: `Rollout.update_weights`.
        engines: returns those that serve.
        version: returns the version that the fleet serves.
    """

    def __init__(
        self,
        updater: Updater,
        push: Callable[[Any, int | None], Awaitable[UpdateReport]],
        settings: Weights,
        engines: Callable[[], Sequence[Engine]],
        version: Callable[[], int],
    ) -> None:
        self._updater = updater
        self._push = push
        self._settings = settings
        self._engines = engines
        self._version = version
        self._session: _Session | None = None
        self._closed = False
        self._joined = ("", "")
        self._joined_s = 0.0
        self._tasks: set[asyncio.Future[Answer]] = set()
        self._asked: dict[tuple[str, str], asyncio.Future[Answer]] = {}
        self._turn = asyncio.Lock()
        self._watchdog: asyncio.TimerHandle | None = None

    @property
    def _native(self) -> bool:
        return self._settings.transport in ("nccl", "ipc")

    async def init(self, info: Mapping[str, Any]) -> Answer:
        """Have all workers join the trainer's group.

        Raises:
            ConfigError: it has no room for them, or this fleet's weights come otherwise.
            LegError, EngineDied: an engine could not join.
        """
        # An engine that has come back joins anew; so does a trainer that has, some time later.
        whole = {"info": dict(info), "engines": [e.info.engine_id for e in self._engines()]}
        key, now = _key("init", whole), asyncio.get_running_loop().time()
        if self._joined != key or now > self._joined_s + _RETRIED_S:
            self._forget("init", "shutdown")
        self._joined, self._joined_s = key, now
        return await self._once("init", whole, lambda: self._init(info))

    async def shutdown(self) -> Answer:
        """Have all workers leave it."""
        self._forget("init")
        return await self._once("shutdown", {}, self._shutdown)

    async def start(self) -> Answer:
        """Begin an update.

        Raises:
            ConfigError: another one is under way.
            WeightUpdateFailed: the fleet did not come to rest.
        """
        return await self._once("start", {}, self._start)

    async def update(self, info: Mapping[str, Any]) -> Answer:
        """Take a part.

        Raises:
            ConfigError: it is not what this fleet takes, or no update has been started.
            WeightUpdateFailed: an engine failed; the fleet is fenced.
        """
        return await self._once("update", info, lambda: self._update(info))

    async def finish(self, version: int | None) -> Answer:
        """End the update and let the fleet go on with the new weights.

        Raises:
            ConfigError: the weights, or the version, are not what they have to be.
            WeightUpdateFailed: see `Rollout.update_weights`.
        """
        return await self._once("finish", {"version": version}, lambda: self._finish(version))

    async def close(self) -> None:
        """Give up what is under way, and return when nothing is."""
        self._closed = True
        if self._watchdog is not None:
            self._watchdog.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            self._give_up("the service ended in the middle of an update")

    async def _once(
        self, step: TransferStep, body: Mapping[str, Any], work: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        """Answer a repeated request as the first one was or will be, also if its sender is gone."""
        key = _key(step, body)
        asked = self._asked.get(key)
        if asked is None:
            asked = asyncio.ensure_future(self._in_turn(work))
            self._asked[key] = asked
            self._tasks.add(asked)
            asked.add_done_callback(self._tasks.discard)
            asked.add_done_callback(lambda asked: self._note_end(key, asked))
        return await asyncio.shield(asked)

    async def _in_turn(self, work: Callable[[], Awaitable[Answer]]) -> Answer:
        async with self._turn:
            if self._watchdog is not None:
                self._watchdog.cancel()
            try:
                return await work()
            finally:
                if self._session is not None and not self._closed:
                    loop = asyncio.get_running_loop()
                    self._watchdog = loop.call_later(self._settings.timeout_s, self._fell_silent)

    def _note_end(self, key: tuple[str, str], asked: asyncio.Future[Answer]) -> None:
        """Forget what failed: it may be asked for again."""
        failed = asked.cancelled() or asked.exception() is not None
        if failed and self._asked.get(key) is asked:
            del self._asked[key]

    def _forget(self, *steps: str) -> None:
        self._asked = {key: asked for key, asked in self._asked.items() if key[0] not in steps}

    async def _init(self, info: Mapping[str, Any]) -> Answer:
        if not self._native:
            if info:
                found = f"init_info with {', '.join(info)}"
                allowed = f"nothing, with weights.transport: {self._settings.transport}"
                hint = "each part names a folder; or set weights.transport to nccl"
                raise ConfigError([Problem("init_info", found, allowed, hint)])
            return {"message": "Weight transfer initialized"}
        engines = self._engines()
        infos = init_infos(info, {e.info.name: e.info.world_size for e in engines})
        await self._in_time({e.info.name: e for e in engines}, "init", infos)
        return {"message": "Weight transfer initialized"}

    async def _shutdown(self) -> Answer:
        if self._native:
            await self._in_time({e.info.name: e for e in self._engines()}, "shutdown")
        return {"message": "Weight transfer shut down"}

    async def _start(self) -> Answer:
        self._forget("update", "finish")
        self._session = session = _Session()
        if self._native:
            try:
                session.engines = await self._updater.hold()
            except BaseException:
                self._session = None
                raise
            await self._step(session, "start")
        return {"message": "Weight update started"}

    async def _update(self, info: Mapping[str, Any]) -> Answer:
        session = self._open("update_weights")
        if self._native:
            await self._step(session, "update", info)
        else:
            session.folders.append(_folder_of(info))
        return {"message": "Weights updated"}

    async def _finish(self, version: int | None) -> Answer:
        session = self._open("finish_weight_update")
        if self._native:
            version = self._updater.next_version(version)
            await self._step(session, "finish")
            try:
                await self._updater.release(version)
            except WeightUpdateFailed:
                self._end()
                raise
        else:
            try:
                if not session.folders:
                    hint = 'name a folder: {"update_info": {"folder": ...}}'
                    raise ConfigError([Problem("update_weights", "nothing", "weights", hint)])
                report = await self._push(_parameters(session.folders), version)
                version = report.version
            except Exception:
                self._end()
                raise
        self._end()
        return {"message": "Weight update finished", "weight_version": str(version)}

    def _open(self, step: str) -> _Session:
        if self._session is None:
            hint = "POST /start_weight_update first"
            raise Conflict([Problem(step, "no update under way", "a started one", hint)])
        return self._session

    def _end(self) -> None:
        self._session = None
        self._forget("start", "update")

    async def _step(
        self, session: _Session, step: TransferStep, info: Mapping[str, Any] | None = None
    ) -> None:
        """Take a step on all engines; what fails leaves them with anything.

        Raises:
            WeightUpdateFailed: naming the engine.
        """
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                await self._each(session.engines, step, dict.fromkeys(session.engines, info))
        except (LegError, EngineDied, TimeoutError) as exc:
            limit_s = self._settings.timeout_s
            cause = f"{step}: {exc or f'no answer in {limit_s:g} s (weights.timeout_s)'}"
            self._give_up(cause)
            raise WeightUpdateFailed(self._version() + 1, None, [cause]) from exc

    async def _in_time(
        self,
        engines: Mapping[str, Engine],
        step: TransferStep,
        infos: Mapping[str, Mapping[str, Any] | None] | None = None,
    ) -> None:
        limit_s = self._settings.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._each(engines, step, infos)
        except TimeoutError as exc:
            raise TimeoutError(f"{step}: no answer in {limit_s:g} s (weights.timeout_s)") from exc

    async def _each(
        self,
        engines: Mapping[str, Engine],
        step: TransferStep,
        infos: Mapping[str, Mapping[str, Any] | None] | None = None,
    ) -> None:
        """Ask all engines at once: they and the trainer wait for each other."""
        asked = [
            asyncio.ensure_future(engine.transfer_weights(step, (infos or {}).get(name)))
            for name, engine in engines.items()
        ]
        try:
            await asyncio.gather(*asked)
        finally:
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    def _fell_silent(self) -> None:
        limit_s = self._settings.timeout_s
        self._give_up(f"the trainer fell silent for {limit_s:g} s in the middle of an update")

    def _give_up(self, cause: str) -> None:
        self._end()
        if self._native:
            self._updater.give_up(cause)


def _key(step: TransferStep, body: Mapping[str, Any]) -> tuple[str, str]:
    return step, json.dumps(body, sort_keys=True, default=str)


def init_infos(info: Mapping[str, Any], workers: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Return what each engine joins the trainer's group with: the trainer counts the fleet for one
    server, whose ranks begin at its `rank_offset`; every engine begins where the last one ends.

    Args:
        workers: of each engine.

    Raises:
        ConfigError: the group has another number of places than there are workers.
    """
    if "rank_offset" not in info:
        return {name: dict(info) for name in workers}
    offset, total = info["rank_offset"], sum(workers.values())
    size = info.get("world_size", offset + total if isinstance(offset, int) else None)
    if type(offset) is not int or type(size) is not int or offset + total != size:
        found = f"rank_offset {offset!r} and world_size {size!r}"
        allowed = f"a world_size of rank_offset + {total}, the workers of {len(workers)} engines"
        raise ConfigError([Problem("init_info", found, allowed, "ask GET /get_world_size")])
    infos = {}
    for name, count in workers.items():
        infos[name] = {**info, "rank_offset": offset}
        offset += count
    return infos


def _folder_of(info: Mapping[str, Any]) -> Path:
    folder = info.get("folder")
    hint = "files on a path that this machine sees; or set weights.transport to nccl"
    if set(info) != {"folder"} or not isinstance(folder, str):
        found = f"update_info with {', '.join(info) or 'nothing'}"
        allowed = '{"folder": a folder of safetensors files}, with this weights.transport'
        raise ConfigError([Problem("update_info", found, allowed, hint)])
    path = Path(folder)
    if not any(path.glob("*.safetensors")):
        raise ConfigError([Problem("update_info.folder", folder, "safetensors files", hint)])
    return path


def _parameters(folders: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    from splitroll.weights.disk import read_files  # late: torch takes seconds

    for folder in folders:
        try:
            yield from read_files(folder)
        except Exception as exc:  # a wall: whatever a file's reader raises
            found, hint = f"{folder}: {exc}", "write it anew"
            allowed = "safetensors files that can be read"
            raise ConfigError([Problem("update_info.folder", found, allowed, hint)]) from exc
