"""One contract over all transports, and what is particular to each."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from splitroll.config.schema import Weights
from splitroll.weights.disk import DiskTransport, read_files
from splitroll.weights.manifest import Bucket, Manifest, ParamSpec, layout
from splitroll.weights.offer import WeightOffer
from splitroll.weights.segment import Segment, SegmentAddress, WriterGone
from splitroll.weights.shm import ShmPlan, ShmTransport, tensor_at
from splitroll.weights.source import Source, checksum
from splitroll.weights.transports import make_transport

BUCKET_BYTES = 256
TIMEOUT_S = 20.0
WIRE = (
    ParamSpec("embed", "bfloat16", (20, 8)),
    ParamSpec("norm", "bfloat16", (8,)),
    ParamSpec("router", "float32", (3, 5)),
    ParamSpec("ids", "int64", (4,)),
    ParamSpec("scalar", "bfloat16", ()),
    ParamSpec("empty", "bfloat16", (0, 8)),
    ParamSpec("head", "bfloat16", (20, 8)),
)
PID = os.getpid()

Transport = ShmTransport | DiskTransport
Named = dict[str, torch.Tensor]


def make(kind: str, folder: Path) -> Any:
    if kind == "shm":
        return ShmTransport(BUCKET_BYTES, TIMEOUT_S)
    return DiskTransport(folder / "fleet", BUCKET_BYTES, TIMEOUT_S)


@pytest.fixture(params=["shm", "disk"])
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    made = make(request.param, tmp_path)
    yield made
    made.close()


@pytest.fixture
def shm() -> Iterator[ShmTransport]:
    made = ShmTransport(BUCKET_BYTES, TIMEOUT_S)
    yield made
    made.close()


@pytest.fixture
def disk(tmp_path: Path) -> DiskTransport:
    return DiskTransport(tmp_path / "fleet", BUCKET_BYTES, TIMEOUT_S)


def weights(seed: int, wire: Manifest = WIRE) -> Named:
    """What a trainer has: in float32, whatever the engines compute in."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for spec in wire:
        tensor = torch.randn(spec.shape, generator=generator)
        made[spec.name] = (tensor * 100).long() if spec.dtype == "int64" else tensor
    return made


def sent(tensors: Named, wire: Manifest = WIRE) -> Named:
    return {spec.name: tensors[spec.name].to(getattr(torch, spec.dtype)) for spec in wire}


def load(offer: WeightOffer) -> Named:
    """Load an offer as an engine's worker does, after its journey there."""
    offer = WeightOffer.from_wire(json.loads(json.dumps(offer.to_wire())))
    if offer.segment is None:
        assert offer.folder is not None
        return dict(read_files(Path(offer.folder)))
    segment = Segment.attach(offer.segment)
    loaded = {}
    for index in segment.follow([b.owner for b in offer.buckets], offer.timeout_s):
        for spec, at in offer.buckets[index].specs:
            assert spec.name not in loaded
            loaded[spec.name] = tensor_at(segment, spec, at).clone()
    segment.close()
    return loaded


def serving(transport: Transport) -> Named:
    return {name: tensor.clone() for name, tensor in transport.read()}


def assert_equal(found: Named, expected: Named) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name], tensor), name


def write(outbox: Any, source: Source, checksums: Sequence[str]) -> Mapping[str, str]:
    """Write all of a version, as the only trainer rank."""
    sums: Mapping[str, str] = outbox.plan.write(0, source, checksums)
    outbox.seal()
    return sums


def push(transport: Any, version: int, tensors: Named, wire: Manifest = WIRE) -> WeightOffer:
    """Write and commit a version."""
    outbox = transport.begin(version, [wire], [PID])
    write(outbox, Source(tensors), ())
    transport.commit(outbox)
    offer: WeightOffer = outbox.offer()
    return offer


class Hooked(torch.Tensor):
    """A shard whose gathering does something else as well."""

    hook: Callable[[], None]
    whole: torch.Tensor

    def full_tensor(self) -> torch.Tensor:
        self.hook()
        return self.whole


