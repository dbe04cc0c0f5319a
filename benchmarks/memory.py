"""How much memory does `collect` take at its peak, over the arrays that it hands out?

500 rollouts of 40 turns, every prompt whole: once as captured calls, one file a rollout, and once
as records that carry their tokens, where the longest record takes the place of the largest file.
Each run is a process of its own. Its peak resident memory, over what it held before the call, is
compared with the final arrays plus that largest piece of input. Linux only.

Run: python benchmarks/memory.py [--repeats 7]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import arguments, conclude, describe
from recorded import Shape, write_captures, write_records

CHILD = """
import json, sys
from evsys_jax import collect
import evsys_jax.capture.sources
import numpy as np

def resident(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))

before = resident("VmRSS")
groups, report = collect(sys.argv[1], captures=sys.argv[2] if len(sys.argv) > 2 else None)
peak, after = resident("VmHWM"), resident("VmRSS")
assert all(verdict.trains for verdict in report.verdicts), report.masked

def owner(array):
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array

turns = [turn for group in groups for t in group.trajectories for turn in t.turns]
fields = [x for t in turns for x in (t.prompt_tokens, t.completion_tokens, t.logprobs)]
arrays = {id(owner(field)): owner(field).nbytes for field in fields}
print(json.dumps({
    "before": before, "peak": peak, "after": after,
    "arrays": sum(arrays.values()),
}))
"""


def main() -> None:
    """Print one line per kind of input."""
    options = arguments(__doc__)
    rollouts = 4 if options.quick else 500
    shape = Shape(4 if options.quick else 40)
    print(describe("numpy", "orjson"))
    print(f"{rollouts} rollouts of {shape.turns} turns, {shape.tokens:,} tokens each; MB,")
    print(f"median of {options.repeats} processes")
    print(f"{'':18}{'input':>8}{'largest':>9}{'arrays':>8}{'peak':>8}{'after':>8}{'ratio':>7}")
    with tempfile.TemporaryDirectory() as directory:
        captures = Path(directory) / "captures"
        records = write_captures(captures, rollouts, shape)
        sizes = [path.stat().st_size for path in captures.glob("*.jsonl")]
        line("captures", options.repeats, sum(sizes), max(sizes), records, captures)
    with tempfile.TemporaryDirectory() as directory:
        records = Path(directory) / "records.jsonl"
        longest = write_records(records, rollouts, shape)
        line("inline records", options.repeats, records.stat().st_size, longest, records)


def line(kind: str, repeats: int, total: int, largest: int, *paths: Path) -> None:
    """Measure one kind of input and print its line."""
    runs = [run_child(*paths) for _ in range(repeats)]
    arrays = runs[0]["arrays"]
    peak, after = (
        statistics.median(run[key] - run["before"] for run in runs) for key in ("peak", "after")
    )
    ratio = peak / (arrays + largest)
    megabytes = (each / 1e6 for each in (total, largest, arrays, peak, after))
    widths = (8, 9, 8, 8, 8)
    cells = "".join(f"{size:{w},.1f}" for size, w in zip(megabytes, widths, strict=True))
    print(f"{kind:18}{cells}{ratio:7.2f}")
    conclude(
        f"peak memory of `collect`, {kind}",
        f"{ratio:.2f}x",
        "over the final arrays and the largest piece of input",
    )


def run_child(*paths: Path) -> dict[str, Any]:
    """Collect in a fresh interpreter."""
    result = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, paths)], check=True, capture_output=True, text=True
    )
    measured: dict[str, Any] = json.loads(result.stdout)
    return measured


if __name__ == "__main__":
    main()
