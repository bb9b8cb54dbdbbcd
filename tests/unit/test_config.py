"""Configuration: strict, frozen, every problem told at once and before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from splitroll.cli import EXIT_BAD_INPUT, main
from splitroll.config import check_config, load_checked, load_config, to_yaml
from splitroll.config.pools import replicas
from splitroll.errors import ConfigError
from splitroll.model import ModelFacts
from splitroll.types import Role

FACTS = ModelFacts(
    "model", "model", num_attention_heads=8, num_kv_heads=4, max_model_len=2048, vocab_size=4096
)


def problems(*overrides: str) -> dict[str, Any]:
    """Return the problems of the default configuration with overrides, by path."""
    try:
        check_config(load_config(overrides=overrides), FACTS)
    except ConfigError as exc:
        return {problem.path: problem for problem in exc.problems}
    return {}


def test_defaults_are_one_prefill_and_two_decode_engines_over_nixl() -> None:
    config = load_config()
    section = config.disaggregation
    assert (replicas(config, Role.PREFILL), replicas(config, Role.DECODE)) == (1, 2)
    assert section.transfer_backend == "nixl"
    assert problems() == {}


def test_unknown_key_names_the_nearest() -> None:
    found = problems("disaggregation.decode_replica=2")
    assert "did you mean decode_replicas?" in str(found["disaggregation.decode_replica"])


def test_unknown_engine_argument_names_the_nearest() -> None:
    found = problems("engine.max_num_seq=8")
    assert "did you mean max_num_seqs?" in str(found["engine.max_num_seq"])


def test_zero_replicas_are_refused() -> None:
    found = problems("disaggregation.prefill_replicas=0")
    assert "1 or more" in found["disaggregation.prefill_replicas"].allowed


def test_unknown_backend_names_the_known_ones() -> None:
    found = problems("disaggregation.transfer_backend=nixxl")
    assert "nixl" in found["disaggregation.transfer_backend"].allowed


@pytest.mark.parametrize(("size", "fits"), [(1, True), (2, True), (4, True), (3, False)])
def test_tensor_parallel_size_must_divide_the_heads(size: int, fits: bool) -> None:
    found = problems(f"disaggregation.decode.tensor_parallel_size={size}")
    assert ("disaggregation.decode.tensor_parallel_size" not in found) == fits
    if not fits:
        assert "8 attention heads" in str(found.popitem()[1])


@pytest.mark.parametrize("name", ["block_size", "dtype", "kv_cache_dtype"])
def test_roles_must_agree_on_what_makes_kv_meaningful(name: str) -> None:
    value = "64" if name == "block_size" else "float32"
    found = problems(f"disaggregation.decode.engine.{name}={value}")
    assert f"disaggregation.{{prefill,decode}}.engine.{name}" in found


@pytest.mark.parametrize(
    "name", ["kv_transfer_config", "tensor_parallel_size", "model", "logprobs_mode"]
)
def test_engine_arguments_that_splitroll_owns_are_refused_with_what_to_do(name: str) -> None:
    found = problems(f"engine.{name}=1")
    assert found[f"engine.{name}"].hint


def test_lease_must_outlive_the_handoff() -> None:
    found = problems("disaggregation.kv_lease_s=10", "disaggregation.handoff_timeout_s=10.0")
    assert "disaggregation.kv_lease_s" in found


def test_max_model_len_cannot_exceed_the_models() -> None:
    assert list(problems("engine.max_model_len=99999")) == ["engine.max_model_len"]


def test_group_cannot_be_spread_over_more_engines_than_there_are() -> None:
    assert "dispatch.decode_engines_per_group" in problems("dispatch.decode_engines_per_group=3")


def test_a_wrong_type_is_not_converted() -> None:
    assert "disaggregation.decode_replicas" in problems('disaggregation.decode_replicas="2"')


def test_all_problems_are_told_at_once(tiny_model: Path) -> None:
    overrides = [
        f"model={tiny_model}",
        "foo.bar=1",
        "disaggregation.prefill_replicas=0",
        "engine.blok_size=3",
        "disaggregation.decode.tensor_parallel_size=3",
    ]
    with pytest.raises(ConfigError) as caught:
        load_checked(overrides=overrides)
    assert {problem.path for problem in caught.value.problems} == {
        "foo",
        "disaggregation.prefill_replicas",
        "engine.blok_size",
        "disaggregation.decode.tensor_parallel_size",
    }


def test_resolved_configuration_reads_back_as_itself(tmp_path: Path) -> None:
    config = load_config(overrides=["engine.max_num_seqs=8", "disaggregation.enabled=false"])
    path = tmp_path / "c.yaml"
    path.write_text(to_yaml(config))
    assert load_config(path) == config


def test_configuration_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config().model = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "found"), [("- a", "list"), ("a: [", "not YAML"), ("engine: 3", "3")]
)
def test_a_file_that_is_no_configuration_is_told(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=found):
        load_config(path)


def test_a_missing_file_is_told() -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config("no-such-file.yaml")


@pytest.mark.parametrize(
    "override",
    [
        "engine={1: 2}",
        "disaggregation.kv_lease_s=0",
        "disaggregation.kv_lease_s=1.5",
        "limits.start_timeout_s=.inf",
        "engine.max_model_len=8",
        "engine.max_logprobs=0",
        "engine.decode_context_parallel_size=2",
    ],
)
def test_what_would_fail_only_later_is_refused(override: str) -> None:
    assert problems(override)


def test_tensor_parallel_sizes_must_divide_each_other() -> None:
    facts = ModelFacts(
        "m", "m", num_attention_heads=6, num_kv_heads=6, max_model_len=2048, vocab_size=4096
    )
    overrides = [
        "disaggregation.prefill.tensor_parallel_size=2",
        "disaggregation.decode.tensor_parallel_size=3",
    ]
    with pytest.raises(ConfigError, match="one divides the other"):
        check_config(load_config(overrides=overrides), facts)


@pytest.mark.parametrize("override", ["engine", "=3", "model.x=1", "a.=2"])
def test_a_malformed_override_is_told(override: str) -> None:
    with pytest.raises(ConfigError):
        load_config({"model": "m"}, [override])


def test_bad_input_exits_with_2_before_ray_starts(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--task", "products", "--out", str(tmp_path / "o"), "--set", "engin.x=1"]
    assert main(["rollout", *arguments]) == EXIT_BAD_INPUT
    assert "engin" in capfd.readouterr().err
    assert not (tmp_path / "o").exists()


def test_devices_that_this_machine_lacks_are_told_before_ray_starts(
    capfd: pytest.CaptureFixture[str], tiny_model: Path
) -> None:
    overrides = [f"model={tiny_model}", "devices.kind=gpu", "disaggregation.decode_replicas=999"]
    before = ray_is_running()  # a fleet of other tests may be up
    assert main(["check", "--set", *overrides]) == EXIT_BAD_INPUT
    assert "1 prefill x 1 GPUs + 999 decode x 1 GPUs = 1000 GPUs" in capfd.readouterr().out
    assert ray_is_running() == before


def ray_is_running() -> bool:
    import ray

    return bool(ray.is_initialized())


@pytest.mark.parametrize("code", ["import splitroll", "from splitroll.cli import main"])
def test_importing_loads_no_heavy_package(code: str) -> None:
    heavy = "{'ray', 'vllm', 'torch', 'nixl', 'transformers'} & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; assert not ({heavy}), {heavy}"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
