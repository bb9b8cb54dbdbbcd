"""A split fleet gives what a colocated one gives: token ids and log-probabilities."""

from __future__ import annotations

import random
from typing import Any

import pytest
import pytest_asyncio

from splitroll import Rollout, SamplingParams
from splitroll.model import DEFAULT_MODEL
from splitroll.types import Group, Prompt, Role, Sample

pytestmark = pytest.mark.engines

LENGTHS = (1, 31, 32, 33, 127, 128, 129, 255, 256, 257, 900)
SPLIT = ("disaggregation.decode_replicas=1", "dispatch.policy=static")
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
TEXTS = (
    "The sun rose over the quiet village as the baker opened his shop and",
    "Water boils at one hundred degrees, but on a high mountain it",
    "In 1969, for the first time, two people walked on the moon. They",
    "My grandmother taught me how to make bread. First, you take flour and",
    "The best way to learn a new language is to",
    "Once upon a time there was a king who had three daughters, and the youngest",
)


def tiny_prompts() -> list[Prompt]:
    draw = random.Random(7)
    return [Prompt(str(n), tuple(draw.choices(range(10, 4000), k=n))) for n in LENGTHS]


async def samples(rollout: Rollout, prompts: list[Any], sampling: SamplingParams
                  ) -> dict[str, Sample]:  # fmt: skip
    found = {}
    async for group in rollout.generate(prompts, n=1, sampling=sampling):
        assert isinstance(group, Group)
        assert group.recomputed_tokens == 0
        found[group.id] = group.samples[0]
    return found


@pytest_asyncio.fixture(scope="module")
async def colocated(tiny_config: dict[str, Any]) -> dict[str, Sample]:
    overrides = ["disaggregation.enabled=false", "colocated.replicas=1"]
    async with Rollout.open(tiny_config, overrides=overrides) as rollout:
        found = await samples(rollout, tiny_prompts(), GREEDY)
    assert {sample.route.kind.value for sample in found.values()} == {"local"}
    return found


@pytest.mark.parametrize("warm_decode", [False, True])
@pytest.mark.parametrize("warm_prefill", [False, True])
async def test_float32_equals_colocated(
    colocated: dict[str, Sample], split_rollout: Rollout, warm_prefill: bool, warm_decode: bool
) -> None:
    if warm_prefill or warm_decode:
        await samples(split_rollout, tiny_prompts(), GREEDY)
    for role, warm in ((Role.PREFILL, warm_prefill), (Role.DECODE, warm_decode)):
        for engine in split_rollout.fleet.ready(role):
            assert warm or await engine.reset_prefix_cache()
    found = await samples(split_rollout, tiny_prompts(), GREEDY)
    assert set(found) == set(colocated)
    for prompt_id, sample in found.items():
        assert sample.route.kind.value == "split"
        assert sample.token_ids == colocated[prompt_id].token_ids, prompt_id
        assert sample.logprobs == pytest.approx(colocated[prompt_id].logprobs, abs=1e-4)


@pytest.mark.soak
@pytest.mark.timeout(400)
async def test_bfloat16_on_natural_text_equals_colocated() -> None:
    greedy = SamplingParams(max_tokens=24, temperature=0.0)
    config = {"model": DEFAULT_MODEL, "engine": {"max_model_len": 1024}}
    overrides = ["disaggregation.enabled=false", "colocated.replicas=1"]
    async with Rollout.open(config, overrides=overrides) as rollout:
        expected = await samples(rollout, list(TEXTS), greedy)
    async with Rollout.open(config, overrides=SPLIT) as rollout:
        found = await samples(rollout, list(TEXTS), greedy)
    for prompt_id, sample in found.items():
        assert sample.token_ids == expected[prompt_id].token_ids, sample.text
        assert sample.logprobs == pytest.approx(expected[prompt_id].logprobs, abs=0.15)


@pytest.mark.parametrize("top_k", [0, 5])
async def test_log_probabilities_are_of_the_distribution_sampled_from(
    split_rollout: Rollout, tiny_model: Any, top_k: int
) -> None:
    """Temperature and truncation included: compared with the model run by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    sampling = SamplingParams(max_tokens=12, temperature=0.7, top_k=top_k, seed=3, ignore_eos=True)
    found = await samples(split_rollout, tiny_prompts()[:5], sampling)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for sample in found.values():
        ids = torch.tensor([[*sample.prompt_token_ids, *sample.token_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(sample.prompt_token_ids) - 1 : -1]
        if top_k:
            lowest = logits.topk(top_k).values[:, -1:]
            logits = logits.masked_fill(logits < lowest, float("-inf"))
        expected = torch.log_softmax(logits / 0.7, dim=-1)
        chosen = expected.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        assert sample.logprobs == pytest.approx(chosen.tolist(), abs=1e-3)
