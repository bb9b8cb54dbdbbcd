"""The samples file: one JSON object per sample and line, complete or absent under its name.

While a run goes on, complete groups stand in `NAME.partial`; when the last one is in, it is renamed
to `NAME`. `NAME.run` says what run they belong to, and is locked by the process that writes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from splitroll.dispatch.assembly import GroupWork
from splitroll.errors import ConfigError, Problem
from splitroll.types import Group


def run_fingerprint(model: str, works: Sequence[GroupWork]) -> str:
    """Return what must be equal for two runs to give the same samples: model, prompts, sampling."""
    digest = hashlib.blake2b(model.encode(), digest_size=16)
    for work in works:
        row = [work.prompt.id, work.prompt.token_ids, work.n, work.seed]
        row.append({k: v for k, v in asdict(work.sampling).items() if k != "seed"})
        digest.update(json.dumps(row).encode())
    return digest.hexdigest()


class SampleFile:
    """Writes a samples file; see the module's docstring for its states.

    Attributes:
        done: rows of the complete groups that are in the file, by the prompt's id.
    """

    def __init__(self, path: Path, fingerprint: str, n: int) -> None:
        self.path = path
        self.done: dict[str, list[Mapping[str, Any]]] = {}
        self._partial = path.with_name(path.name + ".partial")
        self._run = path.with_name(path.name + ".run")
        self._fingerprint = fingerprint
        self._n = n
        self._file: Any = None
        self._lock: Any = None

    @staticmethod
    def check_name(path: Path, *, resume: bool, overwrite: bool) -> None:
        """Check that a run may write to a name, before anything else is known of it.

        Raises:
            ConfigError: when it is a folder, or a file of an earlier run stands there.
        """
        if not path.name or path.is_dir():
            raise _name_problem(f"{path}: a folder", "name a file")
        if resume or overwrite:
            return
        if path.exists():
            raise _name_problem(f"{path}: a finished file", "use --overwrite")
        partial = path.with_name(path.name + ".partial")
        if partial.exists():
            raise _name_problem(f"{partial}: an unfinished run", "use --resume or --overwrite")

    def open(self, *, resume: bool, overwrite: bool) -> None:
        """Begin, or go on where an earlier run ended.

        Raises:
            ConfigError: when a file is in the way, belongs to another run, or another process is
                writing it.
        """
        self.check_name(self.path, resume=resume, overwrite=overwrite)
        with self._telling_io_errors():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            try:
                self._begin(resume=resume)
            except BaseException:
                self._lock.close()
                raise

    @property
    def is_finished(self) -> bool:
        """Whether the file stands complete under its name, with nothing left to do."""
        return self._file is None and self.path.exists()

    def write(self, group: Group) -> None:
        """Add a complete group; it survives the end of this process from here on."""
        rows: list[Mapping[str, Any]] = [sample.to_json() for sample in group.samples]
        self._file.write("".join(json.dumps(row) + "\n" for row in rows))
        self._file.flush()
        self.done[group.id] = rows

    def finish(self) -> None:
        """Give the file its name: all groups are in."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        os.replace(self._partial, self.path)

    def close(self) -> None:
        """Leave an unfinished file as it is, to be resumed; one without a group is removed."""
        if self._file is not None:
            self._file.close()
            if not self.done:
                self._partial.unlink(missing_ok=True)
                self._run.unlink(missing_ok=True)
        self._lock.close()

    def _take_lock(self) -> None:
        self._lock = self._run.open("a+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            self._lock.close()
            found = f"{self.path}, which another process is writing"
            raise _name_problem(found, "wait for it, or choose another name") from exc

    def _begin(self, *, resume: bool) -> None:
        """Write the groups to keep into a fresh partial file, whole lines only."""
        before = self.path if self.path.exists() else self._partial
        if resume and before.exists():
            self._refuse_another_run(before)
            self.done = self._read_groups(before)
            if before is self.path:
                return
        else:
            self._partial.unlink(missing_ok=True)  # before its run's fingerprint goes
        self._lock.truncate(0)
        self._lock.write(self._fingerprint)
        self._lock.flush()
        staged = self._partial.with_name(self._partial.name + ".new")
        with staged.open("w", encoding="utf-8") as file:
            for rows in self.done.values():
                file.writelines(json.dumps(row) + "\n" for row in rows)
        os.replace(staged, self._partial)
        self._file = self._partial.open("a", encoding="utf-8")

    def _refuse_another_run(self, path: Path) -> None:
        self._lock.seek(0)
        if self._lock.read().strip() == self._fingerprint:
            return
        raise ConfigError(
            [
                Problem(
                    "--resume",
                    f"{path} of another run",
                    "the same model, prompts, n, seed and sampling",
                    "repeat the first call's arguments, or use --overwrite",
                )
            ]
        )

    def _read_groups(self, path: Path) -> dict[str, list[Mapping[str, Any]]]:
        """Return the groups that have all their samples; a torn last line is left out."""
        groups: dict[str, dict[int, Mapping[str, Any]]] = defaultdict(dict)
        for line in path.read_text(encoding="utf-8").split("\n"):
            with contextlib.suppress(json.JSONDecodeError):
                row = json.loads(line)
                groups[row["id"]][row["sample"]] = row
        return {
            prompt_id: [rows[i] for i in sorted(rows)]
            for prompt_id, rows in groups.items()
            if len(rows) == self._n
        }

    @contextlib.contextmanager
    def _telling_io_errors(self) -> Any:
        try:
            yield
        except OSError as exc:
            problem = Problem("--out", f"{self.path} ({exc})", "a file we may write", "choose one")
            raise ConfigError([problem]) from exc


def _name_problem(found: str, hint: str) -> ConfigError:
    return ConfigError([Problem("--out", found, "a name that is free", hint)])
