"""A batch over several devices, and over several hosts: B rows along one axis of a mesh.

Everything that a loss adds up is then added up over all devices, by the compiler.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from evsys_jax.batch import Array, TokenBatch

Batch = TypeVar("Batch", bound=TokenBatch)

_INDICES = ("segment_group", "segment_trajectory", "segment_turn", "segment_row")


def shard(batch: Batch, mesh: Mesh, axis: str = "data") -> Batch:
    """Lay the rows of a batch over one axis of a mesh, in order, with filler where they don't fit.

    A row of filler has the mask off and segment 0 everywhere, lengths 0 and indices -1: nothing
    but the shape depends on it.

    Args:
      batch: B rows, on the host or any device of this process.
      mesh: devices; arrays are replicated along its other axes.
      axis: the mesh axis, of size D.

    Returns:
      The same rows in the same order, then -B mod D of filler. 0 rows stay 0.

    Raises:
      ValueError: the mesh has no such axis.
    """
    devices = _axis_size(mesh, axis)
    filled = _fill_rows(batch, -batch.shape[0] % devices)
    laid: Batch = jax.device_put(filled, NamedSharding(mesh, PartitionSpec(axis)))
    return laid


def unshard(batch: Batch) -> Batch:
    """Bring a batch back to the host without the rows that hold no segment.

    The inverse of `shard`, and it also takes away what `pack` filled its rows up with.

    Args:
      batch: B rows on any devices. On several hosts, each process gets the rows that it holds.

    Returns:
      The rows that hold something, in order; numpy arrays.
    """
    host = jax.tree.map(_local_rows, batch)
    keep = np.any(np.asarray(host.segment_lengths) > 0, axis=1)
    kept: Batch = jax.tree.map(lambda array: array[keep], host)
    return kept


def from_process_local(
    batch: Batch, mesh: Mesh, axis: str = "data", *, renumber_groups: bool = True
) -> Batch:
    """Make one global batch from the batches of all processes, each of which calls this.

    Each process packs its own groups and hands over its own rows; none of them moves to another
    host. So a group must not straddle hosts: its mean would be taken over a part of it. Where
    it has to, compute its advantages where the rewards are together and give them to
    `pack(..., advantages=...)` on each host.

    The processes agree on the shape first: every one contributes as many rows as the largest
    has, rounded up to the devices that it has on the axis, with filler as in `shard`.

    Args:
      batch: the rows of this process. T must be the same everywhere: give `pack` a width. S, which
        depends on the plan of a packed batch, is filled up to the largest.
      mesh: devices of all processes, the same mesh everywhere.
      axis: the mesh axis to lay the rows over.
      renumber_groups: each process has numbered its groups from 0, as `pack` does; add to
        `segment_group` the groups of the processes before it, so that no two share a number.
        False where the numbers are the same group's everywhere.

    Returns:
      The global batch: the rows of process 0, its filler, the rows of process 1 and so on.

    Raises:
      ValueError: the mesh has no such axis; T differs between processes, with the sizes.
    """
    _axis_size(mesh, axis)
    host = jax.tree.map(np.asarray, batch)
    groups = int(np.max(host.segment_group, initial=-1)) + 1
    own = np.array([*batch.shape, batch.segment_group.shape[1], groups], np.int32)
    sizes = np.reshape(multihost_utils.process_allgather(own), (-1, 4))
    if np.any(sizes[:, 1] != sizes[0, 1]):
        shapes = ", ".join(f"{p}: T={t}" for p, (_, t, _, _) in enumerate(sizes.tolist()))
        raise ValueError(f"processes disagree on the width of a row ({shapes})")
    host = _fill_segments(host, int(sizes[:, 2].max()))
    if renumber_groups:
        before = sizes[: jax.process_index(), 3].sum(dtype=np.int32)
        group = host.segment_group
        host = replace(host, segment_group=np.where(group < 0, group, group + before))
    devices = mesh.local_mesh.shape[axis]
    rows = -(-int(sizes[:, 0].max()) // devices) * devices
    filled = _fill_rows(host, rows - batch.shape[0])
    sharding = NamedSharding(mesh, PartitionSpec(axis))
    laid: Batch = jax.tree.map(
        lambda array: jax.make_array_from_process_local_data(sharding, array), filled
    )
    return laid


def _axis_size(mesh: Mesh, axis: str) -> int:
    if axis not in mesh.shape:
        raise ValueError(f"the mesh has axes {', '.join(map(repr, mesh.shape))}, not {axis!r}")
    return int(mesh.shape[axis])


def _fill_segments(batch: Batch, segments: int) -> Batch:
    """Add segments that hold nothing to every row of a host batch, up to S = `segments`."""
    added = [(0, 0), (0, segments - batch.segment_lengths.shape[1])]
    columns: dict[str, Any] = {
        name: np.pad(getattr(batch, name), added, constant_values=-1) for name in _INDICES
    }
    lengths = np.pad(batch.segment_lengths, added)
    filled: Batch = replace(batch, segment_lengths=lengths, **columns)
    return filled


def _fill_rows(batch: Batch, count: int) -> Batch:
    """Append rows that hold nothing; numpy arrays where any are appended."""
    if not count:
        return batch

    def fill(path: Any, array: Array) -> NDArray[Any]:
        value = -1 if path[-1].name in _INDICES else 0
        filler = np.full((count, *array.shape[1:]), value, array.dtype)
        return np.concatenate([np.asarray(array), filler])

    filled: Batch = jax.tree_util.tree_map_with_path(fill, batch)
    return filled


def _local_rows(array: Array) -> NDArray[Any]:
    """Return the rows that this process holds, in order and each once, on the host."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return np.asarray(array)
    # Where a second mesh axis replicates the rows, several shards begin at the same one.
    shards = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)])
