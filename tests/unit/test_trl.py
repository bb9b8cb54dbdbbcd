"""A real GRPOTrainer on the tiny model, with a rollout whose samples are made up."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TRL imports vLLM, which warns about itself
    from trl import GRPOConfig, GRPOTrainer

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer

from fake_rollout import FakeRollout, Report
from splitroll.dispatch.assembly import GroupWork
from splitroll.environment import Answer, Episode
from splitroll.errors import ConfigError, GroupFailed
from splitroll.integrations.trl import COLUMNS, TrlBridge
from splitroll.types import Sample, SamplingParams

EOS = 1


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return Dataset.from_list([{"prompt": f"w{10 + i} w{50 + i} w7", "number": i} for i in range(8)])


@pytest.fixture
def rollout(tiny_model: Path) -> FakeRollout:
    return FakeRollout(tiny_model)


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


@pytest.fixture
def make_trainer(tiny_model: Path, tmp_path: Path, rollout: FakeRollout, dataset: Dataset) -> Any:
    def make(
        bridge: TrlBridge | None = None, reward: Any = reward, trainer: Any = None, **settings: Any
    ) -> GRPOTrainer:
        bridge = bridge or TrlBridge(rollout)
        args = {
            "output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none",
            "per_device_train_batch_size": 4, "num_generations": 2, "max_steps": 2,
            "max_completion_length": 4, "logging_steps": 1, "learning_rate": 1e-3,
            "gradient_checkpointing": False, "save_strategy": "no", "disable_tqdm": True,
            **settings,
        }  # fmt: skip
        made = GRPOTrainer(
            model=str(tiny_model),
            reward_funcs=reward,
            args=GRPOConfig(**args),
            **{
                "train_dataset": dataset,
                "rollout_func": bridge.rollout_func,
                "callbacks": [bridge.callback],
                **(trainer or {}),
            },
        )
        made.bridge = bridge
        return made

    return make


def test_a_batch_becomes_one_call_with_one_group_for_each_prompt(
    make_trainer: Any, rollout: FakeRollout, tiny_model: Path
) -> None:
    seen: list[dict[str, Any]] = []

    def watching(completion_ids: list[list[int]], prompts: list[str], **kwargs: Any) -> list[float]:
        seen.append({"prompts": prompts, "completion_ids": completion_ids, **kwargs})
        return reward(completion_ids)

    trainer = make_trainer(reward=watching)
    trainer.train()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert [(len(call.prompts), call.n) for call in rollout.calls] == [(2, 2), (2, 2)]
    for call, given in zip(rollout.calls, seen, strict=True):
        assert [list(p.token_ids) for p in call.prompts] == tokenizer(given["prompts"][::2])[
            "input_ids"
        ]
        assert [p.token_ids for p in call.prompts for _ in range(2)] == [
            turn.prompt_token_ids for (turn,) in given["samples"]
        ]
        assert [turn.sample for (turn,) in given["samples"]] == [0, 1, 0, 1]
        assert given["completion_ids"] == [list(turn.token_ids) for (turn,) in given["samples"]]
        assert given["route"] == ["split", "shared"] * 2
        assert set(COLUMNS) <= set(given)
    assert [given["weight_version"] for given in seen] == [[1] * 4, [2] * 4]


def test_engines_and_trainer_agree_on_logprobs_and_the_metrics_say_so(
    make_trainer: Any, rollout: FakeRollout
) -> None:
    trainer = make_trainer(temperature=0.7)
    trainer.train()
    logs = [row for row in trainer.state.log_history if "loss" in row]
    assert len(logs) == 2
    for step, row in enumerate(logs, start=1):
        assert 0 < row["sampling/sampling_logp_difference/max"] < 1e-3
        assert row["sampling/sampling_logp_difference/mean"] < 1e-4
        assert row["splitroll/weight_version"] == step == row["splitroll/weight_version_max"]
        assert row["splitroll/handoffs"] == 2
        assert row["splitroll/sync_s"] == (1.5 if step == 1 else 0.75)
        assert row["splitroll/sync/load_s"] == (0.5 if step == 1 else 0.25)
        phases = ("queue", "prefill", "transfer", "decode")
        parts = [row[f"splitroll/{phase}_s"] for phase in phases]
        assert sum(parts) == pytest.approx(row["splitroll/generate_s"])
        assert parts[3] > parts[1] > 0
        assert row["splitroll/samples_split"] == 2 == row["splitroll/samples_shared"]


def test_stale_weights_show_in_the_metric(make_trainer: Any, rollout: FakeRollout) -> None:
    trainer = make_trainer()
    update = rollout.update_weights

    def only_the_first(weights: Any) -> Report:
        return Report(2) if rollout.pushes else update(weights)

    rollout.update_weights = only_the_first  # type: ignore[method-assign]
    trainer.train()
    first, second = (row for row in trainer.state.log_history if "loss" in row)
    name = "sampling/sampling_logp_difference/mean"
    assert second[name] > 100 * first[name]


def test_weights_are_pushed_before_the_first_generation_and_after_every_optimizer_step(
    make_trainer: Any, rollout: FakeRollout
) -> None:
    trainer = make_trainer()
    trainer.train()
    assert len(rollout.pushes) == 3
    name, final = "model.layers.0.mlp.up_proj.weight", rollout.pushes[-1]
    assert not torch.equal(rollout.pushes[0][name], rollout.pushes[1][name])
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(final[name], parameter)


def test_accumulated_micro_batches_are_one_generation_and_one_push(
    make_trainer: Any, rollout: FakeRollout
) -> None:
    trainer = make_trainer(gradient_accumulation_steps=2)
    trainer.train()
    assert [len(call.prompts) for call in rollout.calls] == [4, 4]
    assert len(rollout.pushes) == 3
    logs = [row for row in trainer.state.log_history if "loss" in row]
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-3 for row in logs)


def test_reused_samples_are_compared_only_under_the_weights_that_drew_them(
    make_trainer: Any, rollout: FakeRollout
) -> None:
    trainer = make_trainer(num_iterations=2, max_steps=4)
    trainer.train()
    assert len(rollout.calls) == 2
    assert len(rollout.pushes) == 5
    logs = [row for row in trainer.state.log_history if "loss" in row]
    name = "sampling/sampling_logp_difference/max"
    assert [name in row for row in logs] == [True, False, True, False]
    assert all(row.get(name, 0.0) < 1e-3 for row in logs)


def test_evaluation_has_its_own_number_of_generations_and_pushes_nothing_twice(
    make_trainer: Any, rollout: FakeRollout, dataset: Dataset
) -> None:
    trainer = make_trainer(
        trainer={"eval_dataset": dataset.select(range(4))},
        num_generations_eval=4, per_device_eval_batch_size=8, max_steps=1,
    )  # fmt: skip
    before = trainer.evaluate()
    assert [(len(call.prompts), call.n) for call in rollout.calls] == [(2, 4), (2, 4)]
    assert len(rollout.pushes) == 1
    assert before["eval_sampling/sampling_logp_difference/max"] < 1e-3
    trainer.train()
    assert len(rollout.pushes) == 2
    trainer.evaluate()
    assert len(rollout.pushes) == 2
    seeds = [call.sampling[0].seed for call in rollout.calls]
    assert len(set(seeds)) == 5


def test_equal_runs_draw_equal_samples_and_each_step_others(
    make_trainer: Any, tiny_model: Path
) -> None:
    def run(seed: int) -> list[tuple[Any, ...]]:
        rollout = FakeRollout(tiny_model)
        make_trainer(TrlBridge(rollout), seed=seed, learning_rate=0.0).train()
        return [tuple((p.token_ids, s.seed) for p, s in zip(c.prompts, c.sampling, strict=True))
                for c in rollout.calls]  # fmt: skip

    first, again, other = run(3), run(3), run(4)
    assert first == again
    assert {seed for _, seed in first[0]} != {seed for _, seed in first[1]}
    assert first[0][0][1] != other[0][0][1]


def test_chats_go_through_the_trainers_own_template(
    make_trainer: Any, rollout: FakeRollout, tiny_model: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model, padding_side="left")
    tokenizer.chat_template = (
        "{{ prefix }}{% for m in messages %} {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %} w9{% endif %}"
    )
    chats = [{"prompt": [{"role": "user", "content": f"w{i}"}]} for i in range(10, 14)]
    trainer = make_trainer(
        trainer={"train_dataset": Dataset.from_list(chats), "processing_class": tokenizer},
        chat_template_kwargs={"prefix": "w8"}, max_steps=1,
        reward=lambda completions, **_: [len(c[0]["content"]) for c in completions],
    )  # fmt: skip
    trainer.train()
    for prompt in rollout.calls[0].prompts:
        assert prompt.token_ids == (8, int(prompt.metadata["prompt"][0]["content"][1:]), 9)


class Echo:
    """Answers twice: with a text, then with token ids."""

    def observe(self, episode: Episode) -> Answer | Sequence[int] | None:
        assert set(episode.prompt.metadata) == {"prompt"}
        match len(episode.turns):
            case 1:
                return Answer("w100 w101", reward=0.5)
            case 2:
                return [102]
        return None


def test_turns_are_token_exact_and_the_environments_tokens_are_masked(
    make_trainer: Any, rollout: FakeRollout
) -> None:
    seen: dict[str, Any] = {}

    def watching(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        seen.update(kwargs, completion_ids=completion_ids)
        return reward(completion_ids)

    original = rollout._sample

    def two_tokens(work: GroupWork, index: int) -> Sample:
        count = min(2, work.sampling.max_tokens)
        return original(replace(work, sampling=replace(work.sampling, max_tokens=count)), index)

    rollout._sample = two_tokens  # type: ignore[method-assign]
    trainer = make_trainer(
        TrlBridge(rollout, Echo()), reward=watching, max_completion_length=9, max_steps=1
    )
    inputs: list[dict[str, Any]] = []
    compute = trainer._compute_loss
    trainer._compute_loss = lambda model, given: inputs.append(given) or compute(model, given)
    trainer.train()
    assert [(len(call.prompts), call.n) for call in rollout.calls] == [(2, 2)]
    assert sorted(work.n for work in rollout.works) == [1] * 8 + [2] * 2
    rooms = sorted(work.sampling.max_tokens for work in rollout.works)
    assert rooms == [2] * 4 + [5] * 4 + [9] * 2
    ids = [work.prompt.id for work in rollout.works]
    assert len(set(ids)) == len(ids)
    assert seen["turns"] == [3] * 4
    assert seen["ended"] == ["environment"] * 4
    assert seen["env_rewards"] == [(0.5, 0.0, 0.0)] * 4
    assert min(seen["environment_s"]) > 0
    for turns, tokens in zip(seen["samples"], seen["completion_ids"], strict=True):
        first, second, third = turns
        assert tokens == [*first.token_ids, 100, 101, *second.token_ids, 102, *third.token_ids]
        assert third.prompt_token_ids == first.prompt_token_ids + tuple(tokens[:7])
    (given,) = inputs
    assert given["tool_mask"].tolist() == [[1, 1, 0, 0, 1, 1, 0, 1, 1]] * 4
    written = given["tool_mask"] == 0
    assert (given["sampling_per_token_logps"][written] == 0).all()
    (row,) = (row for row in trainer.state.log_history if "loss" in row)
    assert row["sampling/sampling_logp_difference/max"] < 1e-3
    assert row["completions/mean_length"] == 6
    phases = ("queue", "prefill", "transfer", "decode", "environment")
    assert sum(row[f"splitroll/{name}_s"] for name in phases) == pytest.approx(
        row["splitroll/generate_s"]
    )


def test_an_observation_that_leaves_no_room_ends_the_episode(
    make_trainer: Any, rollout: FakeRollout
) -> None:
    class Long:
        def observe(self, episode: Episode) -> Sequence[int]:
            return [100] * 3

    trainer = make_trainer(TrlBridge(rollout, Long()), max_completion_length=4, max_steps=1)
    trainer.train()
    assert [work.n for work in rollout.works] == [2, 2]


def test_environments_of_skyrl_gym_are_made_for_each_completion(
    make_trainer: Any, rollout: FakeRollout, tiny_model: Path
) -> None:
    pytest.importorskip("skyrl_gym")
    from splitroll.integrations.skyrl_gym import SkyRLGym

    tokenizer = AutoTokenizer.from_pretrained(tiny_model, padding_side="left")
    tokenizer.chat_template = (
        "{% for m in messages %} {{ m.role }} {{ m.content }} w7{% endfor %}"
        "{% if add_generation_prompt %} w9{% endif %}"
    )
    chats = [{"prompt": [{"role": "user", "content": f"w{i}"}]} for i in range(10, 14)]
    rows = {
        chat["prompt"][0]["content"]: {
            **chat, "env_class": "gsm8k_multi_turn", "reward_spec": {"ground_truth": "42"},
            "max_turns": 2,
        }
        for chat in chats
    }  # fmt: skip
    gym = SkyRLGym(tokenizer, row=lambda prompt: rows[prompt.metadata["prompt"][0]["content"]])
    seen: list[dict[str, Any]] = []

    def from_environment(env_rewards: list[tuple[float, ...]], **kwargs: Any) -> list[float]:
        seen.append({"env_rewards": env_rewards, **kwargs})
        return [sum(rewards) for rewards in env_rewards]

    original = rollout._sample
    rollout._sample = lambda work, index: original(  # type: ignore[method-assign]
        replace(work, sampling=replace(work.sampling, max_tokens=2)), index
    )
    trainer = make_trainer(
        TrlBridge(rollout, gym), reward=from_environment, max_completion_length=60, max_steps=1,
        trainer={"train_dataset": Dataset.from_list(chats), "processing_class": tokenizer},
    )  # fmt: skip
    trainer.train()
    (given,) = seen
    assert given["env_rewards"] == [(0.0, 0.0)] * 4
    assert given["ended"] == ["environment"] * 4
    for first, second in given["samples"]:
        written = second.prompt_token_ids[len(first.prompt_token_ids) + 2 :]
        # The end of the turn, if it has sampled none itself; the user's message; the next turn.
        assert written[-2:] == (7, 9)
        assert written[0] == (2 if first.token_ids[-1] == 7 else 7)


def test_an_environment_that_fails_ends_the_training_by_name(
    make_trainer: Any, rollout: FakeRollout
) -> None:
    class Broken:
        async def observe(self, episode: Episode) -> None:
            raise ValueError("no sandbox")

    with pytest.raises(
        GroupFailed, match=r"group train-0-0-\d failed: sample \d, turn 0: .*no sandbox"
    ):
        make_trainer(TrlBridge(rollout, Broken())).train()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda group: None, "ended without it"),
        (lambda group: replace(group, episodes=group.episodes[1:]), "1 samples, and 2 were asked"),
    ],
)
def test_a_missing_episode_is_an_error(
    make_trainer: Any, rollout: FakeRollout, spoil: Any, message: str
) -> None:
    rollout.spoil = spoil
    with pytest.raises(GroupFailed, match=message):
        make_trainer(TrlBridge(rollout, Echo())).train()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda group: None, "ended without it"),
        (lambda group: replace(group, samples=group.samples[:1]), "1 samples, and 2 were asked"),
        (lambda g: replace(g, samples=g.samples[::-1]), "2 samples, and 2"),
        (
            lambda g: replace(g, samples=tuple(replace(s, logprobs=()) for s in g.samples)),
            "0 log-probabilities",
        ),
        (
            lambda g: replace(
                g, samples=tuple(replace(s, token_ids=(), logprobs=()) for s in g.samples)
            ),
            "no tokens",
        ),
        (
            lambda g: replace(
                g, samples=tuple(replace(s, prompt_token_ids=(5,)) for s in g.samples)
            ),
            "of another prompt",
        ),
    ],
)
def test_whatever_is_missing_is_an_error_and_never_a_shorter_batch(
    make_trainer: Any, rollout: FakeRollout, spoil: Any, message: str
) -> None:
    rollout.spoil = spoil
    with pytest.raises(GroupFailed, match=message):
        make_trainer().train()


def paths(error: pytest.ExceptionInfo[ConfigError]) -> set[str]:
    return {problem.path for problem in error.value.problems}


def test_settings_that_cannot_be_honoured_are_refused_by_name_all_at_once(
    make_trainer: Any,
) -> None:
    with pytest.raises(ConfigError) as error:
        make_trainer(
            use_vllm=True, vllm_structured_outputs_regex="a*", cache_implementation="static",
            vllm_importance_sampling_mode="token_mask", temperature=0.0, top_p=0.0,
            max_completion_length=0, generation_kwargs={
                "num_beams": 4, "guided_regex": "a", "min_tokens": -1, "seed": 1,
                "temperature": 2.0,
            },
        )  # fmt: skip
    assert paths(error) == {
        "use_vllm", "vllm_structured_outputs_regex", "vllm_importance_sampling_mode",
        "cache_implementation", "temperature", "top_p", "max_completion_length",
        "generation_kwargs.num_beams", "generation_kwargs.guided_regex",
        "generation_kwargs.min_tokens", "generation_kwargs.seed", "generation_kwargs.temperature",
    }  # fmt: skip


def test_trainers_that_cannot_be_served_are_refused_before_anything_is_generated(
    make_trainer: Any, rollout: FakeRollout
) -> None:
    trainer = make_trainer()
    trainer.tools = [len]
    trainer.args.vllm_mode = "server"
    trainer.model.is_quantized = True
    with pytest.raises(ConfigError) as error:
        trainer.train()
    assert paths(error) == {"tools or environment_factory", "vllm_mode", "model"}
    assert rollout.calls == []
    assert rollout.pushes == []


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("use_vllm", True),
        ("vllm_mode", "server"),
        ("use_transformers_continuous_batching", True),
        ("use_transformers_paged", True),
        ("cache_implementation", "static"),
        ("max_tool_calling_iterations", 3),
        ("vllm_importance_sampling_cap", 2.0),
        ("ds3_gather_for_generation", False),
        ("generation_kwargs", {"num_beams": 4}),
    ],
)
def test_the_callback_refuses_before_trl_starts_an_engine(
    make_trainer: Any, setting: str, value: object
) -> None:
    with pytest.raises(ConfigError) as error:
        make_trainer(**{setting: value})
    assert setting in {path.partition(".")[0] for path in paths(error)}


def test_a_trainer_without_the_callback_is_refused(make_trainer: Any) -> None:
    with pytest.raises(ConfigError, match=r"bridge\.callback"):
        make_trainer(trainer={"callbacks": []}).train()


def test_a_column_that_would_be_overwritten_is_refused(make_trainer: Any, dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match=r"train_dataset\.route"):
        make_trainer(trainer={"train_dataset": dataset.rename_column("number", "route")}).train()


def test_generation_settings_reach_the_engines(make_trainer: Any, rollout: FakeRollout) -> None:
    trainer = make_trainer(
        temperature=0.9, top_p=0.8, top_k=50, min_p=0.01, repetition_penalty=1.1, max_steps=1,
        generation_kwargs={"min_tokens": 1, "stop": ["w5"], "stop_token_ids": [7]},
        vllm_importance_sampling_correction=False,
    )  # fmt: skip
    trainer.train()
    (sampling,) = set(rollout.calls[0].sampling)
    assert sampling == SamplingParams(
        max_tokens=4, temperature=0.9, top_p=0.8, top_k=50, min_p=0.01, repetition_penalty=1.1,
        min_tokens=1, stop=("w5",), stop_token_ids=(7, EOS), seed=sampling.seed,
    )  # fmt: skip


def test_adapters_are_pushed_merged_and_leave_the_base_weights_untouched(
    make_trainer: Any, rollout: FakeRollout
) -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    trainer = make_trainer(trainer={"peft_config": lora}, learning_rate=0.1)
    layer = trainer.model.base_model.model.model.layers[0].mlp
    base = layer.up_proj.base_layer.weight.detach().clone()
    trainer.train()
    first, _, last = rollout.pushes
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(layer.up_proj.base_layer.weight, base)
    assert torch.equal(first[name], base)
    delta = layer.up_proj.get_delta_weight("default")
    assert delta.abs().max() > 0
    assert torch.allclose(last[name], base + delta, atol=1e-5)
    assert torch.equal(first["model.layers.0.mlp.down_proj.weight"], layer.down_proj.weight)
    logs = [row for row in trainer.state.log_history if "loss" in row]
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-2 for row in logs)


def test_uneven_groups_are_refused(make_trainer: Any, rollout: FakeRollout) -> None:
    trainer = make_trainer()
    with pytest.raises(ConfigError, match="3 prompts"):
        trainer.bridge.rollout_func(["w1", "w1", "w2"], trainer)
    with pytest.raises(ConfigError, match="different prompts"):
        trainer.bridge.rollout_func(["w1", "w2"], trainer)