def hooked(tensors: Named, name: str, hook: Callable[[], None]) -> Source:
    """A source that calls a hook while it gives one of its tensors."""
    shard = torch.empty_like(tensors[name]).as_subclass(Hooked)
    shard.whole, shard.hook = tensors[name], hook
    return Source({**tensors, name: shard})


def noted(tensors: Named, name: str, gathered: list[str]) -> torch.Tensor:
    return hooked(tensors, name, lambda: gathered.append(name)).tensors[name]


def out_of_memory() -> None:
    raise MemoryError("in the trainer")


# The contract


def test_before_the_first_version_there_is_none(transport: Any) -> None:
    assert transport.current() is None
    assert list(transport.read()) == []


def test_a_version_arrives_in_the_engines_dtypes(transport: Any) -> None:
    outbox = transport.begin(1, [WIRE], [PID])
    write(outbox, Source(weights(1)), ())
    assert_equal(load(outbox.offer()), sent(weights(1)))


def test_checksums_are_those_of_the_bytes_that_arrive(transport: Any) -> None:
    outbox = transport.begin(1, [WIRE], [PID])
    wanted = ["head", "router", "ids", "empty", "scalar"]
    offer = outbox.offer(wanted)
    assert list(offer.checksum) == wanted
    sums = write(outbox, Source(weights(1)), wanted)
    loaded = load(offer)
    assert sums == {name: checksum(loaded[name]) for name in wanted}
    assert sums["head"] != checksum(weights(1)["head"]), "of what is sent, not of what there was"


def test_without_checksums_none_is_taken(transport: Any) -> None:
    outbox = transport.begin(1, [WIRE], [PID])
    assert write(outbox, Source(weights(1)), ()) == {}
    assert outbox.offer().checksum == ()


def test_tensors_that_are_not_contiguous_arrive_whole(transport: Any) -> None:
    tensors = weights(1)
    tensors["embed"] = tensors["embed"].T.contiguous().T
    tensors["head"] = torch.randn(40, 16)[::2, ::2]
    assert not any(tensors[name].is_contiguous() for name in ("embed", "head"))
    outbox = transport.begin(1, [WIRE], [PID])
    sums = write(outbox, Source(tensors), ["embed"])
    loaded = load(outbox.offer())
    assert_equal(loaded, sent(tensors))
    assert sums == {"embed": checksum(loaded["embed"])}


def test_the_trainers_order_need_not_be_the_manifests(transport: Any) -> None:
    tensors = dict(reversed(weights(1).items()))
    outbox = transport.begin(1, [WIRE], [PID])
    write(outbox, Source(tensors), ())
    assert_equal(load(outbox.offer()), sent(tensors))


def test_parameters_that_need_gradients_and_shards_are_written(transport: Any) -> None:
    tensors = weights(1)
    tensors["norm"].requires_grad_()
    gathered: list[str] = []
    source = hooked(tensors, "head", lambda: gathered.append("head"))
    outbox = transport.begin(1, [WIRE], [PID])
    write(outbox, source, ["norm"])
    assert gathered == ["head"], "once: it is a collective"
    loaded = load(outbox.offer())
    assert_equal(loaded, sent(tensors))
    assert not loaded["norm"].requires_grad


def test_it_is_readable_once_there_is_something_to_load(transport: Any) -> None:
    outbox = transport.begin(1, [WIRE], [PID])
    assert not outbox.is_readable
    source = hooked(weights(1), "embed", lambda: seen.append(outbox.is_readable))
    seen: list[bool] = []
    write(outbox, source, ())
    assert seen == [False]
    assert outbox.is_readable


def test_a_committed_version_serves(transport: Any) -> None:
    push(transport, 1, weights(1))
    assert_equal(load(transport.current()), sent(weights(1)))
    assert_equal(serving(transport), sent(weights(1)))


