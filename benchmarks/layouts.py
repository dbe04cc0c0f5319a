"""What do padded and packed rows cost on the device?

Padded, T is the longest row's positions, rounded up; packed, it is at least 4,096, as a trainer's
context would be. Counted are the share of real positions, the bytes of the batch, the time of
`pack` from ragged host rows to the device, and that of loss and gradient: the learner's logprobs
are an elementwise function of the tokens with two parameters, so that the time is the loss's own.
A model's time would grow with B * T.

Run: python benchmarks/layouts.py [--repeats 7]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from harness import SCALES, TINY, arguments, conclude, describe, make_groups, measure

from evsys_jax import TokenBatch, losses, pack, ragged_rows
from evsys_jax.ragged import RaggedRows

CONTEXT = 4_096
LOSSES = {
    "ppo": losses.ppo,
    "gspo": partial(losses.gspo, clip_low_threshold=0.9, clip_high_threshold=1.1),
}


def main() -> None:
    """Print one line per scale and layout."""
    options = arguments(__doc__)
    print(describe("jax", "numpy"))
    print(f"median (minimum) of {options.repeats} interleaved repeats, in ms")
    print(f"{'':12}{'layout':8}{'B':>6}{'T':>7}{'S':>4}{'real':>6}{'MB':>7}{'pack':>18}", end="")
    print("".join(f"{name + ' + gradient':>18}" for name in LOSSES), f"{'compile':>9}")
    figures: dict[str, list[str]] = {}
    for name, scale in (TINY if options.quick else SCALES).items():
        rows = ragged_rows(make_groups(**scale, arrays=True))
        padded = pack(rows)
        width = max(CONTEXT, padded.shape[1])
        runs: dict[str, Callable[[], Any]] = {}
        batches, compiling = {}, {}
        for layout, chosen in (("padded", None), ("packed", width)):
            start = time.perf_counter()
            batch = packed(rows, layout, chosen)
            runs[f"{layout} pack"] = partial(packed, rows, layout, chosen)
            for loss in LOSSES:
                run = runs[f"{layout} {loss}"] = partial(loss_and_gradient, loss, batch)
                run()
            batches[layout], compiling[layout] = batch, time.perf_counter() - start
        times = measure(runs, options.repeats)
        for layout, batch in batches.items():
            b, t = batch.shape
            real = int((rows.lengths - 1).sum()) / (b * t)
            size = sum(array.nbytes for array in jax.tree.leaves(batch))
            print(f"{name:12}{layout:8}{b:6,}{t:7,}{batch.segment_lengths.shape[1]:4}", end="")
            print(f"{real:6.0%}{size / 1e6:7.1f}", end="")
            for column in ("pack", *LOSSES):
                median, least = times[f"{layout} {column}"]
                cell = f"{median * 1e3:.2f} ({least * 1e3:.2f})"
                print(f"{cell:>18}", end="")
            print(f"{compiling[layout]:9.2f}s")
            figures.setdefault(layout, []).append(f"{real:.0%}")
    for layout, shares in figures.items():
        conclude(
            f"real positions, {layout}: {', '.join(SCALES)}",
            ", ".join(shares),
            "the rest is padding that a model computes for nothing",
        )


def packed(rows: RaggedRows, layout: Any, width: int | None) -> TokenBatch:
    """Pack and wait for it."""
    return jax.block_until_ready(pack(rows, layout=layout, width=width))


def loss_and_gradient(loss: str, batch: TokenBatch) -> Any:
    """Compute a loss and its gradient by two parameters."""
    return jax.block_until_ready(_value_and_grad(jnp.array([0.1, 0.5]), batch, loss=loss))


@partial(jax.jit, static_argnames="loss")
def _value_and_grad(parameters: jax.Array, batch: TokenBatch, *, loss: str) -> Any:
    def total(parameters: jax.Array) -> jax.Array:
        token = batch.target_tokens.astype(jnp.float32) * 1e-5
        learner = -jax.nn.softplus(parameters[0] * token + parameters[1])
        return LOSSES[loss](learner, batch)[0]

    return jax.value_and_grad(total)(parameters)


if __name__ == "__main__":
    main()
