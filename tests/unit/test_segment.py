"""Shared memory between real processes: read while it is written, and what ends the reading."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitroll.weights.segment import Segment, SegmentAddress, WriterGone

BUCKETS, BUCKET_BYTES = 6, 100_000

PARTNER = """
import json, os, sys
from dataclasses import asdict
from splitroll.weights.segment import Segment, SegmentAddress, WriterGone

def answer(value):
    print(json.dumps(value), flush=True)

buckets, size = map(int, sys.argv[1:])
for line in sys.stdin:
    command, *rest = json.loads(line)
    if command == "create":
        segment = Segment.create(buckets, buckets * size, [os.getpid(), *rest])
        answer(asdict(segment.address))
        continue
    if command == "follow":
        segment = Segment.attach(SegmentAddress(**rest[0]))
        try:
            for bucket in segment.follow([0] * buckets, rest[1]):
                at = segment.address.data_at + bucket * size
                data = segment.memory[at : at + size]
                answer([bucket, data[0], data == data[:1] * size])
            answer("end")
        except WriterGone as exc:
            answer(str(exc))
        continue
    at = segment.address.data_at + (rest[0] if rest else 0) * size
    if command == "write":
        bucket, value = rest
        segment.memory[at : at + size] = bytes([value]) * size
        segment.mark_written(bucket)
    elif command == "half":
        segment.memory[at : at + size // 2] = b"x" * (size // 2)
    elif command == "abandon":
        segment.abandon()
    elif command == "fds":
        pass
    elif command == "close":
        segment.close()
    answer(len(os.listdir("/proc/self/fd")))
"""


class Partner:
    """Another process, which does what it is told to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid

    def tell(self, *command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, *command: Any) -> Any:
        self.tell(*command)
        return self.hear()

    def create(self, *other_writers: int) -> SegmentAddress:
        wire = self.ask("create", *other_writers)
        return SegmentAddress(**{**wire, "writers": tuple(wire["writers"])})


@contextlib.contextmanager
def partners(count: int) -> Iterator[list[Partner]]:
    command = [sys.executable, "-c", PARTNER, str(BUCKETS), str(BUCKET_BYTES)]
    with contextlib.ExitStack() as stack:
        started = []
        for _ in range(count):
            process = stack.enter_context(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
                )
            )
            stack.callback(process.kill)
            started.append(Partner(process))
        yield started


@pytest.fixture
def partner() -> Iterator[Partner]:
    with partners(1) as (one,):
        yield one


def make(buckets: int = BUCKETS, writers: tuple[int, ...] | None = None) -> Segment:
    return Segment.create(buckets, buckets * BUCKET_BYTES, writers or (os.getpid(),))


def data(segment: Segment, bucket: int) -> bytes:
    at = segment.address.data_at + bucket * BUCKET_BYTES
    return segment.memory[at : at + BUCKET_BYTES]


def follow(segment: Segment, timeout_s: float = 20.0) -> Iterator[int]:
    return segment.follow([0] * segment.address.buckets, timeout_s)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def a_dead_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


# Between processes


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0), (2, 5, 0, 4, 1, 3)])
def test_each_bucket_is_read_as_soon_as_another_process_wrote_it(
    partner: Partner, order: tuple[int, ...]
) -> None:
    segment = Segment.attach(partner.create())
    to_write, got = list(order), []
    partner.ask("write", to_write[0], 100 + to_write.pop(0))
    for bucket in follow(segment):
        got.append(bucket)
        assert data(segment, bucket) == bytes([100 + bucket]) * BUCKET_BYTES
        if to_write:  # only now: the reader does not wait for all of it
            partner.ask("write", to_write[0], 100 + to_write.pop(0))
    assert got == list(order)
    segment.close()


