"""Weight updates on real engines: what they answer is what a fresh engine with the weights answers.

The model's embeddings are tied, which is where a reload goes wrong without a word.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from splitroll import Rollout, SamplingParams
from splitroll.errors import ConfigError, WeightUpdateFailed
from splitroll.types import Group, Prompt, Sample
from splitroll.weights.source import reading
from tiny_model import make_tiny_model

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPTS = [Prompt(str(i), tuple(range(10 + 50 * i, 10 + 50 * i + 77))) for i in range(4)]


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tied", tied=True)


@pytest.fixture(scope="module")
def config(tiny_config: Mapping[str, Any], tied_model: Path) -> dict[str, Any]:
    limits = {"health_interval_s": 0.5}
    return {**tiny_config, "model": str(tied_model), "limits": limits}


@pytest_asyncio.fixture(scope="module")
async def rollout(config: dict[str, Any]) -> AsyncIterator[Rollout]:
    """One prefill and two decode engines; tests leave it idle."""
    async with Rollout.open(config) as opened:
        yield opened


def trainer(folder: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


@torch.no_grad()
def train(model: torch.nn.Module, seed: int, rate: float = 0.02) -> None:
    draw = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter += torch.randn(parameter.shape, generator=draw) * rate


async def generate(rollout: Rollout, **kwargs: Any) -> dict[str, Group]:
    options = {"n": 2, "sampling": GREEDY, **kwargs}
    found = {}
    async for group in rollout.generate(PROMPTS, **options):
        assert isinstance(group, Group)
        found[group.id] = group
    return found


def answers(groups: Mapping[str, Group]) -> dict[str, tuple[tuple[int, ...], ...]]:
    return {name: tuple(s.token_ids for s in group.samples) for name, group in groups.items()}


def assert_logprobs(groups: Mapping[str, Group], model: torch.nn.Module) -> None:
    """The engines' log-probabilities are the trainer's own."""
    for group in groups.values():
        for sample in group.samples:
            ids = torch.tensor([sample.prompt_token_ids + sample.token_ids])
            with torch.no_grad():
                scores = model(ids).logits[0].log_softmax(-1)
            start = len(sample.prompt_token_ids) - 1
            for i, (token, logprob) in enumerate(
                zip(sample.token_ids, sample.logprobs, strict=True)
            ):
                assert abs(scores[start + i, token].item() - logprob) < 1e-3


async def fresh(config: dict[str, Any], model: torch.nn.Module, folder: Path) -> Any:
    """What one colocated engine answers that was started from a model's weights."""
    model.save_pretrained(folder)  # type: ignore[operator]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((Path(config["model"]) / name).read_bytes())
    alone = {
        **config,
        "model": str(folder),
        "disaggregation": {"enabled": False},
        "colocated": {"replicas": 1},
    }
    async with Rollout.open(alone) as colocated:
        return answers(await generate(colocated))


@pytest.mark.parametrize("compared", [(50,), pytest.param((1, 10), marks=pytest.mark.soak)])
async def test_fifty_updates_with_warm_caches_equal_fresh_engines(
    rollout: Rollout,
    config: dict[str, Any],
    tied_model: Path,
    tmp_path: Path,
    compared: tuple[int, ...],
) -> None:
    """Two engines beside the three would be too many at once for a small machine; so answers are
    compared with the trainer's model on the way, and with fresh engines' at the end."""
    model = trainer(tied_model)
    kept = {}
    for update in range(1, max(compared) + 1):
        await generate(rollout)  # caches of the old weights on every engine
        train(model, update)
        report = await rollout.update_weights(model)
        assert report.version == rollout.weight_version
        before = await rollout.fleet.counters()
        groups = await generate(rollout)
        after = await rollout.fleet.counters()
        computed = sum(after[n].computed_tokens - before[n].computed_tokens for n in after)
        # Each prompt once on prefill; what its siblings share was pulled after the update.
        assert computed >= sum(len(prompt.token_ids) for prompt in PROMPTS)
        assert {s.weight_version for g in groups.values() for s in g.samples} == {report.version}
        if update in (1, 10, 50):
            assert_logprobs(groups, model)
        if update in compared:
            kept[update] = (answers(groups), {n: p.clone() for n, p in model.state_dict().items()})
    for update, (answered, state) in kept.items():
        model.load_state_dict(state)
        assert answered == await fresh(config, model, tmp_path / str(update)), f"update {update}"


