"""The record of a step, the attribution of time, the live table, and the report's files."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import struct
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from splitroll.errors import ConfigError
from splitroll.report import (
    LiveTable,
    StepRecord,
    attribute,
    mean_parts,
    quarter_means,
    read_steps,
    write_comparison,
    write_curves,
    write_report,
)
from splitroll.report.attribution import attribute_turns
from splitroll.report.figures import moving_average
from splitroll.report.live import sparkline
from splitroll.report.steps import time_parts
from splitroll.types import Group, Prompt, Route, RouteKind, Sample, Timing, VersionSpan


def step(number: int = 1, **changes: object) -> StepRecord:
    record = StepRecord(
        step=number,
        weight_version=number - 1,
        reward=0.1 * number,
        reward_std=0.4,
        loss=0.01,
        logprob_gap_mean=0.002,
        logprob_gap_max=0.3,
        samples=32,
        tokens=900,
        split=4,
        shared=28,
        generate_s=4.0,
        prefill_s=0.5,
        transfer_s=0.2,
        decode_s=3.0,
        sync_s=1.0,
        sync_phases={"load": 0.7, "prove": 0.3},
        train_s=3.0,
        total_s=8.5,
    )
    return dataclasses.replace(record, **changes)  # type: ignore[arg-type]


def run(count: int) -> list[StepRecord]:
    return [step(number) for number in range(1, count + 1)]


def group(*timings: Timing) -> Group:
    samples = tuple(
        Sample(
            id="p",
            sample=index,
            prompt_token_ids=(1,),
            token_ids=(2,),
            text="",
            logprobs=(0.0,),
            finish_reason="stop",
            seed=0,
            weight_version=0,
            prefill_version=0,
            weight_versions=(VersionSpan(0, 0, 1),),
            route=Route(RouteKind.SPLIT, "prefill-0", "decode-0"),
            timing=timing,
        )
        for index, timing in enumerate(timings)
    )
    return Group(Prompt("p", (1,)), samples)


# --- the record


@given(
    st.builds(
        StepRecord,
        step=st.integers(1),
        weight_version=st.integers(0),
        reward=st.floats(allow_nan=False, allow_infinity=False),
        reward_std=st.floats(0, 1),
        loss=st.none() | st.floats(-1, 1),
        logprob_gap_mean=st.none() | st.floats(0, 1),
        tokens=st.integers(0),
        sync_phases=st.dictionaries(st.text(), st.floats(0, 9)),
    )
)
def test_record_survives_json(record: StepRecord) -> None:
    line = json.dumps(record.to_json(), allow_nan=False)
    assert StepRecord.from_json(json.loads(line)) == record


def test_numbers_that_json_lacks_become_null() -> None:
    row = step(reward=math.nan, loss=math.inf, sync_phases={"load": math.nan}).to_json()
    again = StepRecord.from_json(json.loads(json.dumps(row, allow_nan=False)))
    assert math.isnan(again.reward)
    assert math.isnan(again.sync_phases["load"])
    assert again.loss is None


def test_unknown_fields_of_a_record_are_left_out() -> None:
    assert StepRecord.from_json({**step().to_json(), "later": 1}) == step()


def test_steps_file_is_read_up_to_a_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    lines = [json.dumps(record.to_json()) + "\n" for record in run(2)]
    path.write_text("".join(lines) + lines[0][:20])
    assert read_steps(path) == run(2)


@pytest.mark.parametrize("line", ["{", "[]", "3", '{"step": 1}', '{"sync_phases": 3}'])
def test_a_line_that_is_no_step_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(json.dumps(step().to_json()) + "\n" + line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_steps(path)


def test_quarters_have_at_least_one_step_and_leave_out_nan() -> None:
    assert quarter_means([]) == (None, None)
    assert quarter_means(run(1)) == (0.1, 0.1)
    first, last = quarter_means([step(1, reward=math.nan), *run(16)[1:]])
    assert first == pytest.approx(0.3)
    assert last == pytest.approx(1.45)


def test_moving_average_begins_when_its_window_is_full() -> None:
    assert moving_average([1.0, math.nan, 3.0], 2)[1:] == [1.0, 3.0]
    assert math.isnan(moving_average([1.0, 2.0], 2)[0])


# --- where the time goes

seconds = st.floats(0, 100)
timings = st.builds(Timing, seconds, seconds, seconds, seconds)


@given(st.lists(st.lists(timings, max_size=4), max_size=4), st.floats(0, 1000))
def test_phases_are_not_negative_and_add_up_to_the_wall(
    groups: list[list[Timing]], wall_s: float
) -> None:
    parts = dataclasses.astuple(attribute([group(*g) for g in groups], wall_s))
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(wall_s)


@given(timings)
def test_a_sample_alone_has_its_own_phases(timing: Timing) -> None:
    parts = dataclasses.astuple(timing)
    found = dataclasses.astuple(attribute([group(timing)], sum(parts)))
    assert found == pytest.approx((*parts, 0.0), abs=1e-9)


def test_equal_samples_count_like_one() -> None:
    timing = Timing(1.0, 2.0, 3.0, 4.0)
    assert attribute([group(*[timing] * 8)] * 3, 10.0) == attribute([group(timing)], 10.0)


def test_samples_that_overlap_share_an_instant() -> None:
    """0-2: one queues, one prefills. 2-4: one prefills, one decodes. 4-6: one decodes."""
    phases = attribute([group(Timing(0, 2, 0, 2)), group(Timing(2, 2, 0, 2))], 6.0)
    assert dataclasses.astuple(phases) == pytest.approx((0, 3, 0, 3, 0))


def test_queueing_counts_only_when_nothing_computes() -> None:
    phases = attribute([group(Timing(1, 1, 0, 2), Timing(3, 0, 0, 1))], 4.0)
    assert dataclasses.astuple(phases) == pytest.approx((1, 1, 0, 2, 0))


def test_the_timeline_is_scaled_to_the_wall() -> None:
    phases = attribute([group(Timing(0, 1, 1, 2))], 8.0)
    assert dataclasses.astuple(phases) == pytest.approx((0, 2, 2, 4, 0))


@given(st.lists(st.lists(st.tuples(timings, seconds), max_size=4), max_size=4), st.floats(0, 1000))
def test_phases_of_episodes_add_up_to_the_wall(
    episodes: list[list[tuple[Timing, float]]], wall_s: float
) -> None:
    parts = dataclasses.astuple(attribute_turns(episodes, wall_s))
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(wall_s)


def test_the_environment_counts_only_when_no_turn_computes() -> None:
    """0-2: a decodes, b too. 2-5: a is in the environment, b decodes until 4. 5-6: a decodes."""
    a = [(Timing(0, 0, 0, 2), 3.0), (Timing(0, 0, 0, 1), 0.0)]
    b = [(Timing(0, 0, 0, 4), 0.0)]
    phases = attribute_turns([a, b], 6.0)
    assert dataclasses.astuple(phases) == pytest.approx((0, 0, 0, 5, 1))


def test_queue_and_environment_share_an_instant() -> None:
    a = [(Timing(0, 0, 0, 1), 2.0)]
    b = [(Timing(3, 0, 0, 1), 0.0)]
    phases = attribute_turns([a, b], 4.0)
    assert dataclasses.astuple(phases) == pytest.approx((1, 0, 0, 2, 1))


def test_without_samples_the_wall_is_queue() -> None:
    assert dataclasses.astuple(attribute([], 2.0)) == (2.0, 0.0, 0.0, 0.0, 0.0)


def test_parts_of_a_step_add_up_to_it() -> None:
    parts = time_parts(step())
    assert sum(parts.values()) == pytest.approx(8.5)
    assert parts["queue"] == pytest.approx(0.3)
    assert parts["other"] == pytest.approx(0.5)


def test_a_generation_without_phases_is_told_as_a_whole() -> None:
    record = step(prefill_s=0.0, transfer_s=0.0, decode_s=0.0, train_s=math.nan)
    assert mean_parts([record]) == pytest.approx({"generate": 4.0, "sync": 1.0, "other": 3.5})


# --- the live table


def show(count: int, *, terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    with LiveTable(total_steps=count, console=console) as table:
        for record in run(count):
            table.add(record)
    return out.getvalue()


def test_without_a_terminal_a_step_is_a_line() -> None:
    lines = show(3, terminal=False).splitlines()
    assert len(lines) == 3
    assert lines[2].startswith("step 3/3  reward 0.300  gap 0.0020  generate 4.0 s  sync 1.0 s")
    assert "\x1b" not in lines[2]


def test_on_a_terminal_the_last_steps_are_a_table() -> None:
    last = show(20, terminal=True).rpartition("reward 0.300 → 1.800")[2]
    shown = [int(line[1:7]) for line in last.splitlines() if line.startswith("│")]
    assert shown == list(range(9, 21))
    assert "20 of 20 steps" in last


def test_nothing_is_shown_of_numbers_that_are_none() -> None:
    out = io.StringIO()
    with LiveTable(console=Console(file=out, force_terminal=True, width=100)) as table:
        table.add(step(reward=math.nan, logprob_gap_mean=None))
    assert "nan" not in out.getvalue().lower()


def test_sparkline() -> None:
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▄▄"
    assert sparkline([0.0, math.nan, 1.0]) == "▁ █"
    assert len(sparkline([float(i) for i in range(1000)])) == 48


# --- files


def assert_png(data: bytes) -> None:
    """Check signature, checksums and pixels of a PNG, 2000 pixels wide."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, pixels, kind = 8, b"", b""
    while at < len(data):
        (size,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + size]
        assert (
            zlib.crc32(kind + body) == struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0]
        )
        if kind == b"IHDR":
            width, height = struct.unpack(">II", body[:8])
        pixels += body if kind == b"IDAT" else b""
        at += 12 + size
    assert kind == b"IEND"
    assert width == 2000
    assert len(zlib.decompress(pixels)) == height * (1 + 4 * width)


