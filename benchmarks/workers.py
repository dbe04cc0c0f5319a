"""How much faster do two processes read captured calls than one?

1,500 rollouts of 40 turns, every prompt whole, about 1.9 GB, frozen before the clock starts. The
time includes the start of the processes. A process that is alone lets a second thread hash; what
it takes without one is given as well, and so is the whole command, which packs and writes merged
rows when all is read.

Run: python benchmarks/workers.py [--repeats 7]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path


def main() -> None:
    """Print one line per count of processes."""
    # A worker loads this file as well; what only the measuring needs is none of its business.
    from harness import arguments, conclude, describe, measure
    from recorded import Shape, write_captures

    from evsys_jax import collect
    from evsys_jax.capture.stamps import one_thread

    options = arguments(__doc__)
    rollouts, shape = (8, Shape(3)) if options.quick else (4_500, Shape(40))
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

        def alone() -> None:
            with one_thread():
                read()

        contenders = {
            "collect: one process": read,
            "collect: one thread": alone,
            "collect: two processes": partial(read, workers=2),
            "build: one process": partial(build, 1),
            "build: two processes": partial(build, 2),
        }
        times = measure(contenders, options.repeats)
    print(f"{'':24}{'time':>16}{'MB/s':>8}{'ratio':>7}")
    for name, (median, least) in times.items():
        base = times[f"{name.partition(':')[0]}: one process"][0]
        cell = f"{median:.2f} ({least:.2f})"
        print(f"{name:24}{cell:>16}{size / median / 1e6:8.0f}{base / median:6.2f}x")
    for what, than, called, meaning in (
        ("collect", "one process", "collect(captures=...)", "one process"),
        ("collect", "one thread", "collect(captures=...)", "one thread"),
        ("build", "one process", "evsys-jax build --captures", "one process"),
    ):
        figure = f"{times[f'{what}: {than}'][0] / times[f'{what}: two processes'][0]:.2f}x"
        conclude(f"two processes in `{called}`", figure, f"speed over {meaning}")


if __name__ == "__main__":
    main()