def test_the_version_that_serves_stays_until_the_next_is_committed(transport: Any) -> None:
    offer = push(transport, 1, weights(1))
    outbox = transport.begin(2, [WIRE], [PID])
    seen = []

    def look() -> None:
        for found in (load(offer), load(transport.current()), serving(transport)):
            assert_equal(found, sent(weights(1)))
            seen.append(found)

    write(outbox, hooked(weights(2), "router", look), ())
    look()
    assert len(seen) == 6
    assert_equal(load(outbox.offer()), sent(weights(2)))
    transport.commit(outbox)
    assert_equal(load(transport.current()), sent(weights(2)))
    assert_equal(serving(transport), sent(weights(2)))


def test_a_discarded_version_leaves_the_one_that_serves(transport: Any) -> None:
    push(transport, 1, weights(1))
    outbox = transport.begin(2, [WIRE], [PID])
    write(outbox, Source(weights(2)), ())
    transport.discard(outbox)
    assert_equal(load(transport.current()), sent(weights(1)))
    push(transport, 2, weights(3))  # the same number again
    assert_equal(load(transport.current()), sent(weights(3)))


def test_a_discarded_first_version_leaves_none(transport: Any) -> None:
    outbox = transport.begin(1, [WIRE], [PID])
    write(outbox, Source(weights(1)), ())
    transport.discard(outbox)
    assert transport.current() is None
    assert list(transport.read()) == []
    transport.discard(transport.begin(2, [WIRE], [PID]))  # not even written
    assert transport.current() is None


def test_a_write_that_raises_leaves_the_version_that_serves(transport: Any) -> None:
    push(transport, 1, weights(1))
    outbox = transport.begin(2, [WIRE], [PID])
    with pytest.raises(MemoryError, match="in the trainer"):
        write(outbox, hooked(weights(2), "router", out_of_memory), ())
    assert_equal(load(transport.current()), sent(weights(1)))
    transport.discard(outbox)
    assert_equal(load(transport.current()), sent(weights(1)))
    push(transport, 2, weights(2))
    assert_equal(load(transport.current()), sent(weights(2)))


@pytest.mark.parametrize("name", ["embed", "head"], ids=["in the first", "in the last"])
def test_a_writer_stops_when_the_update_is_given_up(transport: Any, name: str) -> None:
    outbox = transport.begin(1, [WIRE], [PID])
    with pytest.raises(InterruptedError, match="given up"):
        write(outbox, hooked(weights(1), name, outbox.abandon), ())


@pytest.mark.parametrize("name", ["embed", "head"], ids=["in the first", "in the last"])
def test_a_writer_that_comes_late_does_not_disturb_the_next_version(
    transport: Any, name: str
) -> None:
    """It was held up, in a collective perhaps, for longer than the update waited for it."""
    push(transport, 1, weights(1))
    late = transport.begin(2, [WIRE], [PID])

    def meanwhile() -> None:
        late.abandon()
        transport.discard(late)
        push(transport, 3, weights(3))

    with pytest.raises(InterruptedError):
        write(late, hooked(weights(2), name, meanwhile), ())
    assert_equal(load(transport.current()), sent(weights(3)))
    assert_equal(serving(transport), sent(weights(3)))


def test_other_parameters_may_follow(transport: Any) -> None:
    more = (*WIRE, *(ParamSpec(f"more{i}", "float32", (100,)) for i in range(9)))
    for version, wire in enumerate((WIRE, more, WIRE[:2], WIRE[2:], more, WIRE), start=1):
        push(transport, version, weights(version, wire), wire)
        assert_equal(load(transport.current()), sent(weights(version, wire), wire))
        assert_equal(serving(transport), sent(weights(version, wire), wire))


def test_after_closing_nothing_serves_and_closing_again_does_no_harm(transport: Any) -> None:
    offer = push(transport, 1, weights(1))
    transport.close()
    transport.close()
    if offer.segment is None:
        assert load(offer) == {}
    else:
        with pytest.raises(WriterGone):
            load(offer)