async def test_equal_weights_pushed_fifty_times_change_nothing(
    rollout: Rollout, tied_model: Path
) -> None:
    """Learning rate 0: no drift."""
    model = trainer(tied_model)
    await rollout.update_weights(model)
    first = await generate(rollout)
    for _ in range(50):
        await rollout.update_weights(model)
    last = await generate(rollout)
    assert answers(first) == answers(last)
    for name, group in first.items():
        for sample, again in zip(group.samples, last[name].samples, strict=True):
            assert max(abs(a - b) for a, b in zip(sample.logprobs, again.logprobs, strict=True)) < (
                1e-4
            )


@pytest.mark.parametrize("mode", ["drain", "abort", "keep"])
async def test_updates_of_busy_engines(
    rollout: Rollout, tied_model: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 samples in flight at each of 20 updates: queued, prefilling, pulled and decoding."""
    settings = rollout.config.weights.model_copy(update={"in_flight": mode})
    monkeypatch.setattr(rollout.updater, "_settings", settings)
    monkeypatch.setattr(rollout.updater.rest, "_settings", settings)
    model = trainer(tied_model)
    first = rollout.weight_version
    draw = SamplingParams(max_tokens=40, ignore_eos=True)
    pauses = []
    for round_ in range(20):
        prompts = [Prompt(f"{round_}-{i}", tuple(range(9 + i, 9 + i + 150))) for i in range(8)]
        stream = rollout.generate(prompts, n=8, sampling=draw)
        job = asyncio.create_task(collect(stream))
        await asyncio.sleep(0.02 + 0.02 * (round_ % 8))
        train(model, round_, 0.001)
        report = await rollout.update_weights(model)
        pauses.append(report.pause_s)
        groups = await asyncio.wait_for(job, 60)
        assert len(groups) == 8
        for group in groups:
            assert [sample.sample for sample in group.samples] == list(range(8))
            for sample in group.samples:
                assert_versions(sample, report.version)
                assert sample.finish_reason == "length" or mode == "abort"
                if mode == "drain":
                    assert len(sample.weight_versions) == 1
        if mode == "abort":
            unfinished = [group for group in groups if not group.is_complete]
            whole = await collect(rollout.generate(unfinished, sampling=draw))
            assert all(group.is_complete for group in whole)
            assert all(len(s.token_ids) == 40 for group in whole for s in group.samples)
            for sample in (s for group in whole for s in group.samples):
                assert_versions(sample, report.version)
    assert rollout.weight_version == first + 20
    assert max(pauses) < 2, "an update stalls the fleet for no longer than it takes"
    assert all(member.restarts == 0 for member in rollout.fleet.members.values())
    await idle(rollout)
    assert_logprobs(await generate(rollout), model)


async def collect(stream: AsyncIterator[Any]) -> list[Group]:
    groups = [group async for group in stream]
    assert all(isinstance(group, Group) for group in groups)
    return groups


def assert_versions(sample: Sample, newest: int) -> None:
    spans = sample.weight_versions
    covered = [i for span in spans for i in range(span.start, span.end)]
    assert covered == list(range(len(sample.token_ids)))
    versions = [span.version for span in spans]
    assert versions == sorted(set(versions))
    assert all(newest - 1 <= version <= newest for version in versions)
    if spans:
        assert (spans[0].version, spans[-1].version) == (
            sample.prefill_version,
            sample.weight_version,
        )


async def idle(rollout: Rollout) -> None:
    for engine in rollout.fleet.ready():
        async with asyncio.timeout(10):
            while (await engine.load()).held_blocks:
                await asyncio.sleep(0.05)


async def test_differences_are_all_told_before_anything_moves(
    rollout: Rollout, tied_model: Path
) -> None:
    version = rollout.weight_version
    state = trainer(tied_model).state_dict()
    norm = state.pop("model.norm.weight")
    state["model.layers.0.mlp.up_proj.weight"] = norm
    state["model.layers.0.lora_A.weight"] = norm + 1
    with pytest.raises(ConfigError) as refused:
        await rollout.update_weights(state)
    for name in ("model.norm.weight", "layers.0.mlp.up_proj.weight", "lora_A.weight"):
        assert name in str(refused.value)
    assert rollout.weight_version == version


async def test_a_parameter_that_an_engine_cannot_load_is_named_and_all_go_back(
    rollout: Rollout, tied_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engines' loader is asked for a parameter of the wrong shape behind the check's back."""
    model = trainer(tied_model)
    await rollout.update_weights(model)
    before = await generate(rollout)
    serving = rollout.weight_version
    bad = "model.layers.2.self_attn.o_proj.weight"
    wanted = rollout.updater._manifest
    monkeypatch.setattr(rollout.updater, "_manifest", lambda: misshapen(wanted(), bad))
    state = dict(model.state_dict())
    state[bad] = state[bad][:100]
    with pytest.raises(WeightUpdateFailed) as failed:
        await rollout.update_weights(state)
    assert failed.value.serving == serving == rollout.weight_version
    assert "load" in str(failed.value)
    assert bad in str(failed.value)
    monkeypatch.undo()
    assert answers(await generate(rollout)) == answers(before)
    assert all(member.restarts == 0 for member in rollout.fleet.members.values())
    train(model, 77)
    await rollout.update_weights(model)
    assert_logprobs(await generate(rollout), model)


def misshapen(manifest: Any, bad: str) -> Any:
    from splitroll.weights.manifest import ParamSpec

    return tuple(
        ParamSpec(s.name, s.dtype, (100, *s.shape[1:])) if s.name == bad else s for s in manifest
    )


async def test_a_few_layers_can_be_pushed_alone(rollout: Rollout, tied_model: Path) -> None:
    model = trainer(tied_model)
    await rollout.update_weights(model)
    train(model.model.layers[1].self_attn.q_proj, 5)  # type: ignore[union-attr, index, arg-type]
    with reading(model, ()) as source:
        part = {name: t for name, t in source.tensors.items() if "layers.1.self_attn.q" in name}
    assert len(part) == 1
    await rollout.update_weights(part, partial=True)
    assert_logprobs(await generate(rollout), model)


async def test_killed_engines_come_back_with_the_current_weights(
    config: dict[str, Any], tied_model: Path
) -> None:
    """Killed while they load; samples that were accepted before are not lost."""
    model = trainer(tied_model)
    async with Rollout.open(config, overrides=["weights.in_flight=keep"]) as rollout:
        for victim in ("decode-1", "prefill-0"):
            train(model, 1)
            await rollout.update_weights(model)
            stream = rollout.generate(PROMPTS, n=8, sampling=SamplingParams(max_tokens=60, seed=1))
            job = asyncio.create_task(collect(stream))
            await asyncio.sleep(0.1)
            train(model, 2)
            pid = rollout.fleet.members[victim].engine.info.pids[1]  # type: ignore[union-attr]
            killing = asyncio.create_task(kill_when_loading(rollout, victim, pid))
            report = await asyncio.wait_for(rollout.update_weights(model), 60)
            await killing
            assert victim not in report.engines
            assert len(await asyncio.wait_for(job, 120)) == len(PROMPTS)
            async with asyncio.timeout(120):
                while len(rollout.fleet.ready()) < 3:
                    await asyncio.sleep(0.2)
            groups = await generate(rollout, n=4)
            assert {s.weight_version for g in groups.values() for s in g.samples} == {
                report.version
            }
            assert_logprobs(groups, model)


async def kill_when_loading(rollout: Rollout, victim: str, pid: int) -> None:
    engine: Any = rollout.fleet.members[victim].engine
    load, begun = engine.load_weights, asyncio.Event()

    async def loading(offer: Any) -> Any:
        begun.set()
        return await load(offer)

    engine.load_weights = loading
    await begun.wait()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
