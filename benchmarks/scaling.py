"""Does the cost grow linearly with the work?

Tokens per second of `assemble_training_data` and `pack` at 1, 10 and 100 times the work, and of
the build of one captured rollout with more and more turns: with delta records, where the bytes
grow with the turns, and with whole prompts, where they grow with their square. If the cost is
linear, tokens (bytes) per second stay as they are.

Run: python benchmarks/scaling.py [--repeats 7]
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import jax
from harness import arguments, conclude, describe, make_groups, measure
from recorded import Shape, write_captures

from evsys_jax import assemble_training_data, compute_advantages, pack, ragged_rows
from evsys_jax.capture.sources import build_from_directories

WORK = {"1x": 1, "10x": 10, "100x": 100}
TURNS = {"deltas": (10, 100, 1_000), "whole prompts": (10, 100, 300)}


def main() -> None:
    """Print one line per amount of work."""
    options = arguments(__doc__)
    print(describe("jax", "numpy", "tinker", "orjson"))
    print(f"median (minimum) of {options.repeats} interleaved repeats, in ms")
    print(f"\n{'groups of 4 rollouts, 4 turns':32}{'tokens':>12}{'time':>20}{'Mtok/s':>9}")
    grow_batch(options)
    print(
        f"\n{'one captured rollout':32}{'tokens':>12}{'time':>20}{'Mtok/s':>9}{'MB':>8}{'MB/s':>7}"
    )
    grow_rollout(options)


def grow_batch(options: Any) -> None:
    """Time whole batches of more and more groups."""
    runs, tokens = {}, {}
    for name, factor in ({"1x": 1} if options.quick else WORK).items():
        groups = make_groups(groups=factor, rollouts=4, turns=4, tokens=1_200, arrays=True)
        advantages = compute_advantages(groups)
        lengths = ragged_rows(groups).lengths
        runs[f"assemble_training_data, {name}"] = partial(
            assemble_training_data, groups, advantages
        )
        runs[f"pack, {name}"] = partial(pack_all, groups)
        tokens |= dict.fromkeys(list(runs)[-2:], int(lengths.sum()))
    times = measure(runs, options.repeats)
    for kind in ("assemble_training_data", "pack"):
        names = [name for name in runs if name.startswith(kind)]
        rates = []
        for name in names:
            rates.append(rate_line(name, tokens[name], times[name]))
            print()
        figure = " → ".join(f"{rate / 1e6:.1f}" for rate in rates)
        sizes = ", ".join(name.partition(", ")[2] for name in names)
        conclude(f"`{kind}`, Mtok/s at {sizes} the work", figure, "level or rising: linear")


def grow_rollout(options: Any) -> None:
    """Time one rollout of more and more turns."""
    with tempfile.TemporaryDirectory() as scratch:
        runs, tokens, sizes = {}, {}, {}
        for kind, counts in TURNS.items():
            for turns in counts[:1] if options.quick else counts:
                name = f"{kind}, {turns} turns"
                directory = Path(scratch) / name
                shape = Shape(turns, generated=100)
                write_captures(directory, 1, shape, delta=kind == "deltas")
                runs[name] = partial(build, directory, turns)
                tokens[name] = shape.tokens
                sizes[name] = (directory / "0-0.tokens.jsonl").stat().st_size
        times = measure(runs, options.repeats)
    for kind in TURNS:
        names = [name for name in runs if name.startswith(kind)]
        rates = []
        for name in names:
            rate = rate_line(name, tokens[name], times[name])
            bytes_rate = sizes[name] / times[name][0]
            print(f"{sizes[name] / 1e6:8.2f}{bytes_rate / 1e6:7.0f}")
            rates.append(rate if kind == "deltas" else bytes_rate)
        unit = "Mtok/s" if kind == "deltas" else "MB/s"
        figure = " → ".join(f"{rate / 1e6:.{1 if kind == 'deltas' else 0}f}" for rate in rates)
        counts = ", ".join(name.split()[-2] for name in names)
        meaning = {
            "deltas": "falls where the digests take over, each of which covers its whole sequence",
            "whole prompts": "level or rising: linear in the bytes",
        }[kind]
        conclude(f"one rollout, {kind}, {unit} at {counts} turns", figure, meaning)


def rate_line(name: str, tokens: int, times: tuple[float, float]) -> float:
    """Print the beginning of a line; return tokens per second."""
    median, least = times
    cell = f"{median * 1e3:.2f} ({least * 1e3:.2f})"
    print(f"{name:32}{tokens:12,}{cell:>20}{tokens / median / 1e6:9.2f}", end="")
    return tokens / median


def pack_all(groups: list[Any]) -> None:
    """Pack and wait for it."""
    jax.block_until_ready(pack(groups))


def build(directory: Path, turns: int) -> None:
    """Build the one rollout in a directory."""
    built = build_from_directories("0-0", [directory])
    assert len(built.spans) == turns, built.error


if __name__ == "__main__":
    main()