def test_a_reading_process_keeps_up_with_us_who_write(partner: Partner) -> None:
    segment = make()
    partner.tell("follow", asdict(segment.address), 20.0)
    for bucket in (3, 0, 5, 1, 2, 4):
        at = segment.address.data_at + bucket * BUCKET_BYTES
        segment.memory[at : at + BUCKET_BYTES] = bytes([bucket]) * BUCKET_BYTES
        segment.mark_written(bucket)
        assert partner.hear() == [bucket, bucket, True]
    assert partner.hear() == "end"
    segment.close()


def test_many_readers_each_get_all_of_it() -> None:
    segment = make()
    with partners(2) as readers:
        for reader in readers:
            reader.tell("follow", asdict(segment.address), 20.0)
        for bucket in range(BUCKETS):
            segment.mark_written(bucket)
        for reader in readers:
            assert sorted(reader.hear()[0] for _ in range(BUCKETS)) == list(range(BUCKETS))
            assert reader.hear() == "end"
    segment.close()


@pytest.mark.parametrize("reaped", [False, True], ids=["zombie", "reaped"])
def test_a_writer_killed_in_mid_bucket_is_noticed_and_named(partner: Partner, reaped: bool) -> None:
    segment = Segment.attach(partner.create())
    partner.ask("write", 1, 7)
    partner.ask("half", 2)
    reading = follow(segment, timeout_s=60)
    assert next(reading) == 1
    partner.process.kill()
    if reaped:
        partner.process.wait()
    begun_s = time.monotonic()
    with pytest.raises(WriterGone, match=rf"rank 0 \(process {partner.pid}\) died"):
        next(reading)  # and not the half-written one
    assert time.monotonic() - begun_s < 2
    assert data(segment, 1) == bytes([7]) * BUCKET_BYTES, "the memory outlives its writer"
    segment.close()


def test_what_a_dead_writer_finished_is_read_to_the_end(partner: Partner) -> None:
    segment = Segment.attach(partner.create())
    for bucket in range(BUCKETS):
        partner.ask("write", bucket, bucket)
    partner.process.kill()
    partner.process.wait()
    assert sorted(follow(segment)) == list(range(BUCKETS))
    segment.close()


def test_a_reading_process_notices_that_its_writer_is_killed() -> None:
    with partners(2) as (writer, reader):
        address = writer.create()
        writer.ask("write", 0, 9)
        reader.tell("follow", asdict(address), 60.0)
        assert reader.hear() == [0, 9, True]
        writer.process.kill()
        begun_s = time.monotonic()
        assert f"process {writer.pid}" in reader.hear()
        assert time.monotonic() - begun_s < 2


def test_a_writer_that_gives_up_is_noticed(partner: Partner) -> None:
    segment = Segment.attach(partner.create())
    partner.ask("write", 4, 1)
    partner.ask("abandon")
    reading = follow(segment, timeout_s=60)
    begun_s = time.monotonic()
    assert next(reading) == 4, "what was written may be read"
    with pytest.raises(WriterGone, match="gave the update up"):
        next(reading)
    assert time.monotonic() - begun_s < 2
    segment.close()


def test_a_writer_that_makes_no_progress_is_given_up_in_time(partner: Partner) -> None:
    segment = Segment.attach(partner.create())
    partner.ask("write", 0, 1)
    reading = follow(segment, timeout_s=0.5)
    assert next(reading) == 0
    begun_s = time.monotonic()
    with pytest.raises(WriterGone, match=r"nothing for 0\.5 s"):
        next(reading)
    assert 0.5 <= time.monotonic() - begun_s < 1.5
    segment.close()


def test_a_segment_whose_holder_is_gone_cannot_be_attached(partner: Partner) -> None:
    address = partner.create()
    partner.process.kill()
    partner.process.wait()
    with pytest.raises(WriterGone, match=f"process {partner.pid}"):
        Segment.attach(address)


def test_a_segment_that_its_holder_closed_cannot_be_attached(partner: Partner) -> None:
    address = partner.create()
    partner.ask("close")
    with pytest.raises(WriterGone, match=f"process {partner.pid}"):
        Segment.attach(address)


