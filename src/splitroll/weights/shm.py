"""Weights through shared memory: written once by the trainer, copied by every engine worker of the
host. Two segments take turns: the version that serves, and the next one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from splitroll.weights.manifest import Bucket, Manifest, ParamSpec, layout
from splitroll.weights.offer import Receiver, WeightOffer
from splitroll.weights.segment import Segment, SegmentAddress
from splitroll.weights.source import Source, checksum, materialize


@dataclass(frozen=True, slots=True)
class ShmPlan:
    """See `splitroll.weights.transport.WritePlan`."""

    address: SegmentAddress
    buckets: tuple[Bucket, ...]

    def write(self, rank: int, source: Source, checksums: Sequence[str]) -> Mapping[str, str]:
        with Segment.opened(self.address) as segment:
            return _write_share(segment, self.buckets, rank, source, checksums)


class ShmOutbox:
    """See `splitroll.weights.transport.Outbox`."""

    def __init__(self, segment: Segment, buckets: tuple[Bucket, ...], timeout_s: float) -> None:
        self.segment = segment
        self.buckets = buckets
        self._timeout_s = timeout_s

    @property
    def plan(self) -> ShmPlan:
        return ShmPlan(self.segment.address, self.buckets)

    @property
    def is_readable(self) -> bool:
        return any(map(self.segment.is_written, range(len(self.buckets))))

    def offer(self, checksums: Sequence[str] = ()) -> WeightOffer:
        return WeightOffer(
            segment=self.segment.address,
            buckets=self.buckets,
            timeout_s=self._timeout_s,
            checksum=tuple(checksums),
        )

    def seal(self) -> None:
        """Nothing to do: buckets are read as they are written."""

    def abandon(self) -> None:
        self.segment.abandon()


class ShmTransport:
    """See the module's docstring."""

    one_sender = False

    def __init__(self, bucket_bytes: int, timeout_s: float) -> None:
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._current: ShmOutbox | None = None
        self._spare: Segment | None = None
        self._closed = False

    def begin(
        self,
        version: int,
        shares: Sequence[Manifest],
        writers: Sequence[int],
        receivers: Sequence[Receiver] = (),
    ) -> ShmOutbox:
        buckets, size = layout(shares, self._bucket_bytes)
        segment, self._spare = self._spare, None
        if segment is not None and not segment.fits(len(buckets), size):
            segment.close()
            segment = None
        if segment is None:
            segment = Segment.create(len(buckets), size, writers)
        else:
            segment.reuse(writers)
        return ShmOutbox(segment, buckets, self._timeout_s)

    def commit(self, outbox: ShmOutbox) -> None:
        if self._closed:
            outbox.segment.close()
            return
        old, self._current = self._current, outbox
        self._keep_spare(old)

    def discard(self, outbox: ShmOutbox) -> None:
        self._keep_spare(outbox)

    def current(self) -> WeightOffer | None:
        return None if self._current is None else self._current.offer()

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._current is not None:
            for bucket in self._current.buckets:
                for spec, at in bucket.specs:
                    yield spec.name, tensor_at(self._current.segment, spec, at)

    def close(self) -> None:
        self._keep_spare(self._current)
        if self._spare is not None:
            self._spare.close()
        self._spare = self._current = None
        self._closed = True

    def _keep_spare(self, outbox: ShmOutbox | None) -> None:
        if outbox is None:
            return
        if self._closed:
            outbox.segment.close()
            return
        if self._spare is not None:
            self._spare.close()
        self._spare = outbox.segment


def tensor_at(segment: Segment, spec: ParamSpec, offset: int) -> torch.Tensor:
    """Return a parameter as a view on a segment, whose memory stays mapped as long as it lives."""
    if spec.nbytes == 0:
        return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    data = torch.frombuffer(
        memoryview(segment.memory),  # torch holds no export of the mmap itself
        dtype=torch.uint8,
        count=spec.nbytes,
        offset=segment.address.data_at + offset,
    )
    return data.view(getattr(torch, spec.dtype)).view(spec.shape)


def _write_share(
    segment: Segment,
    buckets: Sequence[Bucket],
    rank: int,
    source: Source,
    checksums: Sequence[str],
) -> dict[str, str]:
    """Write what one rank owns, bucket by bucket, in the order of its tensors.

    What fails on one rank must not leave the others alone in a collective: it still takes part in
    gathering the rest, and raises then.
    """
    failed: Exception | None = None
    wanted = set(checksums)
    sums = {}
    places = {
        spec.name: (index, spec, at)
        for index, bucket in enumerate(buckets)
        if bucket.owner == rank
        for spec, at in bucket.specs
    }
    missing = [len(bucket.specs) for bucket in buckets]
    for name, tensor in source.tensors.items():
        if failed or name not in places:
            source.take_part(name)
            continue
        index, spec, at = places[name]
        try:
            whole = materialize(tensor)
            segment.check_writable()
            tensor_at(segment, spec, at).copy_(whole)
            if name in wanted:
                sums[name] = checksum(whole.to(getattr(torch, spec.dtype)))
        except Exception as exc:
            failed = exc
            segment.abandon()  # so that engines stop waiting for it
            continue
        missing[index] -= 1
        if not missing[index]:
            segment.mark_written(index)
    if failed:
        raise failed
    return sums