class Page(HTMLParser):
    """What the tests ask of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "source"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def report(folder: Path, steps: list[StepRecord], **facts: str) -> Page:
    files = write_report(folder, steps, title="A <run>", facts=facts)
    assert [file.name for file in files] == ["reward.png", "steps.png", "index.html"]
    for file in files[:2]:
        assert_png(file.read_bytes())
    page = Page(files[2].read_text(encoding="utf-8"))
    assert page.open == []
    return page


ODD = {
    "empty": {
        "loss": None,
        "logprob_gap_mean": None,
        "logprob_gap_max": None,
        "sync_phases": {},
        **dict.fromkeys(("generate_s", "prefill_s", "transfer_s", "decode_s"), 0.0),
        **dict.fromkeys(("sync_s", "train_s", "total_s"), 0.0),
    },
    "nan": dict.fromkeys(("reward", "reward_std", "loss", "logprob_gap_max", "total_s"), math.nan),
}


@pytest.mark.parametrize("count", [1, 16])
def test_report_has_a_row_per_step(tmp_path: Path, count: int) -> None:
    page = report(tmp_path / "new" / "report", run(count), model="tiny")
    facts, steps = page.text.split("The run")[1].split("All steps")
    assert "model" in facts
    assert "tiny" in facts
    assert "versions" in facts
    assert "weight version" in steps
    html = (tmp_path / "new" / "report" / "index.html").read_text()
    table = html.split('<table class="steps">')[1]
    numbers = [number for number in range(20) if f'<tr><th scope="row">{number}</th>' in table]
    assert numbers == list(range(1, count + 1))


def test_given_facts_stand_in_place_of_found_ones(tmp_path: Path) -> None:
    page = report(tmp_path, run(1), samples="8 per prompt", versions="told")
    assert "8 per prompt" in page.text
    assert "32: 4 split" not in page.text
    assert "Python 3" not in page.text


@pytest.mark.parametrize("odd", [["empty"], ["nan"], ["empty", "nan", "empty", "nan", "nan"]])
def test_report_of_steps_without_numbers(tmp_path: Path, odd: list[str]) -> None:
    page = report(tmp_path, [dataclasses.replace(step(), **ODD[kind]) for kind in odd])  # type: ignore[arg-type]
    assert "nan" not in page.text
    assert "None" not in page.text


def test_facts_are_text_and_tell_no_paths_of_the_machine(tmp_path: Path) -> None:
    page = report(
        tmp_path,
        run(2),
        task='<script>alert(1)</script> & "quoted"',
        model="/home/someone/models/tiny-model",
        config=f"config={tmp_path}/run.yaml, file:///home/someone/x.json",
        source="https://example.org/a/b and org/model",
    )
    html = (tmp_path / "index.html").read_text()
    assert "<script" not in html
    assert "<h1>A &lt;run&gt;</h1>" in html
    assert '<script>alert(1)</script> & "quoted"' in page.text
    assert "tiny-model" in page.text
    assert "config=run.yaml, x.json" in page.text
    assert "https://example.org/a/b and org/model" in page.text
    assert "/home/" not in html
    assert str(tmp_path) not in html
    assert str(Path.cwd()) not in html


def test_page_needs_nothing_else_and_is_accessible(tmp_path: Path) -> None:
    page = report(tmp_path, run(3))
    images = [attrs for tag, attrs in page.tags if tag == "img"]
    sources = [attrs["srcset"] for tag, attrs in page.tags if tag == "source"]
    assert len(images) == len(sources) == 2
    for image in images:
        assert image["alt"]
        sources.append(image["src"])
    assert all(source and source.startswith("data:image/png;base64,") for source in sources)
    assert not {"script", "link", "iframe"} & {tag for tag, _ in page.tags}
    assert ("html", {"lang": "en"}) in page.tags
    assert "http" not in (tmp_path / "index.html").read_text()


def test_no_report_without_steps(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no steps"):
        write_report(tmp_path / "report", [], title="", facts={})
    assert not (tmp_path / "report").exists()


def test_runs_side_by_side(tmp_path: Path) -> None:
    runs = {"split <1>": run(12), "colocated $x$ and $y": run(1)}
    for write in (write_curves, write_comparison):
        path = tmp_path / f"{write.__name__}.png"
        write(path, runs)
        assert_png(path.read_bytes())


def test_matplotlib_loads_only_to_draw() -> None:
    code = "import sys, splitroll.report; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_matplotlib_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"splitroll\[train\]"):
        write_report(tmp_path, run(1), title="", facts={})
