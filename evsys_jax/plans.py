"""Plans made on the host: which rows go into one batch, so that shapes stay few."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Layout: TypeAlias = Literal["padded", "packed"]
Item = TypeVar("Item")

MIN_ROWS = 8
MIN_WIDTH = 32
MIN_SEGMENTS = 8
MIN_TABLE = 2**10
MAX_POSITIONS = 2**20
"""Padded positions on the device at a time, where a whole run goes through: about 25 MB."""


def bucket(count: int, minimum: int) -> int:
    """Round a size up to a power of two, at least `minimum`."""
    return max(minimum, 1 << max(count - 1, 0).bit_length())


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


def plan_slots(positions: NDArray[np.integer], width: int, layout: Layout) -> NDArray[np.int64]:
    """Give every row that fits a place in some batch row.

    Args:
      positions: [R] positions of each row; rows longer than `width` get no place.
      width: T.
      layout: "padded" for one row per batch row, in order; "packed" for first-fit decreasing.

    Returns:
      [B, S] row indices, -1 where there is none. Packed, S is rounded up to a power of two.
    """
    fitting = np.flatnonzero(positions <= width)
    if layout == "padded":
        return fitting[:, None]
    bins = first_fit_decreasing(positions[fitting], width)
    most = bucket(max((len(rows) for rows in bins), default=1), MIN_SEGMENTS)
    slots = np.full((len(bins), most), -1, np.int64)
    for b, rows in enumerate(bins):
        slots[b, : len(rows)] = fitting[rows]
    return slots


def pad_slots(slots: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    """Add empty batch rows to [B, S] slots, up to `rows`."""
    return np.pad(slots, [(0, rows - len(slots)), (0, 0)], constant_values=-1)


def first_fit_decreasing(sizes: NDArray[np.integer], capacity: int) -> list[list[int]]:
    """Pack items into bins: largest first, each into the first bin that has room.

    Uses at most 11/9 of the fewest bins possible, plus one (Johnson 1973). Bins of equal room are
    found by a tree of maxima, so that the plan takes about R log R steps.

    Args:
      sizes: [R] sizes, each at most `capacity`.
      capacity: of every bin.

    Returns:
      The items of each bin, in the order in which they came in.
    """
    leaves = bucket(len(sizes), 1)
    room = [capacity] * (2 * leaves)  # heap order: node i has children 2i and 2i + 1
    bins: list[list[int]] = []
    for item in np.argsort(-sizes.astype(np.int64), kind="stable").tolist():
        size, node = int(sizes[item]), 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= size else 2 * node + 1
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(item)
        room[node] -= size
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def one_ahead(items: Iterable[Item]) -> Iterator[Item]:
    """Yield items, each after the next one has been asked for.

    So a device works on the next batch while the host looks at this one.
    """
    stream = iter(items)
    for waiting in stream:
        for following in stream:
            yield waiting
            waiting = following
        yield waiting
