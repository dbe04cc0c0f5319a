"""How much faster do two processes read captured calls than one?

`collect` on 2,000 rollouts of 40 turns, every prompt whole, about 2.6 GB. The captures are frozen
before the clock starts. The time includes the start of the processes. A process that is alone
lets a second thread hash; what it takes without one is given as well.

Run: python benchmarks/workers.py [--repeats 7]
"""

from __future__ import annotations

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
    rollouts, shape = (8, Shape(3)) if options.quick else (2_000, Shape(40))
    print(describe("numpy", "orjson"))
    with tempfile.TemporaryDirectory() as directory:
        captures = Path(directory) / "captures"
        records = write_captures(captures, rollouts, shape)
        size = sum(path.stat().st_size for path in captures.glob("*.jsonl"))
        print(f"{rollouts:,} rollouts, {size / 1e6:,.0f} MB")
        print(f"median (minimum) of {options.repeats} interleaved repeats, in s")
        print(f"{'':14}{'time':>16}{'MB/s':>8}{'ratio':>7}")
        read = partial(collect, records, captures=captures)

        def alone() -> None:
            with one_thread():
                read()

        times = measure(
            {"one process": read, "one thread": alone, "two processes": partial(read, workers=2)},
            options.repeats,
        )
    base = times["one process"][0]
    for name, (median, least) in times.items():
        cell = f"{median:.2f} ({least:.2f})"
        print(f"{name:14}{cell:>16}{size / median / 1e6:8.0f}{base / median:6.2f}x")
    for name in ("one process", "one thread"):
        figure = f"{times[name][0] / times['two processes'][0]:.2f}x"
        conclude("two processes in `collect(captures=...)`", figure, f"speed over {name}")


if __name__ == "__main__":
    main()
