"""How far is the jitted part of `pack` from the memory it has to move?

Its inputs lie on the device before the clock starts. It is compared with one jitted elementwise
pass over its own outputs (`x + 1`, `~x` on bools), and with the bytes that it must move at least
(every flat token read once, every output written once) over the bandwidth of a numpy copy. A
jitted copy is slower than that one where its output is new memory from the system.

Run: python benchmarks/pack.py [--repeats 15]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from harness import SCALES, TINY, arguments, conclude, describe, make_groups, measure

from evsys_jax import batch, ragged_rows

LAYOUTS = ("padded", "packed")


def main() -> None:
    """Print one line per scale and layout."""
    options = arguments(__doc__, repeats=15)
    print(describe("jax", "numpy"))
    bandwidth = copy_bandwidths(2**12 if options.quick else 2**26, options.repeats)
    print(", ".join(f"{name} copy {rate / 1e9:.1f} GB/s" for name, rate in bandwidth.items()))
    print(f"median (minimum) of {options.repeats} interleaved repeats, in ms")
    print(f"{'':12}{'layout':8}{'B':>6}{'T':>7}{'real':>6}{'pack':>16}{'pass':>16}", end="")
    print(f"{'ratio':>7}{'of min':>8}{'floor':>8}{'pack/floor':>12}{'compile':>9}")
    ratios: dict[str, list[str]] = {layout: [] for layout in LAYOUTS}
    for name, scale in (TINY if options.quick else SCALES).items():
        rows = ragged_rows(make_groups(**scale, arrays=True))
        for layout in LAYOUTS:
            run, moved, compiling = jitted_part(rows, layout)
            made = run()
            over_outputs = partial(touch_all, made)
            times = measure({"pack": run, "pass": over_outputs}, options.repeats)
            ratio, least = (a / b for a, b in zip(times["pack"], times["pass"], strict=True))
            floor = moved / bandwidth["numpy"]
            ratios[layout].append(f"{ratio:.2f}x")
            b, t = made.shape
            real = int((rows.lengths - 1).sum()) / (b * t)
            cells = {key: f"{a * 1e3:.2f} ({c * 1e3:.2f})" for key, (a, c) in times.items()}
            print(f"{name:12}{layout:8}{b:6,}{t:7,}{real:6.0%}{cells['pack']:>16}", end="")
            print(f"{cells['pass']:>16}{ratio:7.2f}{least:8.2f}{floor * 1e3:8.2f}", end="")
            print(f"{times['pack'][0] / floor:12.1f}{compiling:8.2f}s")
    for layout, values in ratios.items():
        conclude(
            f"jitted part of `pack`, {layout}: {', '.join(SCALES)}",
            ", ".join(values),
            "time over one elementwise pass over its own outputs",
        )


def jitted_part(rows: Any, layout: str) -> tuple[Callable[[], Any], int, float]:
    """Let `pack` plan and lay on the host, and keep what it hands to its one jitted function.

    Returns:
      The call, with everything on the device; bytes that it must move; seconds of compilation.
    """
    calls = []
    with mock.patch.object(batch, "_pack", lambda *given, **static: calls.append((given, static))):
        batch.pack(rows, layout=layout)
    ((given, static),) = calls
    with jax.enable_x64(True):
        given = jax.device_put(given)
        start = time.perf_counter()
        batch._pack.lower(*given, **static).compile()
        compiling = time.perf_counter() - start

    def run() -> Any:
        with jax.enable_x64(True):
            return jax.block_until_ready(batch._pack(*given, **static))

    moved = (rows.tokens, rows.sampled, rows.logprobs, *jax.tree.leaves(run()))
    return run, sum(values.nbytes for values in moved), compiling


def touch_all(made: Any) -> Any:
    """Read and write every array once, on the device."""
    return jax.block_until_ready(_touch(made))


@jax.jit
def _touch(made: Any) -> Any:
    return jax.tree.map(lambda x: ~x if x.dtype == bool else x + 1, made)


def copy_bandwidths(size: int, repeats: int) -> dict[str, float]:
    """Measure bytes per second, read and written, of copying `size` int32."""
    source = np.ones(size, np.int32)
    target = np.ones(size, np.int32)
    on_device = jax.device_put(source)
    copy = jax.jit(jnp.copy)
    times = measure(
        {
            "numpy": lambda: np.copyto(target, source),
            "jitted": lambda: jax.block_until_ready(copy(on_device)),
        },
        repeats,
    )
    return {name: 2 * source.nbytes / median for name, (median, _) in times.items()}


if __name__ == "__main__":
    main()
