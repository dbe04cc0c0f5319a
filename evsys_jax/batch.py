"""`TokenBatch`, the padded batch on the device, and `pack`, the only jit and vmap.

Shapes are few: rows and positions are rounded up to powers of two, so that a stream of ragged
batches compiles a handful of programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from evsys_jax import reference
from evsys_jax.advantages import centre, group_advantages
from evsys_jax.plans import MIN_ROWS, MIN_WIDTH, bucket
from evsys_jax.ragged import RaggedRows, RowKind, TrajectoryTable, ragged_rows
from evsys_jax.targets import RowTargets, shift_row

MIN_FLAT = 2**18
"""Flat buffers below this many tokens are not worth another shape."""

Array: TypeAlias = jax.Array | NDArray[Any]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "input_tokens",
        "target_tokens",
        "logprobs",
        "advantages",
        "mask",
        "positions",
        "segment_ids",
        "segment_lengths",
        "segment_group",
        "segment_trajectory",
        "segment_turn",
        "segment_row",
    ],
    meta_fields=["wire_mask"],
)
@dataclass(frozen=True, eq=False)
class TokenBatch:
    """B rows of T positions, each target-aligned; S segments (sequences) a row. A pytree.

    Args:
      input_tokens: [B, T] int32.
      target_tokens: [B, T] int32, the token after the input.
      logprobs: [B, T] float32, the sampler's log-probability of the target; 0 off the mask.
      advantages: [B, T] float32; 0 off the mask, and may be 0 on it.
      mask: [B, T] bool, True: the target was sampled and trains.
      positions: [B, T] int32, restart at 0 in every segment; 0 in padding.
      segment_ids: [B, T] int32, from 1 in each row; 0 is padding.
      segment_lengths: [B, S] int32, positions of each segment; 0 where there is none.
      segment_group: [B, S] int32, the group it comes from; -1 where there is none.
      segment_trajectory: [B, S] int32, the trajectory in that group; -1 where there is none.
      segment_turn: [B, S] int32, the (first) turn in that trajectory; -1 where there is none.
      segment_row: [B, S] int32, its place in the order of the rows; -1 where there is none.
      wire_mask: static; key and dtype of the mask in the Datums that this batch was made from.
    """

    input_tokens: Array
    target_tokens: Array
    logprobs: Array
    advantages: Array
    mask: Array
    positions: Array
    segment_ids: Array
    segment_lengths: Array
    segment_group: Array
    segment_trajectory: Array
    segment_turn: Array
    segment_row: Array
    wire_mask: tuple[str, str] | None = field(default=None)

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)."""
        rows, width = self.mask.shape
        return rows, width


def pack(
    groups_or_rows: Sequence[Any] | RaggedRows,
    *,
    rows: RowKind = "turns",
    normalize: bool = True,
    advantages: Sequence[Any] | None = None,
    width: int | None = None,
    pad_token: int = 0,
    drop_constant: bool = False,
) -> TokenBatch:
    """Make one padded batch: advantages, shift, mask and padding in one jitted call.

    Args:
      groups_or_rows: [G] groups (see `evsys_jax.rollouts`), or what `ragged_rows` made of them.
      rows: "turns" or "merged", as in `ragged_rows`; of no effect on rows that are made already.
      normalize: subtract the mean of each group's voters; False takes the rewards as they are.
      advantages: None; or one number per trajectory as nested lists [G][N_g]; or one 1-D array
        per row, of one float32 per position (a row of n tokens has n - 1). Wins over `normalize`.
        Off the mask they are set to zero.
      width: T, the positions of a batch row; None takes the longest row's, rounded up.
      pad_token: fills `input_tokens` and `target_tokens` in padding. Nothing depends on it.
      drop_constant: as in `ragged_rows`; of no effect on rows that are made already.

    Returns:
      A `TokenBatch` on JAX's default device, rows in their given order, S = 1, filler last.

    Raises:
      ValueError: what `ragged_rows` raises; a row longer than `width`, named; advantages that
        don't match the groups or rows, or are not finite float32.
    """
    ragged = (
        groups_or_rows
        if isinstance(groups_or_rows, RaggedRows)
        else ragged_rows(groups_or_rows, rows=rows, drop_constant=drop_constant)
    )
    token_advantages, scalars, kept = _advantage_inputs(ragged, advantages, normalize)
    batch_rows = bucket(len(ragged), MIN_ROWS)
    positions = _padded_width(ragged, width)
    flat = _pad_flat(ragged, token_advantages, batch_rows, positions)
    index = np.full((4, batch_rows), -1, np.int32)
    index[:, : len(ragged)] = (
        ragged.group,
        ragged.trajectory,
        ragged.turn,
        np.arange(len(ragged)),
    )
    # The means are taken in float64, the one place that needs it, and only there.
    with jax.enable_x64(True):
        batch: TokenBatch = _pack(
            *flat,
            _padded(ragged.offsets[:-1], batch_rows, np.int32),
            _padded(ragged.lengths, batch_rows, np.int32),
            _padded(ragged.row_trajectory, batch_rows, np.int32),
            # One size for everything counted in trajectories: fewer shapes, fewer programs.
            *_padded_members(ragged.table, scalars, kept, batch_rows),
            index,
            np.int32(pad_token),
            width=positions,
        )
    return batch