def test_the_next_version_in_the_same_memory_needs_no_new_attachment(partner: Partner) -> None:
    segment = make()
    for version in range(1, 4):
        partner.tell("follow", asdict(segment.address), 20.0)
        for bucket in range(BUCKETS):
            at = segment.address.data_at + bucket * BUCKET_BYTES
            segment.memory[at : at + BUCKET_BYTES] = bytes([version]) * BUCKET_BYTES
            segment.mark_written(bucket)
        for _ in range(BUCKETS):
            assert partner.hear()[1:] == [version, True]
        assert partner.hear() == "end"
        segment.reuse((os.getpid(),))
    segment.close()


def test_a_process_has_no_descriptor_left_after_closing(partner: Partner) -> None:
    partner.create()
    partner.ask("close")
    before = partner.ask("fds")
    for _ in range(5):
        partner.create()
        partner.ask("close")
    assert partner.ask("fds") == before


# In one process


@given(st.permutations(range(BUCKETS)), st.integers(0, BUCKETS))
def test_every_bucket_comes_once_in_whatever_order_they_are_written(
    order: list[int], before: int
) -> None:
    segment = make()
    for bucket in order[:before]:
        segment.mark_written(bucket)
    left = iter(order[before:])

    def write_one(_: float) -> None:
        segment.mark_written(next(left))

    got = list(segment.follow([0] * BUCKETS, 20.0, sleep=write_one))
    assert sorted(got) == list(range(BUCKETS))
    assert got[before:] == order[before:], "each as soon as it is there"
    segment.close()


def test_a_bucket_is_read_whose_writer_wrote_it_and_died_at_once() -> None:
    """It comes, and its writer goes, between our look at the bucket and that at the writer."""
    segment = make(1)
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 0.15
        if now_s > 0.5:  # when the writers are looked at
            segment.address = replace(segment.address, writers=(dead,))
            segment.mark_written(0)
        return now_s

    dead = a_dead_process()
    assert list(segment.follow([0], 20.0, clock, lambda _: None)) == [0]
    segment.close()


def test_only_ranks_that_owe_a_bucket_must_live() -> None:
    segment = make(3, (os.getpid(), a_dead_process()))
    segment.mark_written(1)
    sleeps = 0

    def sleep(seconds: float) -> None:
        nonlocal sleeps
        time.sleep(0.05)
        sleeps += 1
        if sleeps == 10:
            segment.mark_written(0)
            segment.mark_written(2)

    assert sorted(segment.follow([0, 1, 0], 20.0, sleep=sleep)) == [0, 1, 2]
    segment.close()


def test_a_rank_that_owes_a_bucket_and_is_dead_is_named() -> None:
    dead = a_dead_process()
    segment = make(3, (os.getpid(), dead))
    segment.mark_written(0)
    segment.mark_written(2)
    with pytest.raises(WriterGone, match=rf"rank 1 \(process {dead}\)"):
        list(segment.follow([0, 1, 0], 20.0))
    segment.close()


def test_the_time_limit_begins_anew_with_every_bucket() -> None:
    segment = make()
    now_s = 0.0

    def sleep(_: float) -> None:
        nonlocal now_s
        now_s += 9.0
        segment.mark_written(round(now_s / 9.0) - 1)

    got = list(segment.follow([0] * BUCKETS, 10.0, lambda: now_s, sleep))
    assert got == list(range(BUCKETS))
    assert now_s == 54.0
    segment.close()


def test_a_segment_without_buckets_is_read_at_once() -> None:
    segment = Segment.create(0, 0, (a_dead_process(),))
    assert list(follow(segment)) == []
    segment.close()


