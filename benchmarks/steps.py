"""How is the time of each hot path shared among its steps?

Each path runs once to warm up and then a few times under cProfile; listed are the functions with
the most time of their own. cProfile slows calls down, not what happens inside one in C, so many
small calls look dearer than they are.

Run: python benchmarks/steps.py [--repeats 5]
"""

from __future__ import annotations

import cProfile
import pstats
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
from harness import SCALES, TINY, arguments, describe, make_groups
from recorded import Shape, write_captures, write_records

from evsys_jax import assemble_training_data, collect, compute_advantages, pack
from evsys_jax.capture.sources import build_from_directories

SHOWN = 8


def main() -> None:
    """Print one table per hot path."""
    options = arguments(__doc__, repeats=5)
    print(describe("jax", "numpy", "tinker", "orjson"))
    scale = (TINY if options.quick else SCALES)["balanced"]
    lists, arrays = (make_groups(**scale, arrays=kind) for kind in (False, True))
    advantages = compute_advantages(lists)
    turns, delta_turns, rollouts = (3, 3, 2) if options.quick else (40, 1_000, 20)
    with tempfile.TemporaryDirectory() as scratch:
        whole, deltas, inline = (Path(scratch) / name for name in ("whole", "deltas", "inline"))
        write_captures(whole, 1, Shape(turns))
        write_captures(deltas, 1, Shape(delta_turns, generated=100), delta=True)
        write_records(inline, rollouts, Shape(turns))
        paths: dict[str, Callable[[], object]] = {
            "assemble_training_data, lists": partial(assemble_training_data, lists, advantages),
            "assemble_training_data, arrays": partial(assemble_training_data, arrays, advantages),
            "pack, from arrays": lambda: jax.block_until_ready(pack(arrays)),
            f"build, {turns} turns, whole prompts": partial(build_from_directories, "0-0", [whole]),
            f"build, {delta_turns:,} turns, deltas": partial(
                build_from_directories, "0-0", [deltas]
            ),
            f"collect, {rollouts} records that carry their tokens": partial(collect, inline),
        }
        for name, path in paths.items():
            profile(name, path, options.repeats)


def profile(name: str, path: Callable[[], object], repeats: int) -> None:
    """Run one path under the profiler and print its dearest functions."""
    path()
    profiler = cProfile.Profile()
    for _ in range(repeats):
        profiler.runcall(path)
    stats = pstats.Stats(profiler)
    total = stats.total_tt
    print(f"\n{name}: {total / repeats * 1e3:.1f} ms under the profiler")
    own = {where: (entry[2], entry[1]) for where, entry in stats.stats.items()}
    dearest = sorted(own.items(), key=lambda item: -item[1][0])[:SHOWN]
    for where, (seconds, calls) in dearest:
        print(f"{seconds / total:6.0%}{calls / repeats:10,.0f} calls  {title(*where)}")


def title(file: str, line: int, function: str) -> str:
    """Name a function by its module."""
    return function.strip("<>") if file == "~" else f"{Path(file).stem}.{function}"


if __name__ == "__main__":
    main()
