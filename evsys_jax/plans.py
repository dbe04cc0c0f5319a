"""Plans made on the host: which rows go into one batch, so that shapes stay few."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MIN_ROWS = 8
MIN_WIDTH = 32


def bucket(count: int, minimum: int) -> int:
    """Round a size up to a power of two, at least `minimum`."""
    return max(minimum, 1 << max(count - 1, 0).bit_length())


def by_width(positions: NDArray[np.integer], max_positions: int) -> list[NDArray[np.int64]]:
    """Split rows into batches of similar width, each within a budget of padded positions.

    Rows that round up to the same width stay in order and share full batches of one shape, so
    that one long row does not make padding of all the short ones.

    Args:
      positions: [R] positions of each row.
      max_positions: B * T of a batch at most, where one row alone does not exceed it.

    Returns:
      One [K] array of row indices per batch; every row in exactly one.
    """
    if not len(positions):
        return []
    exponents = np.ceil(np.log2(np.maximum(positions, MIN_WIDTH))).astype(np.int64)
    order = np.argsort(exponents, kind="stable")
    widths, starts = np.unique(exponents[order], return_index=True)
    batches = []
    for exponent, members in zip(widths.tolist(), np.split(order, starts[1:]), strict=True):
        rows = max(1, max_positions >> exponent)
        batches += [members[i : i + rows] for i in range(0, len(members), rows)]
    return batches


def in_order(positions: NDArray[np.integer], max_positions: int) -> list[slice]:
    """Split rows into batches of consecutive rows, each within a budget of padded positions.

    Args:
      positions: [R] positions of each row.
      max_positions: B * T of a batch at most, both rounded up, where one row alone does not
        exceed it.

    Returns:
      Slices that together cover all rows, in order.
    """
    batches, first, widest = [], 0, 0
    for r, size in enumerate(positions.tolist()):
        width = bucket(max(widest, size), MIN_WIDTH)
        if r > first and bucket(r - first + 1, MIN_ROWS) * width > max_positions:
            batches.append(slice(first, r))
            first, widest = r, 0
        widest = max(widest, size)
    if first < len(positions):
        batches.append(slice(first, len(positions)))
    return batches
