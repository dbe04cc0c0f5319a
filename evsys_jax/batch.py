"""`TokenBatch`, the batch on the device, and `pack`, which jits and vmaps the kernels of a row.

Shapes are few: rows and positions are rounded up to powers of two, so that a stream of ragged
batches compiles a handful of programs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from typing import Any, Literal, TypeAlias, cast

import chex
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from evsys_jax import checks
from evsys_jax.advantage_inputs import AdvantageInputs, advantage_inputs, padded_rewards
from evsys_jax.advantages import Baseline, Rewards, Scale, group_advantages
from evsys_jax.plans import (
    MAX_POSITIONS,
    MIN_ROWS,
    MIN_TABLE,
    MIN_WIDTH,
    Layout,
    bucket,
    in_order,
    one_ahead,
    pad_slots,
    plan_slots,
)
from evsys_jax.ragged import RaggedRows, RowKind, ragged_rows
from evsys_jax.targets import lay_segments, shift_row

Array: TypeAlias = jax.Array | NDArray[Any]
OverlongPolicy: TypeAlias = Literal["error", "mask"]

logger = logging.getLogger(__name__)


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

    def occupancy(self) -> dict[str, float]:
        """Count what the batch holds, on the host.

        Returns:
          `rows` that hold a segment, `segments`, real `positions`, and the `share` of real
          positions in those rows.
        """
        lengths = np.asarray(self.segment_lengths)
        rows = int((lengths.sum(axis=1) > 0).sum())
        positions = int(lengths.sum())
        share = positions / (rows * self.shape[1]) if rows else 0.0
        return {
            "rows": rows,
            "segments": int((lengths > 0).sum()),
            "positions": positions,
            "share": share,
        }


def pack(
    groups_or_rows: Sequence[Any] | RaggedRows,
    *,
    rows: RowKind = "turns",
    normalize: bool = True,
    advantages: Sequence[Any] | None = None,
    width: int | None = None,
    pad_token: int = 0,
    layout: Layout = "padded",
    overlong: OverlongPolicy = "error",
    baseline: Baseline | None = None,
    scale: Scale = "none",
    drop_constant: bool = False,
) -> TokenBatch:
    """Make one batch: advantages, shift, mask and padding in one jitted call.

    Args:
      groups_or_rows: [G] groups (see `evsys_jax.rollouts`), or what `ragged_rows` made of them.
      rows: "turns" or "merged", as in `ragged_rows`; of no effect on rows that are made already.
      normalize: subtract the mean of each group's voters; False takes the rewards as they are.
      advantages: None; or one number per trajectory as nested lists [G][N_g]; or one 1-D array
        per row, of one float32 per position (a row of n tokens has n - 1). Lists always mean
        trajectories. Wins over all that is said of rewards. Off the mask they are set to zero.
      width: T, the positions of a batch row; None takes the longest row's, rounded up.
      pad_token: fills `input_tokens` and `target_tokens` in padding. Nothing depends on it.
      layout: "padded" for one row per batch row; "packed" for as many as fit, each shifted before
        it is laid down, by first-fit decreasing. A row is never split.
      overlong: "error"; or "mask" to leave rows longer than `width` out, with a warning that
        counts them (`RaggedRows.without_overlong` keeps the account).
      baseline: "mean", "leave_one_out" or "none"; None goes by `normalize`. See
        `evsys_jax.advantages`.
      scale: "none", "group_std" or "batch_std".
      drop_constant: as in `ragged_rows`; of no effect on rows that are made already.

    Returns:
      A `TokenBatch` on JAX's default device; B is rounded up, with empty filler rows last.
      Padded: rows in their given order, S = 1. Packed: `segment_row` tells the order; `unpack`
      gives it back.

    Raises:
      ValueError: what `ragged_rows` raises; a row longer than `width`, named; advantages that
        don't match the groups or rows, or are not finite float32.
    """
    checks.check_choice("layout", layout, ("padded", "packed"))
    checks.check_choice("overlong", overlong, ("error", "mask"))
    ragged = (
        groups_or_rows
        if isinstance(groups_or_rows, RaggedRows)
        else ragged_rows(groups_or_rows, rows=rows, drop_constant=drop_constant)
    )
    inputs = advantage_inputs(
        ragged, advantages, baseline=_baseline(normalize, baseline), scale=scale
    )
    positions = ragged.lengths - 1
    width = _chosen_width(ragged, width, overlong)
    slots = plan_slots(positions, width, layout)
    slots = pad_slots(slots, bucket(len(slots), MIN_ROWS))
    return pack_slots(ragged, slots, inputs, width=width, pad_token=pad_token)


def iter_packed(
    rows: RaggedRows, max_positions: int = MAX_POSITIONS, **options: Any
) -> Iterator[tuple[RaggedRows, TokenBatch]]:
    """Pack rows in order, as many at a time as a budget of padded positions allows.

    Args:
      rows: what `ragged_rows` returns.
      max_positions: B * T of a batch at most, where one row alone does not exceed it.
      **options: of `pack`.

    Returns:
      An iterator over the rows of each batch, and the batch; one batch ahead of what is asked for.
    """

    def packed() -> Iterator[tuple[RaggedRows, TokenBatch]]:
        for part in in_order(rows.lengths - 1, max_positions):
            chosen = rows.take(np.arange(part.start, part.stop))
            yield chosen, pack(chosen, **options)

    return one_ahead(packed())


def microbatches(
    rows: RaggedRows,
    *,
    max_tokens: int,
    width: int | None = None,
    layout: Layout = "padded",
    normalize: bool = True,
    advantages: Sequence[Any] | None = None,
    baseline: Baseline | None = None,
    scale: Scale = "none",
    pad_token: int = 0,
) -> Iterator[TokenBatch]:
    """Yield batches of one shape under a token budget, with every row in exactly one of them.

    Args:
      rows: what `ragged_rows` returns. Group means are those of all its trajectories, whichever
        rows share a batch.
      max_tokens: B * T of each batch at most.
      width: T; None takes the longest row's positions, rounded up.
      layout: as in `pack`; "packed" plans over all rows at once.
      normalize, advantages, baseline, scale, pad_token: as in `pack`.

    Raises:
      ValueError: what `pack` raises, or a budget that is smaller than one batch row; when the
        first batch is asked for.
    """
    inputs = advantage_inputs(
        rows, advantages, baseline=_baseline(normalize, baseline), scale=scale
    )
    width = _chosen_width(rows, width, "error")
    if max_tokens < width:
        raise ValueError(f"max_tokens={max_tokens} holds no batch row of {width} positions")
    slots = plan_slots(rows.lengths - 1, width, layout)
    count = max(1, min(max_tokens // width, bucket(len(slots), MIN_ROWS)))
    for first in range(0, len(slots), count):
        part = pad_slots(slots[first : first + count], count)
        yield pack_slots(rows, part, inputs, width=width, pad_token=pad_token)


def _baseline(normalize: bool, baseline: Baseline | None) -> Baseline:
    chosen: Any = checks.choose_baseline(normalize, baseline)
    return cast(Baseline, chosen)


def _chosen_width(rows: RaggedRows, width: int | None, overlong: OverlongPolicy) -> int:
    """Return T: the width asked for if every row fits, else the longest row's bucket."""
    positions = rows.lengths - 1
    if width is None:
        return bucket(int(positions.max(initial=0)), MIN_WIDTH)
    if not isinstance(width, Integral) or width < 1:
        raise ValueError(f"width={width} is no number of positions")
    too_long = np.flatnonzero(positions > width)
    if len(too_long) and overlong == "mask":
        logger.warning("%d rows are longer than width %d and left out", len(too_long), width)
    elif len(too_long):
        r = int(too_long[0])
        raise ValueError(
            f"row {r} (group {rows.group[r]}, trajectory {rows.trajectory[r]}, turn"
            f" {rows.turn[r]}) is too long: {positions[r]} positions > width {width}"
        )
    return width


