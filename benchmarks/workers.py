"""How much faster do two processes read captured calls than one?

3,000 rollouts of 40 turns, every prompt whole, about 3.9 GB, frozen before the clock starts. The
time includes the start of the processes. A process that is alone lets a second thread hash, so that
it takes more than one core: how many, is given as well. So is the whole command, which packs and
writes merged rows when all is read.

Run: python benchmarks/workers.py [--repeats 7]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path


def main() -> None:
    """Print one line per count of processes."""
    # A worker loads this file as well; what only the measuring needs is none of its business.
    from harness import arguments, conclude, describe, measure
    from recorded import Shape, write_captures

    from evsys_jax import collect

    options = arguments(__doc__)
    rollouts, shape = (8, Shape(3)) if options.quick else (3_000, Shape(40))
    print(describe("numpy", "orjson"))
    with tempfile.TemporaryDirectory() as directory:
        captures = Path(directory) / "captures"
        records = write_captures(captures, rollouts, shape)
        size = sum(path.stat().st_size for path in captures.glob("*.jsonl"))
        print(f"{rollouts:,} rollouts, {size / 1e6:,.0f} MB")
        print(f"median (minimum) of {options.repeats} interleaved repeats, in s")
        read = partial(collect, records, captures=captures)

        def build(workers: int) -> None:
            command = [sys.executable, "-m", "evsys_jax", "build", records, "--rows", "merged"]
            command += ["--captures", captures, "--workers", str(workers)]
            command += ["--out", Path(directory, "out")]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

        contenders = {
            "collect: one process": read,
            "collect: two processes": partial(read, workers=2),
            "build: one process": partial(build, 1),
            "build: two processes": partial(build, 2),
        }
        cores: dict[str, list[float]] = {name: [] for name in contenders}
        counted = {
            name: partial(count_cores, function, cores[name])
            for name, function in contenders.items()
        }
        times = measure(counted, options.repeats)
    print(f"{'':24}{'time':>16}{'MB/s':>8}{'cores':>7}{'ratio':>7}")
    for name, (median, least) in times.items():
        base = times[f"{name.partition(':')[0]}: one process"][0]
        cell = f"{median:.2f} ({least:.2f})"
        busy = statistics.median(cores[name])
        print(f"{name:24}{cell:>16}{size / median / 1e6:8.0f}{busy:7.2f}{base / median:6.2f}x")
    for what, called in (
        ("collect", "collect(captures=...)"),
        ("build", "evsys-jax build --captures"),
    ):
        one, two = (f"{what}: {processes}" for processes in ("one process", "two processes"))
        busy = statistics.median(cores[one])
        meaning = f"speed over one process, which keeps {busy:.2f} cores busy"
        conclude(f"two processes in `{called}`", f"{times[one][0] / times[two][0]:.2f}x", meaning)


def count_cores(function: Callable[[], object], found: list[float]) -> None:
    """Call a function, and note how many cores it and its processes kept busy."""
    start, before = time.perf_counter(), sum(os.times()[:4])
    function()
    found.append((sum(os.times()[:4]) - before) / (time.perf_counter() - start))


if __name__ == "__main__":
    main()
