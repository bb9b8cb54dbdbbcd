"""What people see while a command runs (on stderr) and when it is done."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from splitroll.fleet.fleet import Fleet, MemberState

_STYLE = {
    MemberState.STARTING: "yellow",
    MemberState.READY: "green",
    MemberState.RESTARTING: "yellow",
    MemberState.FAILED: "red",
}


class Display:
    """Progress on stderr: the engines' states, then groups done."""

    def __init__(self, *, total_groups: int = 0) -> None:
        self.console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
        )
        self._engines = self._progress.add_task("engines", total=None)
        self._groups = self._progress.add_task("groups", total=total_groups or None, visible=False)
        self._states: dict[str, MemberState] = {}

    @contextlib.contextmanager
    def showing(self) -> Iterator[None]:
        with self._progress:
            yield

    def engines(self, fleet: Fleet) -> None:
        """Show the state of each engine; a change after the start is also printed."""
        members = fleet.members.values()
        ready = sum(member.state is MemberState.READY for member in members)
        self._progress.update(self._engines, total=len(members), completed=ready)
        for member in members:
            before = self._states.get(member.spec.name, MemberState.STARTING)
            if member.state is not before:
                style = _STYLE[member.state]
                down = member.state is not MemberState.READY
                why = f": {escape(str(member.last_error))}" if down else ""
                self.console.print(f"[{style}]{member.spec.name} {member.state.value}[/]{why}")
            self._states[member.spec.name] = member.state

    def group_done(self) -> None:
        self._progress.update(self._groups, advance=1, visible=True)

    def say(self, text: str, style: str | None = None) -> None:
        """Print a line; it is text, never markup."""
        self.console.print(text, style=style, markup=False, soft_wrap=True)


@contextlib.contextmanager
def timed(display: Display, what: str) -> Iterator[None]:
    """Say how long something took."""
    begun = time.monotonic()
    yield
    display.say(f"{what}: {time.monotonic() - begun:.1f} s", style="dim")


def summary_tables(summary: Mapping[str, Any]) -> list[Table]:
    """Return the summary of a rollout as tables."""
    run = Table(title="rollout", show_header=False)
    rows: list[tuple[str, Any]] = [
        ("groups", f"{summary['groups']} complete, {summary['failed']} failed"),
        ("samples", summary["samples"]),
        ("prompt tokens", summary["prompt_tokens"]),
        ("completion tokens", summary["completion_tokens"]),
        ("wall time", f"{summary['wall_s']:.1f} s"),
        ("handoffs", summary["handoffs"]),
        ("KV moved", f"{summary['kv_bytes'] / 1e6:.1f} MB"),
        ("routes", ", ".join(f"{n} {kind}" for kind, n in summary["routes"].items() if n)),
        ("moves between segments", summary["moves"]),
        ("saved by handoffs, estimated", f"{summary['estimated_saved_s']:.2f} s"),
    ]
    if summary.get("score_mean") is not None:
        rows.append(("mean score", f"{summary['score_mean']:.3f}"))
    if summary["recomputed_tokens"]:
        rows.append(("[red]recomputed after handoff[/]", f"{summary['recomputed_tokens']} tokens"))
    for name, value in rows:
        run.add_row(name, str(value))
    engines = Table(title="engines")
    for column in ("name", "role", "prefills", "decodes", "restarts"):
        engines.add_column(column)
    for engine in summary["engines"]:
        engines.add_row(*(str(engine[column.header]) for column in engines.columns))
    return [run, engines]
