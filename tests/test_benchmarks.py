"""Every benchmark runs, and what it prints finds its place in the README. No time is asserted."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted({path.stem for path in HOME.glob("*.py")} - {"all", "harness", "recorded"})
WITH_RESULTS = [name for name in SCRIPTS if name != "steps"]  # where time goes is no result


@pytest.fixture(scope="module")
def readme(tmp_path_factory):
    """A copy of the README after a trial run of all."""
    copy = tmp_path_factory.mktemp("benchmarks") / "README.md"
    shutil.copy(HOME / "README.md", copy)
    command = [sys.executable, str(HOME / "all.py"), "--quick", "--readme", str(copy)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return copy.read_text(encoding="utf-8")


def between(text, place):
    _, begin, rest = text.partition(f"<!-- {place} -->")
    inside, end, _ = rest.partition(f"<!-- end of {place} -->")
    assert begin and end
    return inside


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_benchmark_prints_its_tables(readme, name):
    table = between(readme, name)
    assert re.search(r"Python 3\.\d+\.\d+", table), "no versions"
    assert len(table.splitlines()) > 5
    rows = [row for row in between(readme, "results").splitlines() if f"[{name}]" in row]
    assert bool(rows) == (name in WITH_RESULTS)
    assert all(row.count(" | ") == 3 for row in rows), rows


def test_the_readme_has_the_results_of_every_script():
    text = (HOME / "README.md").read_text(encoding="utf-8")
    found = set(re.findall(r"^\| \[(\w+)\]", between(text, "results"), re.M))
    assert sorted(found) == WITH_RESULTS
    for name in SCRIPTS:
        assert "```text" in between(text, name)
