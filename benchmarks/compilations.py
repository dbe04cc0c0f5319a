"""How many programs does a stream of ragged batches compile in `pack`?

300 batches from one seed. In each, the count of groups, of rollouts a group and of turns a rollout
is drawn evenly, and the longest row log-evenly; a row has between a quarter of that and all of
it. The stream of one training run draws 24 to 32 groups of 6 to 8 rollouts, 2 to 4 turns, and
512 to 2,048 tokens in the longest row; the wild stream 1 to 32 groups of 1 to 8, 1 to 4 turns,
64 to 2,048 tokens. Counted are the programs that XLA compiles for whatever reason.

Run: python benchmarks/compilations.py
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from harness import arguments, conclude, describe

from evsys_jax import Trajectory, TrajectoryGroup, Turn, pack

COMPILED = "/jax/core/compile/backend_compile_duration"
STREAMS = {
    "one run": {"groups": (24, 32), "rollouts": (6, 8), "turns": (2, 4), "longest": (512, 2_048)},
    "wild": {"groups": (1, 32), "rollouts": (1, 8), "turns": (1, 4), "longest": (64, 2_048)},
}


def main() -> None:
    """Print one line per stream and layout."""
    options = arguments(__doc__)
    count = 3 if options.quick else 300
    print(describe("jax", "numpy"))
    print(f"{count} batches")
    print(f"{'':10}{'layout':8}{'rows':>12}{'longest row':>14}{'programs':>10}{'compiling':>11}")
    programs: list[float] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: programs.append(seconds) if event == COMPILED else None
    )
    counts = []
    for name, stream in STREAMS.items():
        for layout in ("padded", "packed"):
            jax.clear_caches()
            programs.clear()
            random = np.random.default_rng(0)
            rows, longest = set(), set()
            for _ in range(count):
                groups = make_batch(random, stream)
                turns = [turn for group in groups for t in group.trajectories for turn in t.turns]
                rows.add(len(turns))
                longest.add(max(len(t.prompt_tokens) + len(t.completion_tokens) for t in turns))
                jax.block_until_ready(pack(groups, layout=layout))
            counts.append(len(programs))
            print(f"{name:10}{layout:8}{min(rows):6,}-{max(rows):5,}", end="")
            print(f"{min(longest):8,}-{max(longest):5,}{len(programs):10}", end="")
            print(f"{sum(programs):10.2f}s")
    names = ", ".join(f"{name} {layout}" for name in STREAMS for layout in ("padded", "packed"))
    conclude(
        f"programs compiled for {count} ragged batches: {names}",
        ", ".join(map(str, counts)),
        "every other batch runs at once",
    )


def make_batch(random: np.random.Generator, stream: dict[str, tuple[int, int]]) -> list[Any]:
    """Draw one batch of a stream."""

    def between(name: str) -> int:
        low, high = stream[name]
        return int(random.integers(low, high + 1))

    low, high = stream["longest"]
    longest = int(np.exp(random.uniform(np.log(low), np.log(high))))
    groups, rollouts, turns = between("groups"), between("rollouts"), between("turns")

    def make_turn() -> Turn:
        tokens = int(random.integers(longest // 4, longest + 1))
        sampled = max(1, tokens // 4)
        return Turn(
            np.ones(tokens - sampled, np.int32),
            np.ones(sampled, np.int32),
            np.zeros(sampled, np.float32),
        )

    return [
        TrajectoryGroup(
            [
                Trajectory([make_turn() for _ in range(turns)], float(random.integers(0, 2)))
                for _ in range(rollouts)
            ]
        )
        for _ in range(groups)
    ]


if __name__ == "__main__":
    main()