def test_data_is_apart_from_however_many_flags() -> None:
    for buckets in (1, 63, 4032, 4033, 9000):
        segment = Segment.create(buckets, 10, (os.getpid(),))
        at = segment.address.data_at
        assert at % os.sysconf("SC_PAGESIZE") == 0
        for bucket in range(buckets):
            segment.mark_written(bucket)
        assert segment.memory[at : at + 10] == bytes(10)
        assert segment.address.size == at + 10
        segment.memory[at : at + 10] = b"\xff" * 10
        assert sorted(follow(segment)) == list(range(buckets))
        segment.close()


def test_it_has_room_for_as_many_buckets_and_no_more_bytes() -> None:
    segment = Segment.create(4, 1000, (1,))
    assert segment.fits(4, 1000)
    assert segment.fits(4, 10)
    assert not segment.fits(4, 1001)
    assert not segment.fits(3, 1000)
    assert not segment.fits(5, 1000)
    segment.close()


def test_reuse_takes_back_what_was_written_and_given_up() -> None:
    segment = make(2, (1, 2))
    reader = Segment.attach(segment.address)
    segment.mark_written(0)
    segment.mark_written(1)
    segment.abandon()
    segment.reuse((os.getpid(), os.getpid()))
    assert not any(map(reader.is_written, range(2)))
    assert segment.address == replace(
        reader.address, writers=(os.getpid(), os.getpid()), generation=1
    )
    with pytest.raises(WriterGone, match="nothing for"):
        next(reader.follow([0, 0], 0.1))
    reader.close()
    segment.close()


def something_else(kind: str) -> int:
    """Return a descriptor of something that is no segment of ours."""
    if kind == "pipe":
        reading, writing = os.pipe()
        os.close(reading)
        return writing
    if kind == "socket":
        return socket.socket().detach()
    if kind == "folder":
        return os.open("/", os.O_RDONLY)
    if kind == "nothing":
        return os.open("/dev/null", os.O_RDWR)
    if kind == "memory":
        fd = os.memfd_create("other")
        os.ftruncate(fd, 10**7)
        return fd
    with tempfile.TemporaryFile() as file:
        file.write(b"a short file")
        file.flush()
        return os.dup(file.fileno())


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "nothing", "memory", "file"])
def test_a_descriptor_that_became_something_else_is_refused(kind: str) -> None:
    segment = make()
    address = segment.address
    segment.close()
    other = something_else(kind)
    if other != address.fd:
        os.dup2(other, address.fd)
        os.close(other)
    before = open_files()
    with pytest.raises(WriterGone, match=str(os.getpid())) as raised:
        Segment.attach(address)
    assert raised.value
    assert open_files() == before, "nor is it kept open"
    os.close(address.fd)


def test_a_descriptor_that_became_another_segment_is_refused() -> None:
    segment = make()
    old = segment.address
    segment.close()
    other = make()
    with pytest.raises(WriterGone, match="something else"):
        Segment.attach(replace(old, fd=other.address.fd))
    other.close()


def test_two_segments_have_different_ids() -> None:
    segments = [make(1) for _ in range(10)]
    assert len({segment.address.id for segment in segments}) == 10
    for segment in segments:
        segment.close()


def test_it_has_no_name_in_any_file_system_and_leaves_no_descriptor() -> None:
    before = open_files()
    for _ in range(10):
        segment = make()
        assert os.readlink(segment.address.path).startswith("/memfd:")
        readers = [Segment.attach(segment.address) for _ in range(3)]
        assert not [name for name in os.listdir("/dev/shm") if "splitroll-w" in name]
        for reader in readers:
            reader.close()
        segment.close()
        segment.close()  # twice does no harm
    assert open_files() == before


def test_a_view_outlives_the_segments_closing_and_the_memory_goes_with_it() -> None:
    before = open_files()
    segment = make()
    at = segment.address.data_at
    segment.memory[at : at + 4] = b"data"
    view = memoryview(segment.memory)[at : at + 4]
    segment.close()
    del segment
    assert bytes(view) == b"data"
    del view
    assert open_files() == before
