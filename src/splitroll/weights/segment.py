"""Weights in memory that processes of one host share: one segment holds one version, whole.

    header: state, number of buckets | a byte per bucket: 1 once it is written | data

The segment has no name in any file system. It is a memfd: readers open it through the writer's
`/proc/PID/fd`, so that nothing collides between jobs, nothing is left by a crash, and a small
`/dev/shm` (64 MB in a container) is no limit. Linux only, within one PID namespace and user.

Buckets may be read as soon as they are written: readers follow the writer and need no call per
bucket. A reader gives up when the writer is gone, has given up, or makes no progress in time.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

_HEADER = struct.Struct("<8sQ16sQ")  # magic, state, id, generation
_MAGIC = b"splitrol"
_STATE_AT = 8
_GENERATION_AT = 32
_FLAGS_AT = 64
_PAGE = mmap.PAGESIZE
_POLL_S = 0.0005
_WRITER_POLL_S = 0.2

_WRITING, _ABANDONED = 0, 1


@dataclass(frozen=True, slots=True)
class SegmentAddress:
    """Where a segment is, and who writes it.

    Attributes:
        pid, fd: of the process that holds it.
        id: random; tells it from an earlier one with the same descriptor.
        generation: counts the versions that it has held.
        writers: process ids by trainer rank; a bucket's owner is an index into it.
        data_at: byte offset of the data.
    """

    pid: int
    fd: int
    id: str
    buckets: int
    data_at: int
    size: int
    writers: tuple[int, ...]
    generation: int = 0

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/fd/{self.fd}"


class WriterGone(RuntimeError):
    """The writer died, gave up, or stopped making progress."""


class Segment:
    """A mapped segment. The creator holds it; others `attach`."""

    def __init__(self, memory: mmap.mmap, address: SegmentAddress, fd: int | None) -> None:
        self.memory = memory
        self.address = address
        self._fd = fd

    @classmethod
    def create(cls, buckets: int, data_bytes: int, writers: Sequence[int]) -> Segment:
        """Make a segment in which no bucket is written yet; `writers` are process ids by rank."""
        data_at = -(-(_FLAGS_AT + buckets) // _PAGE) * _PAGE
        size = data_at + max(1, data_bytes)
        fd = os.memfd_create("splitroll-weights")
        try:
            os.ftruncate(fd, size)
            memory = mmap.mmap(fd, size)
        except BaseException:
            os.close(fd)
            raise
        key = os.urandom(16)
        memory[: _HEADER.size] = _HEADER.pack(_MAGIC, _WRITING, key, 0)
        address = SegmentAddress(os.getpid(), fd, key.hex(), buckets, data_at, size, tuple(writers))
        segment = _held[address.id] = cls(memory, address, fd)
        return segment

    @classmethod
    @contextlib.contextmanager
    def opened(cls, address: SegmentAddress) -> Iterator[Segment]:
        """Map a segment for a while. Where this process holds it, its mapping serves: a new one
        costs a page fault for every page that is written.

        Raises:
            WriterGone: see `attach`.
        """
        held = _held.get(address.id)
        segment = cls.attach(address) if held is None else cls(held.memory, address, None)
        try:
            yield segment
        finally:
            if held is None:
                segment.close()

    @classmethod
    def attach(cls, address: SegmentAddress) -> Segment:
        """Map a segment of another process.

        Raises:
            WriterGone: when its holder is gone, or it cannot be opened.
        """
        try:
            fd = os.open(address.path, os.O_RDWR)
        except OSError as exc:
            raise WriterGone(
                f"the weights of process {address.pid} cannot be opened ({exc.strerror}): is it on "
                "this host, alive, of the same user and in the same container?"
            ) from exc
        try:
            memory = mmap.mmap(fd, address.size)
        except (OSError, ValueError) as exc:
            raise WriterGone(f"the weights of process {address.pid}: {exc}") from exc
        finally:
            os.close(fd)
        magic, _, key, _ = _HEADER.unpack(memory[: _HEADER.size])
        if magic != _MAGIC or key.hex() != address.id:
            memory.close()
            raise WriterGone(f"descriptor {address.fd} of process {address.pid} is something else")
        return cls(memory, address, None)

    def fits(self, buckets: int, data_bytes: int) -> bool:
        """Whether it has as many buckets, and room for the data."""
        here = self.address
        return here.buckets == buckets and here.data_at + data_bytes <= here.size

    def reuse(self, writers: Sequence[int]) -> None:
        """Mark all buckets unwritten: the memory, already mapped in, takes the next version."""
        old = self.address
        generation = old.generation + 1
        self._set(_GENERATION_AT, generation)
        self.memory[_FLAGS_AT : _FLAGS_AT + old.buckets] = bytes(old.buckets)
        self._set(_STATE_AT, _WRITING)
        self.address = replace(old, writers=tuple(writers), generation=generation)

    def check_writable(self) -> None:
        """See that a writer may still write.

        Raises:
            InterruptedError: the update was given up; the segment may hold another version by now.
        """
        if not self._is_this_generation() or self.memory[_STATE_AT] == _ABANDONED:
            raise InterruptedError("the update was given up")

    def mark_written(self, bucket: int) -> None:
        """Let readers read a bucket."""
        self.memory[_FLAGS_AT + bucket] = 1

    def is_written(self, bucket: int) -> bool:
        return bool(self.memory[_FLAGS_AT + bucket])

    def abandon(self) -> None:
        """Tell readers and writers of this version that no further bucket will come."""
        if self._is_this_generation():
            self._set(_STATE_AT, _ABANDONED)

    def follow(
        self,
        owners: Sequence[int],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Iterator[int]:
        """Yield the index of every bucket as soon as it is written, in any order.

        Args:
            owners: trainer rank by bucket.
            timeout_s: longest wait for any next bucket.

        Raises:
            WriterGone: when a bucket that is missing will not come.
        """
        missing = list(range(self.address.buckets))
        while missing:
            end_s = clock() + timeout_s
            check_s = clock() + _WRITER_POLL_S
            while (bucket := next(filter(self.is_written, missing), None)) is None:
                if self.memory[_STATE_AT] == _ABANDONED:
                    raise WriterGone("the trainer gave the update up")
                now_s = clock()
                if now_s > end_s:
                    raise WriterGone(f"the trainer wrote nothing for {timeout_s:g} s")
                if now_s > check_s:
                    check_s = now_s + _WRITER_POLL_S
                    gone = self._gone({owners[i] for i in missing})
                    if gone and not any(map(self.is_written, missing)):  # meanwhile
                        raise WriterGone(gone)
                sleep(_POLL_S)
            missing.remove(bucket)
            yield bucket

    def close(self) -> None:
        """Unmap; the memory itself goes with its last process."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        with contextlib.suppress(BufferError):  # with a view on it: unmapped with the last one
            self.memory.close()

    def _is_this_generation(self) -> bool:
        at = self.memory[_GENERATION_AT : _GENERATION_AT + 8]
        return int.from_bytes(at, "little") == self.address.generation

    def _set(self, at: int, value: int) -> None:
        self.memory[at : at + 8] = value.to_bytes(8, "little")

    def _gone(self, ranks: set[int]) -> str | None:
        """Return which of these ranks is dead, if one is."""
        for rank in sorted(ranks):
            pid = self.address.writers[rank]
            if not _alive(pid):
                return f"trainer rank {rank} (process {pid}) died"
        return None


_held: weakref.WeakValueDictionary[str, Segment] = weakref.WeakValueDictionary()
"""Segments that this process created, by id."""


def _alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
