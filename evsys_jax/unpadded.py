"""Rows end to end, shifted as one long row: the way to Datums, which need no padding.

A batch that stays on the device has one shape, so `evsys_jax.batch` pads its rows. What goes
straight back to the host is cut into views there, and padding would only be carried along.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from evsys_jax.plans import bucket, one_ahead
from evsys_jax.ragged import RaggedRows
from evsys_jax.targets import shift_row

RUN_POSITIONS = 2**17
"""Positions that go to the device at a time, a few MB: they stay in a cache, and the next ones
are worked on while these are made into Datums."""

MIN_RUN = 2**10
"""Shorter runs are not worth another shape."""


class Run(NamedTuple):
    """Consecutive rows, target-aligned, with P positions from the first row's to the last's.

    Args:
      rows: the K rows.
      begins: [K] where each row's positions begin among the P; one that belongs to no row lies
        between two rows.
      target_tokens: [P] int64.
      logprobs: [P] float32; 0 off the mask.
      advantages: [P] float32; 0 off the mask.
    """

    rows: range
    begins: list[int]
    target_tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]


def iter_runs(rows: RaggedRows, advantages: NDArray[np.floating]) -> Iterator[Run]:
    """Shift and mask all rows, in order, some of them at a time.

    Args:
      rows: what `ragged_rows` returns. The device may read its arrays until the last run is out.
      advantages: [N] one finite float32 per trajectory.

    Yields:
      Runs that together cover every row once. Their arrays are writable and nobody else's.
    """
    by_row = advantages.astype(np.float32)[rows.row_trajectory]
    for part, shifted in one_ahead(_dispatched(rows, by_row)):
        begins = rows.offsets[part.start : part.stop]
        size = int(rows.offsets[part.stop] - begins[0]) - 1
        target_tokens, logprobs, values = (np.asarray(field)[:size] for field in shifted)
        yield Run(
            part,
            (begins - begins[0]).tolist(),
            np.array(target_tokens, np.int64),
            np.array(logprobs),
            np.array(values),
        )


def _dispatched(
    rows: RaggedRows, by_row: NDArray[np.float32]
) -> Iterator[tuple[range, tuple[jax.Array, jax.Array, jax.Array]]]:
    """Hand rows to the device, as many as there is room for, and at least one."""
    first = 0
    while first < len(rows):
        start = int(rows.offsets[first])
        fitting = np.searchsorted(rows.offsets, start + RUN_POSITIONS + 1, side="right") - 1
        part = range(first, max(int(fitting), first + 1))
        first = part.stop
        width = bucket(int(rows.offsets[first]) - start - 1, MIN_RUN)
        counts = rows.lengths[part.start : part.stop]
        behind = width + 1 - int(counts.sum())
        own = np.repeat(
            np.append(by_row[part.start : part.stop], np.float32(0)), np.append(counts, behind)
        )
        flat = (rows.tokens, rows.sampled, rows.logprobs)
        yield part, _shift(*(_cut(values, start, width + 1) for values in flat), own, width=width)


def _cut(values: NDArray[Any], start: int, size: int) -> NDArray[Any]:
    """Return `size` values from `start` on, a view where there are so many."""
    if start + size <= len(values):
        return values[start : start + size]
    out = np.zeros(size, values.dtype)
    out[: len(values) - start] = values[start:]
    return out


@partial(jax.jit, static_argnames=("width",))
def _shift(
    tokens: jax.Array,
    sampled: jax.Array,
    logprobs: jax.Array,
    advantages: jax.Array,
    *,
    width: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Run the kernel of a row on many rows end to end; [width + 1] each in, [width] out."""
    # Of use only where jit is disabled, when numpy arrays would come in as they are.
    tokens, sampled, logprobs = (jnp.asarray(flat) for flat in (tokens, sampled, logprobs))
    row = shift_row(
        tokens,
        sampled,
        logprobs,
        jnp.asarray(advantages),
        jnp.int32(0),
        jnp.int32(width + 1),
        jnp.int32(0),
        width=width,
    )
    return row.target_tokens, row.logprobs, row.advantages
