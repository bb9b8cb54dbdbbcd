"""vLLM's GPU transports, without a GPU: what engines and trainer are told, and its arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from splitroll.config import load_config
from splitroll.config.rules import check_config
from splitroll.engines.arguments import engine_arguments
from splitroll.errors import ConfigError
from splitroll.model import ModelFacts
from splitroll.placement import EngineSpec
from splitroll.types import Role
from splitroll.weights import native
from splitroll.weights.disk import DiskTransport
from splitroll.weights.manifest import ParamSpec
from splitroll.weights.native import NativePlan, NativeTransport, native_offer
from splitroll.weights.offer import Receiver
from splitroll.weights.source import Source

FACTS = ModelFacts("m", "m", 8, 8, 4096, 4096)
MANIFEST = (ParamSpec("a", "bfloat16", (3, 2)), ParamSpec("b", "float32", (5,)))


@given(st.lists(st.integers(1, 8), min_size=1, max_size=9))
def test_every_worker_of_every_engine_has_a_rank_of_its_own(sizes: list[int]) -> None:
    receivers = [Receiver(f"engine-{i}", "1", size) for i, size in enumerate(sizes)]
    offer = native_offer("nccl", MANIFEST, receivers, ("10.0.0.1", 7777))
    ranks = [
        rank
        for receiver in receivers
        for rank in range(
            offer.init[receiver.name]["rank_offset"],
            offer.init[receiver.name]["rank_offset"] + receiver.workers,
        )
    ]
    assert sorted([0, *ranks]) == list(range(1 + sum(sizes))), "the trainer is rank 0"
    assert {init["world_size"] for init in offer.init.values()} == {1 + sum(sizes)}
    assert {init["master_port"] for init in offer.init.values()} == {7777}


def test_engines_are_told_what_comes_in_vllms_words() -> None:
    offer = native_offer("nccl", MANIFEST, [Receiver("e", "1", 1)], ("10.0.0.1", 1))
    assert offer.update == {
        "names": ["a", "b"],
        "dtype_names": ["bfloat16", "float32"],
        "shapes": [[3, 2], [5]],
    }


def receivers(*incarnations: str) -> list[Receiver]:
    return [Receiver(f"engine-{i}", pid, 2) for i, pid in enumerate(incarnations)]


def test_a_group_is_joined_once_until_engines_change_or_an_update_failed() -> None:
    transport = NativeTransport("nccl", "127.0.0.1", None)

    def rendezvous(*incarnations: str, commit: bool = True) -> str:
        outbox = transport.begin(1, [MANIFEST], [1], receivers(*incarnations))
        (transport.commit if commit else transport.discard)(outbox)
        assert outbox.plan.world_size == 1 + 2 * len(incarnations)
        return outbox.plan.offer.rendezvous

    first = rendezvous("1", "2")
    assert rendezvous("1", "2") == first
    restarted = rendezvous("1", "3")
    assert restarted != first
    assert rendezvous("1", "3", commit=False) == restarted
    assert rendezvous("1", "3") != restarted
    assert transport.current() is None


def test_the_first_rank_sends_and_the_others_only_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[str]] = []
    gathered: list[str] = []

    def send(plan: NativePlan, source: Source) -> None:
        sent.append([name for name, _ in native._AsSent(plan, source)])

    class Shard(torch.Tensor):
        def full_tensor(self) -> torch.Tensor:
            gathered.append("b")
            return torch.ones(5)

    monkeypatch.setitem(native._SENDERS, "nccl", send)
    shard = torch.empty(1).as_subclass(Shard)
    source = Source({"a": torch.ones(3, 2), "b": shard})
    transport = NativeTransport("nccl", "127.0.0.1", None)
    outbox = transport.begin(1, [MANIFEST, ()], [1, 2], receivers("1"))
    assert outbox.is_readable
    assert outbox.plan.write(1, source, ()) == {}
    assert (sent, gathered) == ([], ["b"])
    outbox.plan.write(0, source, ())
    assert (sent, gathered) == ([["a", "b"]], ["b", "b"])


def test_what_is_sent_has_the_engines_dtypes() -> None:
    offer = native_offer("nccl", MANIFEST, receivers("1"), ("10.0.0.1", 1))
    source = Source({"b": torch.ones(5), "a": torch.ones(3, 2)})
    pairs = list(native._AsSent(NativePlan(offer, 3, None), source))
    assert [(name, tensor.dtype) for name, tensor in pairs] == [
        ("a", torch.bfloat16),
        ("b", torch.float32),
    ]


def test_with_a_path_the_version_that_serves_is_kept_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(native._SENDERS, "nccl", lambda plan, source: None)
    copies = DiskTransport(tmp_path / "copies", 1000, 5.0)
    transport = NativeTransport("nccl", "127.0.0.1", copies)
    outbox = transport.begin(1, [MANIFEST], [1], receivers("1"))
    outbox.plan.write(0, Source({"a": torch.ones(3, 2), "b": torch.ones(5)}), ())
    outbox.seal()
    assert transport.current() is None
    transport.commit(outbox)
    current = transport.current()
    assert current is not None
    assert current.folder == str(tmp_path / "copies" / "version-1")
    assert {name for name, _ in transport.read()} == {"a", "b"}


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_engines_run_vllms_weight_transfer_engine_of_that_name(backend: str) -> None:
    options = [f"weights.transport={backend}", "weights.on_failure=fence", "devices.kind=gpu"]
    config = load_config(overrides=options)
    check_config(config, FACTS)
    spec = EngineSpec(
        "decode-0", Role.DECODE, "n", "10.0.0.1", 1, ("0",), (), 1, "disaggregation.decode"
    )
    arguments = engine_arguments(config, FACTS, spec, None)
    assert arguments.vllm["weight_transfer_config"] == {"backend": backend}


@pytest.mark.parametrize(
    ("options", "path"),
    [
        (["weights.transport=nccl", "devices.kind=cpu"], "weights.transport"),
        (["weights.transport=ipc", "devices.kind=gpu"], "weights.on_failure"),
        (["weights.transport=nccl", "weights.verify=full"], "weights.verify"),
        (["weights.transport=disk"], "weights.path"),
        (["weights.path=x"], "weights.path"),
    ],
)
def test_what_a_transport_cannot_do_is_refused_by_name(options: list[str], path: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_config(load_config(overrides=options), FACTS)
    assert path in [problem.path for problem in refused.value.problems]