def trajectory_advantages(table: TrajectoryTable, *, normalize: bool) -> NDArray[np.float64]:
    """Compute the advantages of N trajectories in float64, with the kernel that `pack` runs.

    Args:
      table: the N trajectories.
      normalize: subtract the mean of each group's voters.

    Returns:
      [N] float64. Computed on the CPU backend where there is one, since not every accelerator
      has the float64 of IEEE 754.
    """
    centred, kept = centre(table, normalize=normalize)
    members = _padded_members(table, centred, kept, MIN_ROWS)
    with jax.enable_x64(True), jax.default_device(_float64_device()):
        return np.asarray(_group_advantages(*members))[: len(table)]


_group_advantages = jax.jit(group_advantages)


def _float64_device() -> jax.Device | None:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        return None


def _padded_members(
    table: TrajectoryTable,
    scalars: NDArray[np.float64],
    kept: NDArray[np.bool_],
    minimum: int,
) -> tuple[NDArray[Any], ...]:
    """Return scalars, votes, group ids from 0 without gaps, and kept, rounded up in size."""
    size = bucket(len(table), minimum)
    group_ids = np.unique(table.group, return_inverse=True)[1]
    return (
        _padded(scalars, size, np.float64),
        _padded(table.votes, size, np.bool_),
        _padded(group_ids, size, np.int32),
        _padded(kept, size, np.bool_),
    )


@partial(jax.jit, static_argnames=("width",))
def _pack(
    tokens: jax.Array,
    sampled: jax.Array,
    logprobs: jax.Array,
    token_advantages: jax.Array | None,
    starts: jax.Array,
    lengths: jax.Array,
    row_trajectory: jax.Array,
    centred: jax.Array,
    votes: jax.Array,
    group_ids: jax.Array,
    keeps_reward: jax.Array,
    index: jax.Array,
    pad_token: jax.Array,
    *,
    width: int,
) -> TokenBatch:
    """Compose the kernels: group means over [N], then one `shift_row` per batch row."""
    by_trajectory = group_advantages(centred, votes, group_ids, keeps_reward)
    by_row = by_trajectory.astype(jnp.float32)[row_trajectory]

    def one_row(start: jax.Array, length: jax.Array, advantage: jax.Array) -> RowTargets:
        def cut(flat: jax.Array) -> jax.Array:
            return lax.dynamic_slice(flat, (start,), (width + 1,))

        own = advantage if token_advantages is None else cut(token_advantages)
        # Without the barrier XLA fuses the slices into each of the seven outputs and makes them
        # again for every one, at three times the cost.
        windows = (cut(tokens), cut(sampled), cut(logprobs))
        window_tokens, window_sampled, window_logprobs = lax.optimization_barrier(windows)
        return shift_row(window_tokens, window_sampled, window_logprobs, own, length, pad_token)

    targets = jax.vmap(one_row)(starts, lengths, by_row)
    group, trajectory, turn, row = index[:, :, None]
    return TokenBatch(
        **targets._asdict(),
        segment_lengths=jnp.maximum(lengths - 1, jnp.int32(0))[:, None],
        segment_group=group,
        segment_trajectory=trajectory,
        segment_turn=turn,
        segment_row=row,
    )


