"""The weight benchmark's arithmetic; what it measures needs real engines."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from splitroll.bench.weights import Measured, Round, bound, report
from splitroll.cli.bench_weights import _print

ROUND = Round(
    write=0.1, reload=0.3, load=0.3, push=0.3, pushed_load=0.25, pushed_pause=0.26, path=0.5
)


@pytest.mark.parametrize(
    ("engines", "cores", "write_s", "reload_s", "allowed_s"),
    [
        (1, 2, 0.1, 0.3, 0.4),  # both, less what overlaps
        (2, 2, 0.1, 0.3, 0.39),
        (3, 2, 0.1, 0.3, 0.585),  # three loads on two cores
        (3, 2, 1.0, 0.3, 1.3),  # the trainer is what takes long
        (2, 64, 0.1, 0.3, 0.39),  # a load does not spread over more cores than engines
    ],
)
def test_bound(engines: int, cores: int, write_s: float, reload_s: float, allowed_s: float) -> None:
    assert bound(engines, cores, write_s, reload_s) == pytest.approx(allowed_s)


def test_report_of_medians() -> None:
    slow = replace(ROUND, push=9.0, pushed_pause=5.0, pushed_load=4.0)
    measured = {
        2: Measured(1000, [ROUND, slow, ROUND], [0.6, 0.5, 0.7]),
        3: Measured(1000, [slow, slow, ROUND], [0.6]),
    }
    result = report(measured, cores=2)
    two, three = result["fleets"]["2"], result["fleets"]["3"]
    assert result["nbytes"] == 1000
    assert two["median"]["push_s"] == 0.3
    assert two["median"]["disk_s"] == 0.6
    assert two["rounds"]["push_s"] == [0.3, 9.0, 0.3]
    assert two["bound_s"] == pytest.approx(0.39)
    assert two["push_to_bound"] == pytest.approx(0.3 / 0.39)
    assert two["pause_to_load"] == pytest.approx(1.04)
    assert two["within_bounds"]
    assert not three["within_bounds"]
    json.dumps(result)


@pytest.mark.parametrize("change", [{"push": 0.5}, {"pushed_pause": 0.3}])
def test_out_of_bounds(change: dict[str, float]) -> None:
    measured = {1: Measured(1000, [replace(ROUND, **change)], [0.6])}
    assert not report(measured, cores=2)["fleets"]["1"]["within_bounds"]


def test_table() -> None:
    out = StringIO()
    _print(Console(file=out, width=160), report({1: Measured(1000, [ROUND], [0.6])}, cores=2))
    assert "300 (300-300)" in out.getvalue()
    assert "yes" in out.getvalue()
