"""The measurement of decisions: what it reports, not how fast this machine is."""

from __future__ import annotations

import json

from splitroll.bench.decisions import measure
from splitroll.cli.bench import merge


def test_it_reports_each_size_of_fleet() -> None:
    found = measure((4, 8), decisions=20)
    assert json.loads(json.dumps(found)) == found
    assert set(found) == {"4", "8"}
    for kinds in found.values():
        assert set(kinds) == {"sample", "group", "begin_end", "accept", "report"}
        assert all(0 < kind["median_us"] <= kind["p99_us"] for kind in kinds.values())


def test_a_comparison_can_be_made_in_parts() -> None:
    def result(workload: str, rounds: int) -> dict[str, object]:
        return {"workload": workload, "rounds": rounds}

    earlier = [result("mixed", 1), result("burst", 1)]
    merged = merge(earlier, [result("agentic", 5), result("burst", 5)])
    assert merged == [result("burst", 5), result("agentic", 5), result("mixed", 1)]
