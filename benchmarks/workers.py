"""How much faster do two processes read captured calls than one?

`collect` on 1,500 rollouts of 40 turns, every prompt whole, about 1.9 GB. The captures are frozen
before the clock starts. The time includes the start of the processes.

Run: python benchmarks/workers.py [--repeats 7]
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

from harness import arguments, conclude, describe, measure
from recorded import Shape, write_captures

from evsys_jax import collect


def main() -> None:
    """Print one line per count of processes."""
    options = arguments(__doc__)
    rollouts, shape = (8, Shape(3)) if options.quick else (1_500, Shape(40))
    print(describe("numpy", "orjson"))
    with tempfile.TemporaryDirectory() as directory:
        captures = Path(directory) / "captures"
        records = write_captures(captures, rollouts, shape)
        size = sum(path.stat().st_size for path in captures.glob("*.jsonl"))
        print(f"{rollouts:,} rollouts, {size / 1e6:,.0f} MB")
        print(f"median (minimum) of {options.repeats} interleaved repeats, in s")
        print(f"{'':12}{'time':>16}{'MB/s':>8}{'ratio':>7}")
        times = measure(
            {
                f"workers={count}": partial(collect, records, captures=captures, workers=count)
                for count in (1, 2)
            },
            options.repeats,
        )
    base = times["workers=1"][0]
    for name, (median, least) in times.items():
        cell = f"{median:.2f} ({least:.2f})"
        print(f"{name:12}{cell:>16}{size / median / 1e6:8.0f}{base / median:6.2f}x")
    figure = f"{base / times['workers=2'][0]:.2f}x"
    conclude("two processes in `collect(captures=...)`", figure, "speed over one process")


if __name__ == "__main__":
    main()