def _padded_width(rows: RaggedRows, width: int | None) -> int:
    """Return T: the width asked for if every row fits, else the longest row's bucket."""
    positions = rows.lengths - 1
    if width is None:
        return bucket(int(positions.max(initial=0)), MIN_WIDTH)
    if width < 1:
        raise ValueError(f"width={width} holds no position")
    too_long = np.flatnonzero(positions > width)
    if len(too_long):
        r = int(too_long[0])
        raise ValueError(
            f"row {r} (group {rows.group[r]}, trajectory {rows.trajectory[r]}, turn"
            f" {rows.turn[r]}) is too long: {positions[r]} positions > width {width}"
        )
    return width


def _advantage_inputs(
    rows: RaggedRows, advantages: Sequence[Any] | None, normalize: bool
) -> tuple[NDArray[np.float32] | None, NDArray[np.float64], NDArray[np.bool_]]:
    """Return advantages per token [L] or None, and numbers per trajectory [N] to centre or keep."""
    table = rows.table
    everyone, nothing = np.ones(len(table), bool), np.zeros(len(table))
    if advantages is None and rows.advantages is not None:
        return rows.advantages, nothing, everyone
    if advantages is None:
        centred, kept = centre(table, normalize=normalize)
        large = table.trains & ~(np.abs(centred) < reference.FLOAT32_LIMIT / np.where(kept, 1, 2))
        if large.any():
            n = int(np.flatnonzero(large)[0])
            raise ValueError(
                f"group {table.group[n]}, trajectory {table.place[n]}: reward"
                f" {table.rewards[n]} gives no finite float32 advantage"
            )
        return None, centred, kept
    if len(advantages) and all(hasattr(item, "ndim") and item.ndim for item in advantages):
        return _per_token(rows, advantages), nothing, everyone
    members = np.split(table.trains, np.cumsum(table.group_sizes)[:-1])
    trains = [part.tolist() for part in members] if len(table.group_sizes) else []
    reference.check_advantages(advantages, trains)
    given = np.array([float(a) for group in advantages for a in group], np.float64)
    return None, np.where(table.trains, given, 0.0), everyone


def _per_token(rows: RaggedRows, advantages: Sequence[Any]) -> NDArray[np.float32]:
    """Lay one array per row, per position, over the tokens that the positions predict."""
    if len(advantages) != len(rows):
        raise ValueError(f"{len(rows)} rows but {len(advantages)} arrays of advantages")
    flat = np.zeros(len(rows.tokens), np.float32)
    for r, (given, start, length) in enumerate(
        zip(advantages, rows.offsets[:-1].tolist(), rows.lengths.tolist(), strict=True)
    ):
        array = np.asarray(given)
        if array.shape != (length - 1,):
            raise ValueError(
                f"row {r}: {length - 1} positions but advantages of shape {array.shape}"
            )
        with np.errstate(over="ignore"):  # an infinity is named below
            flat[start + 1 : start + length] = array
    if not np.isfinite(flat).all():
        at = int(np.flatnonzero(~np.isfinite(flat))[0])
        r = int(np.searchsorted(rows.offsets, at, side="right")) - 1
        raise ValueError(f"row {r}: advantages[{at - rows.offsets[r] - 1}] is not a finite float32")
    return flat


def _pad_flat(
    rows: RaggedRows, token_advantages: NDArray[np.float32] | None, batch_rows: int, width: int
) -> tuple[NDArray[Any] | None, ...]:
    """Return the flat arrays with room behind them, so that the last slice is never clamped.

    The size is the batch's own, halved while it is large and the tokens fit: few shapes, and no
    more than twice the bytes that have to be moved. What lies behind the tokens stays unset, since
    it is masked.
    """
    needed = len(rows.tokens) + width + 1
    size = (batch_rows + 1) * (width + 1)
    while size > MIN_FLAT and size // 2 >= needed:
        size //= 2
    flat = (rows.tokens, rows.sampled, rows.logprobs, token_advantages)
    return tuple(None if array is None else _extended(array, size) for array in flat)


def _extended(array: NDArray[Any], size: int) -> NDArray[Any]:
    out = np.empty(size, array.dtype)
    out[: len(array)] = array
    return out


def _padded(array: NDArray[Any], size: int, dtype: Any) -> NDArray[Any]:
    out = np.zeros(size, dtype)
    out[: len(array)] = array
    return out
