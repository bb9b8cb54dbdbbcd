"""Where engines find the weights of one version: a value that travels to their workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from splitroll.weights.manifest import Bucket, ParamSpec
from splitroll.weights.segment import SegmentAddress


@dataclass(frozen=True, slots=True)
class Receiver:
    """An engine that is to load a version; `workers` are its ranks in all."""

    name: str
    incarnation: str
    workers: int


@dataclass(frozen=True, slots=True)
class NativeOffer:
    """What vLLM's own weight-transfer engines need.

    Attributes:
        rendezvous: names the group that engines join with `init`, once.
        init: vLLM's init_info by engine name.
        update: vLLM's update_info.
    """

    backend: Literal["nccl", "ipc"]
    rendezvous: str
    init: Mapping[str, Mapping[str, Any]]
    update: dict[str, Any]


@dataclass(frozen=True, slots=True)
class WeightOffer:
    """Weights to load: from shared memory, from safetensors files, or by vLLM's own transports.

    Attributes:
        segment: the shared memory, with its `buckets`; None where they are in files.
        folder: of safetensors files, on a path that the engine's node sees; or the Hugging Face id
            of the model that the engines started from.
        names: of all parameters that are to be in the folder.
        timeout_s: longest wait for the next bucket.
        checksum: names of the parameters whose checksum the engine is to return.
    """

    segment: SegmentAddress | None = None
    buckets: tuple[Bucket, ...] = ()
    folder: str | None = None
    names: tuple[str, ...] = ()
    timeout_s: float = 60.0
    checksum: tuple[str, ...] = ()
    native: NativeOffer | None = None

    def to_wire(self) -> dict[str, Any]:
        """Return plain values only: no class of ours has to be unpickled in vLLM's processes."""
        return {
            "segment": None if self.segment is None else asdict(self.segment),
            "buckets": [
                [
                    bucket.owner,
                    [[s.name, s.dtype, list(s.shape), at] for s, at in bucket.specs],
                ]
                for bucket in self.buckets
            ],
            "folder": self.folder,
            "names": list(self.names),
            "timeout_s": self.timeout_s,
            "checksum": list(self.checksum),
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> WeightOffer:
        segment = wire["segment"]
        return cls(
            segment=None
            if segment is None
            else SegmentAddress(**{**segment, "writers": tuple(segment["writers"])}),
            buckets=tuple(
                Bucket(
                    tuple(
                        (ParamSpec(name, dtype, tuple(shape)), at)
                        for name, dtype, shape, at in specs
                    ),
                    owner,
                )
                for owner, specs in wire["buckets"]
            ),
            folder=wire["folder"],
            names=tuple(wire["names"]),
            timeout_s=wire["timeout_s"],
            checksum=tuple(wire["checksum"]),
        )


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """What an engine loaded.

    Attributes:
        seconds: from the first parameter to the last.
        checksums: by worker, then parameter, of the bytes that the worker received.
    """

    seconds: float
    checksums: tuple[Mapping[str, str], ...] = field(default_factory=tuple)
