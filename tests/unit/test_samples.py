"""The samples file: complete or absent under its name, and resumable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from splitroll.dispatch.assembly import GroupWork
from splitroll.errors import ConfigError
from splitroll.samples import SampleFile, run_fingerprint
from splitroll.types import (
    Group,
    Prompt,
    Route,
    RouteKind,
    Sample,
    SamplingParams,
    Timing,
    VersionSpan,
)


def group(prompt_id: str, n: int = 2) -> Group:
    samples = tuple(
        Sample(
            id=prompt_id,
            sample=i,
            prompt_token_ids=(1,),
            token_ids=(2, 3),
            text="é\u2028",
            logprobs=(-0.1, -0.2),
            finish_reason="length",
            seed=i,
            weight_version=0,
            prefill_version=0,
            weight_versions=(VersionSpan(0, 0, 2),),
            route=Route(RouteKind.LOCAL, "e", "e"),
            timing=Timing(0, 0, 0, 0),
        )
        for i in range(n)
    )
    return Group(Prompt(prompt_id, (1,)), samples)


def opened(
    path: Path, *, resume: bool = False, overwrite: bool = False, run: str = "r", n: int = 2
) -> SampleFile:
    file = SampleFile(path, run, n)
    file.open(resume=resume, overwrite=overwrite)
    return file


def test_the_name_appears_only_when_the_run_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "new" / "s.jsonl"
    file = opened(path)
    file.write(group("a"))
    assert not path.exists()
    file.finish()
    rows = [json.loads(line) for line in path.read_text().split("\n") if line]
    assert [(row["id"], row["sample"]) for row in rows] == [("a", 0), ("a", 1)]
    assert sorted(p.name for p in path.parent.iterdir()) == ["s.jsonl", "s.jsonl.run"]


def test_a_run_is_resumed_with_its_complete_groups_only(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    first = opened(path)
    first.write(group("a"))
    first.write(group("b"))
    first.close()
    partial = tmp_path / "s.jsonl.partial"
    torn = json.dumps({"id": "c", "sample": 0}) + '\n{"id": "c", "sa'
    partial.write_text(partial.read_text() + torn)

    again = opened(path, resume=True)
    assert set(again.done) == {"a", "b"}
    again.write(group("c"))
    again.finish()
    assert len(path.read_text().strip().split("\n")) == 6


def test_a_finished_run_resumes_to_nothing_to_do(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    file = opened(path)
    file.write(group("a"))
    file.finish()
    file.close()
    again = opened(path, resume=True)
    assert again.is_finished
    assert set(again.done) == {"a"}
    again.close()
    with pytest.raises(ConfigError, match="another run"):
        opened(path, resume=True, run="two")


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    file = opened(path)
    file.write(group("a"))
    for flags in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(ConfigError, match="another process is writing"):
            opened(path, **flags)
    file.finish()
    assert len(path.read_text().splitlines()) == 2


def test_another_runs_file_is_not_resumed(tmp_path: Path) -> None:
    first = opened(tmp_path / "s.jsonl", run="one")
    first.write(group("a"))
    first.close()
    with pytest.raises(ConfigError, match="another run"):
        opened(tmp_path / "s.jsonl", resume=True, run="two")


def test_a_file_in_the_way_is_kept_and_told(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    file = opened(path)
    file.write(group("a"))
    with pytest.raises(ConfigError, match="--resume"):
        opened(path)
    file.finish()
    file.close()
    before = path.read_text()
    with pytest.raises(ConfigError, match="--overwrite"):
        opened(path)
    assert path.read_text() == before
    fresh = opened(path, overwrite=True)
    assert fresh.done == {}


def test_a_run_that_completed_nothing_leaves_nothing(tmp_path: Path) -> None:
    opened(tmp_path / "s.jsonl").close()
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="may write"):
        opened(tmp_path / "file" / "s.jsonl")


def test_the_fingerprint_tells_runs_apart() -> None:
    def fingerprint(**changes: object) -> str:
        sampling = SamplingParams(max_tokens=int(changes.get("max_tokens", 4)), seed=0)
        prompt = Prompt("a", (1, int(changes.get("token", 2))))
        work = GroupWork(prompt, int(changes.get("n", 2)), sampling, int(changes.get("seed", 0)))
        return run_fingerprint(str(changes.get("model", "m")), [work])

    base = fingerprint()
    assert base == fingerprint()
    changed = [{"max_tokens": 5}, {"token": 3}, {"n": 3}, {"seed": 1}, {"model": "x"}]
    assert len({base, *(fingerprint(**change) for change in changed)}) == 6