def pack_slots(
    rows: RaggedRows,
    slots: NDArray[np.int64],
    inputs: AdvantageInputs,
    *,
    width: int,
    pad_token: int,
) -> TokenBatch:
    """Lay planned rows down: `slots` [B, S] holds the row of each segment, -1 where there is none.

    The second half of `pack`, for plans made elsewhere.
    """
    used = slots >= 0
    chosen = np.where(used, slots, 0)

    def per_slot(values: NDArray[Any], filler: int) -> NDArray[np.int32]:
        taken = values[chosen] if len(values) else chosen
        return np.where(used, taken, filler).astype(np.int32)

    if not isinstance(pad_token, Integral) or not 0 <= pad_token < checks.TOKEN_LIMIT:
        raise ValueError(f"pad_token={pad_token} is no integer in [0, 2**31)")
    token_advantages, rewards, baseline, scale = inputs
    size = len(slots) * (width + slots.shape[1]) + width + 1
    # On a CPU nothing is moved, and what is not written takes no memory.
    shrink = jax.default_backend() != "cpu"
    flat, starts = rows.lay(slots, token_advantages, size=size, room=width + 1, shrink=shrink)
    # The means are taken in float64, the one place that needs it, and only there.
    with jax.enable_x64(True):
        batch: TokenBatch = _pack(
            *flat,
            starts,
            per_slot(rows.lengths, 0),
            per_slot(rows.row_trajectory, 0),
            # A large table costs next to nothing, and one size of it fewer programs.
            padded_rewards(rewards, max(len(slots), MIN_TABLE)),
            np.stack(
                [
                    per_slot(rows.group, -1),
                    per_slot(rows.trajectory, -1),
                    per_slot(rows.turn, -1),
                    per_slot(np.arange(len(rows)), -1),
                ]
            ),
            np.int32(pad_token),
            width=width,
            baseline=baseline,
            scale=scale,
        )
    return batch