@pytest.mark.parametrize("kind", ["shm", "disk"])
@settings(max_examples=25, deadline=None)
@given(steps=st.lists(st.sampled_from(["commit", "discard", "raise", "abandon"]), max_size=12))
def test_whatever_happened_to_others_the_last_committed_one_serves(
    kind: str, steps: list[str]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        transport = make(kind, Path(folder))
        expected: Named = {}
        for version, step in enumerate(steps, start=1):
            outbox = transport.begin(version, [WIRE], [PID])
            if step == "raise":
                with pytest.raises(MemoryError):
                    write(outbox, hooked(weights(version), "head", out_of_memory), ())
            elif step == "abandon":
                outbox.abandon()
            else:
                write(outbox, Source(weights(version)), ())
            if step == "commit":
                transport.commit(outbox)
                expected = sent(weights(version))
            else:
                transport.discard(outbox)
            assert_equal(serving(transport), expected)
            if (offer := transport.current()) is not None:
                assert_equal(load(offer), expected)
        transport.close()


def test_twenty_versions_leave_no_more_open_than_two(transport: Any) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    at_first = open_files()
    counts = []
    for version in range(1, 21):
        wire = (*WIRE, ParamSpec("grown", "float32", (version * 500,)))  # always a new segment
        push(transport, version, weights(version, wire), wire)
        assert set(load(transport.current())) == {spec.name for spec in wire}
        counts.append(open_files())
    assert max(counts) == max(counts[:2])
    transport.close()
    assert open_files() == at_first


# Shared memory


def test_two_segments_take_turns(shm: ShmTransport) -> None:
    ids = []
    for version in range(1, 7):
        offer = push(shm, version, weights(version))
        assert offer.segment is not None
        ids.append(offer.segment.id)
    assert ids[0] != ids[1]
    assert ids == ids[:2] * 3


def test_a_discarded_segment_is_taken_again(shm: ShmTransport) -> None:
    first = push(shm, 1, weights(1)).segment
    ids = set()
    for version in range(2, 6):
        outbox = shm.begin(version, [WIRE], [PID])
        ids.add(outbox.segment.address.id)
        write(outbox, Source(weights(version)), ())
        outbox.abandon()
        shm.discard(outbox)
    assert first is not None
    assert len(ids) == 1
    assert first.id not in ids
    assert push(shm, 6, weights(6)).segment.id in ids  # type: ignore[union-attr]
    assert_equal(load(shm.current()), sent(weights(6)))  # type: ignore[arg-type]


def test_a_model_that_grows_gets_a_new_segment(shm: ShmTransport) -> None:
    grown = (*WIRE[:-1], ParamSpec("head", "bfloat16", (2000, 8)))
    assert len(layout([grown], BUCKET_BYTES)[0]) == len(layout([WIRE], BUCKET_BYTES)[0])
    ids, sizes = [], []
    for version, wire in enumerate((WIRE, WIRE, grown, grown, WIRE), start=1):
        address = push(shm, version, weights(version, wire), wire).segment
        assert address is not None
        assert_equal(load(shm.current()), sent(weights(version, wire), wire))  # type: ignore[arg-type]
        ids.append(address.id)
        sizes.append(address.size)
    assert len(set(ids)) == 4
    assert ids[4] == ids[2], "a smaller model finds room"
    assert sizes[2] > sizes[0]


def test_a_reader_follows_a_writer_of_another_thread(shm: ShmTransport) -> None:
    outbox = shm.begin(1, [WIRE], [PID])
    held = threading.Event()
    source = hooked(weights(1), "head", lambda: None if held.wait(TIMEOUT_S) else out_of_memory())
    writing = threading.Thread(target=write, args=(outbox, source, ()))
    writing.start()
    try:
        while not outbox.is_readable:
            time.sleep(0.001)
        offer = outbox.offer()
        segment = Segment.attach(offer.segment)
        for _ in segment.follow([0] * len(offer.buckets), TIMEOUT_S):
            held.set()  # the first bucket came while the last was not even gathered
    finally:
        held.set()
        writing.join()
    assert_equal(load(offer), sent(weights(1)))
    segment.close()


def test_readers_of_a_version_that_is_given_up_stop(shm: ShmTransport) -> None:
    outbox = shm.begin(1, [WIRE], [PID])
    outbox.abandon()
    with pytest.raises(WriterGone, match="gave the update up"):
        load(outbox.offer())


def test_a_tensor_keeps_the_memory_that_it_lies_in() -> None:
    """Else its reader would crash with the segment's closing, and not with an error."""
    segment = Segment.create(1, 4096, [PID])
    spec = ParamSpec("w", "float32", (8,))
    tensor = tensor_at(segment, spec, 0)
    tensor.fill_(3.0)
    view = tensor[2:4].view(1, 2)
    del tensor
    with pytest.raises(BufferError):
        segment.memory.close()
    segment.close()
    assert view.tolist() == [[3.0, 3.0]]
    del view
    segment.memory.close()


def test_every_rank_writes_its_own_buckets_and_gathers_with_the_others() -> None:
    shares = [WIRE[:3], WIRE[3:]]
    buckets, size = layout(shares, BUCKET_BYTES)
    segment = Segment.create(len(buckets), size, [PID, PID])
    tensors = weights(1)
    own = [{spec.name for spec in share} for share in shares]
    for rank in (0, 1):
        gathered: list[str] = []
        shards = {name: noted(tensors, name, gathered) for name in tensors}
        sums = ShmPlan(segment.address, buckets).write(rank, Source(shards), list(tensors))
        assert gathered == list(tensors), "all ranks gather all, in one order, or they wait forever"
        assert set(sums) == own[rank]
        written = {buckets[i].owner for i in range(len(buckets)) if segment.is_written(i)}
        assert written == set(range(rank + 1))
    offer = WeightOffer(segment=segment.address, buckets=buckets)
    assert_equal(load(offer), sent(tensors))
    segment.close()


def test_a_bucket_is_readable_when_all_of_it_is_written() -> None:
    buckets, size = layout([WIRE], 10**6)
    assert len(buckets) == 1
    segment = Segment.create(1, size, [PID])
    seen: list[bool] = []
    source = hooked(weights(1), "head", lambda: seen.append(segment.is_written(0)))
    ShmPlan(segment.address, buckets).write(0, source, ())
    assert (seen, segment.is_written(0)) == ([False], True)
    segment.close()


# Files


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_nothing_is_under_the_final_name_until_all_of_it_is_written(
    disk: DiskTransport, tmp_path: Path
) -> None:
    outbox = disk.begin(7, [WIRE], [PID])
    seen: list[bool] = []
    assert len(outbox.plan.buckets) > 1
    write(outbox, hooked(weights(1), "head", lambda: seen.append(outbox.folder.exists())), ())
    assert seen == [False]
    assert names(tmp_path / "fleet") == ["version-7"]
    assert len(names(outbox.folder)) == len(outbox.plan.buckets)


def test_a_write_that_is_interrupted_leaves_no_folder(disk: DiskTransport, tmp_path: Path) -> None:
    push(disk, 1, weights(1))
    outbox = disk.begin(2, [WIRE], [PID])
    with pytest.raises(MemoryError):
        write(outbox, hooked(weights(2), "head", out_of_memory), ())
    assert not outbox.folder.exists()
    assert not outbox.is_readable
    disk.discard(outbox)
    assert names(tmp_path / "fleet") == ["version-1"]


def test_a_full_disk_leaves_no_folder(
    disk: DiskTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(disk, 1, weights(1))
    outbox = disk.begin(2, [WIRE], [PID])
    files: list[Path] = []

    def save(tensors: Named, path: Path) -> None:
        if len(files) == 1:
            raise OSError(28, "No space left on device")
        files.append(path)
        save_file(tensors, path)

    monkeypatch.setattr("splitroll.weights.disk.save_file", save)
    with pytest.raises(OSError, match="No space left"):
        write(outbox, Source(weights(2)), ())
    disk.discard(outbox)
    assert names(tmp_path / "fleet") == ["version-1"]
    assert_equal(serving(disk), sent(weights(1)))


def test_old_versions_are_removed_with_the_commit(disk: DiskTransport, tmp_path: Path) -> None:
    push(disk, 1, weights(1))
    outbox = disk.begin(2, [WIRE], [PID])
    write(outbox, Source(weights(2)), ())
    assert names(tmp_path / "fleet") == ["version-1", "version-2"]
    disk.commit(outbox)
    assert names(tmp_path / "fleet") == ["version-2"]
    for version in range(3, 8):
        push(disk, version, weights(version))
    assert names(tmp_path / "fleet") == ["version-7"]
    disk.close()
    assert names(tmp_path) == []


def test_what_a_crash_left_of_a_version_is_not_taken_for_it(
    disk: DiskTransport, tmp_path: Path
) -> None:
    outbox = disk.begin(1, [WIRE], [PID])
    left = tmp_path / "fleet" / "version-1-0a0b0c0d.writing"
    left.mkdir()
    save_file({"stranger": torch.ones(1)}, left / "model-00099.safetensors")
    write(outbox, Source(weights(1)), ())
    assert_equal(load(outbox.offer()), sent(weights(1)))
    assert names(tmp_path / "fleet") == ["version-1", left.name]


def test_files_are_a_checkpoint_that_others_can_read(disk: DiskTransport, tmp_path: Path) -> None:
    from splitroll.weights.manifest import checkpoint_manifest

    push(disk, 1, weights(1))
    assert set(checkpoint_manifest(tmp_path / "fleet" / "version-1")) == set(WIRE)


def test_files_that_an_index_does_not_name_are_not_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model-00001-of-00001.safetensors")
    save_file({"layers.0.wq": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    index = '{"weight_map": {"a": "model-00001-of-00001.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert list(dict(read_files(tmp_path))) == ["a"]


# Settings and offers


def test_the_configuration_names_the_transport(tmp_path: Path) -> None:
    shm = make_transport(Weights(transport="shm"), "f1")
    assert isinstance(shm, ShmTransport)
    settings_ = Weights(transport="disk", path=str(tmp_path))
    made = [make_transport(settings_, fleet_id) for fleet_id in ("f1", "f2")]
    for transport, version in zip(made, (1, 1), strict=True):
        push(transport, version, weights(1))
    assert names(tmp_path) == ["splitroll-f1", "splitroll-f2"], "fleets do not meet"
    made[0].close()
    assert names(tmp_path) == ["splitroll-f2"]
    made[1].close()


def test_an_offer_travels_as_plain_values() -> None:
    offer = WeightOffer(
        segment=SegmentAddress(1, 2, "id", 2, 4096, 9000, (3, 4)),
        buckets=(
            Bucket(((WIRE[0], 0), (WIRE[4], 320)), 0),
            Bucket(((WIRE[5], 384),), 1),
        ),
        timeout_s=3.5,
        checksum=("embed", "ids"),
    )
    for one in (offer, WeightOffer(folder="/a/folder"), WeightOffer()):
        assert WeightOffer.from_wire(json.loads(json.dumps(one.to_wire()))) == one


@pytest.mark.parametrize("kind", ["shm", "disk"])
def test_a_rank_that_fails_still_takes_part_in_gathering_the_rest(
    kind: str, tmp_path: Path
) -> None:
    """The others would wait for it in a collective."""
    transport = make(kind, tmp_path)
    gathered: list[str] = []
    tensors = weights(1)
    shards = {name: noted(tensors, name, gathered) for name in tensors}
    failing = hooked(tensors, "router", out_of_memory).tensors["router"]
    outbox = transport.begin(1, [WIRE], [PID])
    with pytest.raises(MemoryError):
        outbox.plan.write(0, Source({**shards, "router": failing}), ())
    assert set(gathered) == set(tensors) - {"router"}
    transport.discard(outbox)
    transport.close()
