"""Weights through safetensors files on a path that all nodes see: written aside, then renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from splitroll.weights.manifest import Bucket, Manifest, checkpoint_files, layout
from splitroll.weights.offer import Receiver, WeightOffer
from splitroll.weights.source import Source, checksum, materialize


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """See `splitroll.weights.transport.WritePlan`. A bucket is a file."""

    folder: Path
    buckets: tuple[Bucket, ...]

    def write(self, rank: int, source: Source, checksums: Sequence[str]) -> Mapping[str, str]:
        sums = {}
        failed: Exception | None = None
        for index, bucket in enumerate(self.buckets):
            file: dict[str, torch.Tensor] = {}
            for spec, _ in bucket.specs:
                if failed or bucket.owner != rank:
                    source.take_part(spec.name)  # or the others would wait in a collective
                    continue
                try:
                    whole = materialize(source.tensors[spec.name])
                    if not self.folder.exists():
                        raise InterruptedError("the update was given up")
                    sent = file[spec.name] = whole.to(
                        "cpu", getattr(torch, spec.dtype)
                    ).contiguous()
                    if spec.name in checksums:
                        sums[spec.name] = checksum(sent)
                    if len(file) == len(bucket.specs):
                        save_file(file, self.folder / f"model-{index:05d}.safetensors")
                except Exception as exc:
                    failed = exc
        if failed:
            raise failed
        return sums


class DiskOutbox:
    """One version on its way; engines read it once all of it is written."""

    def __init__(self, folder: Path, buckets: tuple[Bucket, ...], timeout_s: float) -> None:
        self.folder = folder
        # A writer of an earlier try may be late.
        self.staging = folder.with_name(f"{folder.name}-{os.urandom(4).hex()}.writing")
        self._buckets = buckets
        self._timeout_s = timeout_s
        self.staging.mkdir(parents=True)

    @property
    def plan(self) -> DiskPlan:
        return DiskPlan(self.staging, self._buckets)

    @property
    def is_readable(self) -> bool:
        return self.folder.exists()

    def offer(self, checksums: Sequence[str] = ()) -> WeightOffer:
        return WeightOffer(
            folder=str(self.folder),
            names=tuple(spec.name for bucket in self._buckets for spec, _ in bucket.specs),
            timeout_s=self._timeout_s,
            checksum=tuple(checksums),
        )

    def seal(self) -> None:
        os.replace(self.staging, self.folder)

    def abandon(self) -> None:
        # In one step, so that no part of it can be sealed while it goes.
        gone = self.staging.with_suffix(".gone")
        with contextlib.suppress(OSError):
            os.replace(self.staging, gone)
            shutil.rmtree(gone, ignore_errors=True)


class DiskTransport:
    """Keeps the files of the version that serves, and removes older ones.

    Args:
        folder: of this fleet alone.
    """

    one_sender = False

    def __init__(self, folder: Path, bucket_bytes: int, timeout_s: float) -> None:
        self._folder = folder
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._current: DiskOutbox | None = None

    def begin(
        self,
        version: int,
        shares: Sequence[Manifest],
        writers: Sequence[int],
        receivers: Sequence[Receiver] = (),
    ) -> DiskOutbox:
        buckets, _ = layout(shares, self._bucket_bytes)
        return DiskOutbox(self._folder / f"version-{version}", buckets, self._timeout_s)

    def commit(self, outbox: DiskOutbox) -> None:
        old, self._current = self._current, outbox
        if old is not None:
            shutil.rmtree(old.folder, ignore_errors=True)

    def discard(self, outbox: DiskOutbox) -> None:
        outbox.abandon()
        shutil.rmtree(outbox.folder, ignore_errors=True)

    def current(self) -> WeightOffer | None:
        return None if self._current is None else self._current.offer()

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._current is not None:
            yield from read_files(self._current.folder)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def read_files(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter of a folder of safetensors files."""
    for path in checkpoint_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.offset_keys():
                yield name, file.get_tensor(name)