@partial(jax.jit, static_argnames=("width", "baseline", "scale"))
def _pack(
    tokens: jax.Array,
    sampled: jax.Array,
    logprobs: jax.Array,
    token_advantages: jax.Array | None,
    starts: jax.Array,
    lengths: jax.Array,
    trajectory: jax.Array,
    rewards: Rewards,
    index: jax.Array,
    pad_token: jax.Array,
    *,
    width: int,
    baseline: Baseline,
    scale: Scale,
) -> TokenBatch:
    """Compose the kernels: advantages over [N], then one kernel per batch row.

    `starts`, `lengths` and `trajectory` are [B, S]; a batch row with one segment is a slice of
    the flat arrays, one with several is gathered.
    """
    # Of use only where jit is disabled, when numpy arrays would come in as they are.
    tokens, sampled, logprobs = (jnp.asarray(flat) for flat in (tokens, sampled, logprobs))
    by_trajectory = group_advantages(rewards, baseline=baseline, scale=scale)
    by_segment = by_trajectory.astype(jnp.float32)[trajectory]
    flat = (tokens, sampled, logprobs)

    if starts.shape[1] == 1:
        own = by_segment[:, 0] if token_advantages is None else token_advantages
        one_row = partial(shift_row, *flat, pad_token=pad_token, width=width)
        over_rows = jax.vmap(one_row, in_axes=(0 if token_advantages is None else None, 0, 0))
        targets = over_rows(own, starts[:, 0], lengths[:, 0])
    else:
        taken = jnp.maximum(lengths - 1, jnp.int32(0))
        ends = jnp.cumsum(taken, axis=1, dtype=jnp.int32)
        own = by_segment.reshape(-1) if token_advantages is None else token_advantages
        first = jnp.arange(len(starts), dtype=jnp.int32) * jnp.int32(starts.shape[1])
        lay = partial(lay_segments, *flat, own, (ends - taken).reshape(-1), width=width)
        targets = jax.vmap(lay, in_axes=(0, 0, 0, None))(ends, starts[:, 0], first, pad_token)
    group, place, turn, row = index
    return TokenBatch(
        **targets._asdict(),
        segment_lengths=jnp.maximum(lengths - 1, jnp.int32(0)),
        segment_group=group,
        segment_trajectory=place,
        segment_turn=turn,
        segment_row=row,
    )


def attention_mask(segment_ids: jax.Array) -> jax.Array:
    """Tell which positions a position may attend to: earlier ones of its own segment.

    Args:
      segment_ids: [B, T] int32, 0 in padding.

    Returns:
      [B, T, T] bool, query by key. A padding position attends to itself alone, so that a softmax
      over the mask stays finite.
    """
    chex.assert_rank(segment_ids, 2)

    def one_row(ids: jax.Array) -> jax.Array:
        position = jnp.arange(ids.shape[0], dtype=jnp.int32)
        causal = position[:, None] >= position[None, :]
        own = (ids[:, None] == ids[None, :]) & (ids[:, None] > 0)
        return (causal & own) | (position[:, None] == position[None, :])

    return jax.vmap(one_row)(segment_ids)
