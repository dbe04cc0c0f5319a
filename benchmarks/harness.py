"""What every benchmark shares: seeded rollouts at three scales, interleaved timing, versions."""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version

import numpy as np

import evsys_jax
from evsys_jax.rollouts import Trajectory, TrajectoryGroup, Turn

SCALES = {
    "few long": {"groups": 4, "rollouts": 4, "turns": 4, "tokens": 16_000},
    "balanced": {"groups": 32, "rollouts": 8, "turns": 4, "tokens": 1_200},
    "many short": {"groups": 256, "rollouts": 16, "turns": 1, "tokens": 150},
}
"""`balanced` is 256 rollouts of 4 turns, about 1,200 tokens a row."""

TINY = {name: {"groups": 2, "rollouts": 2, "turns": 2, "tokens": 60} for name in SCALES}
"""All alike, so that a trial run compiles little."""


def arguments(question: str | None, repeats: int = 7, **flags: str) -> argparse.Namespace:
    """Read the options that every benchmark has: `repeats`, and `quick` for a trial run.

    Args:
      question: the benchmark's docstring.
      repeats: the default.
      **flags: further switches, name to help.
    """
    parser = argparse.ArgumentParser(description=(question or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--quick", action="store_true", help="tiny data, one repeat: no figures")
    for name, meaning in flags.items():
        parser.add_argument(f"--{name}", action="store_true", help=meaning)
    parsed = parser.parse_args()
    parsed.repeats = 1 if parsed.quick else parsed.repeats
    return parsed


def conclude(measure: str, figure: str, meaning: str) -> None:
    """Print one row of the table of results in README.md."""
    print(f"| {measure} | {figure} | {meaning} |")


def make_groups(
    *, groups: int, rollouts: int, turns: int, tokens: int, arrays: bool, seed: int = 0
) -> list[TrajectoryGroup]:
    """Make rollouts whose rows have `tokens` tokens or some more, about a fifth of them sampled."""
    rng = np.random.default_rng(seed)
    return [
        TrajectoryGroup(
            [
                Trajectory(_turns(rng, turns, tokens, arrays), float(rng.integers(0, 2)))
                for _ in range(rollouts)
            ]
        )
        for _ in range(groups)
    ]


def _turns(rng: np.random.Generator, turns: int, tokens: int, arrays: bool) -> list[Turn]:
    total = int(tokens * rng.uniform(1.2, 2.0))
    chain = rng.integers(0, 150_000, total).astype(np.int32)
    scores = -rng.exponential(size=total).astype(np.float32)
    edges = np.sort(rng.choice(np.arange(1, total), 2 * turns - 1, replace=False))
    made = []
    for start, end in zip(edges[::2], np.append(edges[1::2], total), strict=True):
        fields = chain[:start], chain[start:end], scores[start:end]
        made.append(Turn(*(field if arrays else field.tolist() for field in fields)))
    return made


def measure(
    contenders: dict[str, Callable[[], object]], repeats: int = 7
) -> dict[str, tuple[float, float]]:
    """Time functions in turn, so that a noisy minute hits all of them alike.

    Returns:
      Name to (median, minimum) seconds; the first call of each is warm-up and not counted.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for function in contenders.values():
        function()
    for _ in range(repeats):
        for name, function in contenders.items():
            gc.collect()
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return {name: (statistics.median(values), min(values)) for name, values in times.items()}


def describe(*packages: str) -> str:
    """Name the machine, the device and the versions that a figure belongs to.

    Where jax is not among the packages it is not loaded, and no device is in play.
    """
    device = ""
    if "jax" in packages:
        import jax

        first = jax.devices()[0]
        device = f" JAX on {first.platform} ({first.device_kind}),"
    versions = " ".join(f"{package} {version(package)}" for package in packages)
    return (
        f"{platform.machine()}, {os.cpu_count()} cores,{device} Python"
        f" {platform.python_version()}, evsys_jax {evsys_jax.__version__} {versions}"
    )
