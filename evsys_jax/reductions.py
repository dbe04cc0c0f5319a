r"""Means instead of sums: transforms of the advantages, for losses that only add up.

A loss that sums over tokens becomes a mean when each token's advantage is divided by the right
count. The counts are those of the whole batch. A step that is cut into micro-batches counts once,
with `count_live`, and hands the counts to every `reduce_by`; the micro-batch losses then add up
to the same mean, and so do their gradients. Arrays that lie on several devices, or hosts, need no
counts: the sums inside `reduce_by` run over all of them. Micro-batches of several hosts do: each
host counts all rows of the step, or the counts are added up between them; `count_live` does not
gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from evsys_jax import checks
from evsys_jax.batch import Array, TokenBatch
from evsys_jax.plans import bucket
from evsys_jax.ragged import RaggedRows
from evsys_jax.segments import spread_segments, sum_segments

Reduction: TypeAlias = Literal["token", "sequence", "trajectory", "group"]

_NAMES = ("token", "sequence", "trajectory", "group")
_MIN_TABLE = 8


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[f.name for f in fields(TokenBatch) if f.name != "wire_mask"] + ["weights"],
    meta_fields=["wire_mask"],
)
@dataclass(frozen=True, eq=False)
class ReducedBatch(TokenBatch):
    """A `TokenBatch` whose advantages have been weighted, and the weights. A pytree.

    Args:
      weights: [B, T] float32, what each advantage was multiplied by; 0 in padding. A loss whose
        terms are not all proportional to the advantage (`dro`) needs them.
    """

    weights: Array = None  # type: ignore[assignment]  # follows a field that has a default


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "tokens",
        "sequences",
        "trajectories",
        "groups",
        "group_tokens",
        "group_offsets",
        "trajectory_tokens",
    ],
    meta_fields=[],
)
@dataclass(frozen=True, eq=False)
class LiveCounts:
    """Live tokens of a whole step, host arrays; G and N rounded up to powers of two. A pytree.

    Args:
      tokens: [] int32, live tokens.
      sequences: [] int32, sequences with a live token.
      trajectories: [] int32, trajectories with a live token.
      groups: [] int32, groups with a live token.
      group_tokens: [G] int32, live tokens of each group.
      group_offsets: [G + 1] int32; group g is `[group_offsets[g], group_offsets[g + 1])` of
        the trajectories.
      trajectory_tokens: [N] int32, live tokens of each trajectory.
    """

    tokens: Array
    sequences: Array
    trajectories: Array
    groups: Array
    group_tokens: Array
    group_offsets: Array
    trajectory_tokens: Array


def reduce_by(
    batch: TokenBatch, by: Reduction | float, *, counts: LiveCounts | None = None
) -> ReducedBatch:
    r"""Weight the advantages so that the summed loss becomes the mean asked for.

    With x_t the loss of token t and n(u) the live tokens of a unit u, the sum becomes

    - "token":      sum_t x_t / n, over all live tokens;
    - "sequence":   mean over the sequences of (sum_{t in u} x_t / n(u));
    - "trajectory": mean over the trajectories of the same, over all its sequences together;
    - "group":      mean over the groups of the same, over all its trajectories together;
    - a number c:   sum_t x_t / c.

    Units without a live token are not counted. Sources: "sequence" is GRPO's
    (https://arxiv.org/abs/2402.03300), "token" DAPO's (https://arxiv.org/abs/2503.14476), a
    constant Dr. GRPO's (https://arxiv.org/abs/2503.20783).

    Args:
      batch: B rows; the step's, or with `counts` a part of it. Ones that were reduced before are
        weighted once more.
      by: the mean, or a positive number.
      counts: `count_live` of the whole step; None counts this batch. Of no effect on a number.

    Returns:
      The batch with weighted advantages and the weights. A live token that `counts` doesn't know
      gets NaN. Without live tokens all weights are 0.

    Raises:
      ValueError: `by` is no such name, or a number that is not positive and finite.
    """
    chex.assert_rank([batch.advantages, batch.mask], 2)
    if isinstance(by, str):
        checks.check_choice("by", by, _NAMES)
        weights = _unit_weights(batch, by, counts)
    else:
        # Beyond 1e38, or below its inverse, a weight would be no float32.
        if not isinstance(by, jax.core.Tracer) and not (1e-38 < float(by) < 1e38):
            raise ValueError(f"a loss cannot be divided by {by!r}")
        weights = jnp.where(batch.segment_ids > 0, jnp.asarray(1.0 / by, jnp.float32), 0.0)
    before = batch.weights * weights if isinstance(batch, ReducedBatch) else weights
    # The mask may hide anything, also from 0 * NaN.
    advantages = jnp.where(batch.mask, batch.advantages, 0.0) * weights
    given = {f.name: getattr(batch, f.name) for f in fields(TokenBatch)}
    return ReducedBatch(**{**given, "advantages": advantages}, weights=before)


def count_live(source: RaggedRows | TokenBatch | Sequence[TokenBatch]) -> LiveCounts:
    """Count the live tokens of a whole step, on the host, per group and trajectory.

    Args:
      source: all rows of the step, before they are packed; or the batch; or all its
        micro-batches. Batches are brought down from the device.

    Returns:
      The counts, for `reduce_by`.

    Raises:
      ValueError: more live tokens than int32 holds.
    """
    if isinstance(source, RaggedRows):
        # The first token of a row is nobody's target.
        sampled = np.concatenate([[0], np.cumsum(source.sampled)])
        live = sampled[source.offsets[1:]] - sampled[source.offsets[:-1] + 1]
        return _tabulate(live, source.group, source.trajectory)
    batches = [source] if isinstance(source, TokenBatch) else list(source)
    parts = [_segments_of(batch) for batch in batches]
    empty = np.zeros((3, 0), np.int64)
    live, group, trajectory = np.concatenate([empty, *parts], axis=1)
    return _tabulate(live, group, trajectory)


def _segments_of(batch: TokenBatch) -> NDArray[np.int64]:
    """Return live tokens, group and trajectory of every segment of a batch, [3, K]."""
    mask, ids = np.asarray(batch.mask), np.asarray(batch.segment_ids)
    group = np.asarray(batch.segment_group)
    rows, slots = group.shape
    flat = (np.arange(rows)[:, None] * (slots + 1) + ids)[mask]
    live = np.bincount(flat, minlength=rows * (slots + 1)).reshape(rows, slots + 1)[:, 1:]
    trajectory = np.asarray(batch.segment_trajectory)
    return np.stack([live[group >= 0], group[group >= 0], trajectory[group >= 0]]).astype(np.int64)


def _tabulate(live: NDArray[Any], group: NDArray[Any], trajectory: NDArray[Any]) -> LiveCounts:
    """Sum the live tokens of sequences [K] by group and trajectory."""
    if live.sum() >= 2**31:
        raise ValueError(f"{live.sum()} live tokens are more than int32 holds")
    groups = bucket(int(group.max(initial=-1)) + 1, _MIN_TABLE)
    members = np.zeros(groups, np.int64)
    np.maximum.at(members, group, trajectory + 1)
    offsets = np.concatenate([[0], np.cumsum(members)])
    slots = bucket(int(offsets[-1]), _MIN_TABLE)
    per_group = np.bincount(group, live, groups)
    per_trajectory = np.bincount(offsets[group] + trajectory, live, slots)
    return LiveCounts(
        tokens=np.asarray(live.sum(), np.int32),
        sequences=np.asarray(np.count_nonzero(live), np.int32),
        trajectories=np.asarray(np.count_nonzero(per_trajectory), np.int32),
        groups=np.asarray(np.count_nonzero(per_group), np.int32),
        group_tokens=per_group.astype(np.int32),
        group_offsets=offsets.astype(np.int32),
        trajectory_tokens=per_trajectory.astype(np.int32),
    )


def _unit_weights(batch: TokenBatch, by: str, counts: LiveCounts | None) -> jax.Array:
    """Return 1 / (number of units * live tokens of the token's unit), [B, T] float32."""
    live = sum_segments(jnp.asarray(batch.mask).astype(jnp.int32), batch)
    inside: jax.Array
    units: Array
    if by == "token":
        inside, units = jnp.ones_like(live), jnp.sum(live) if counts is None else counts.tokens
    elif by == "sequence":
        inside, units = live, jnp.sum(live > 0) if counts is None else counts.sequences
    elif counts is None:
        inside, units = _count_units(batch, by, live)
    else:
        inside, units = _look_up(batch, by, counts)
    size = inside.astype(jnp.float32) * jnp.asarray(units).astype(jnp.float32)
    share = jnp.where(size > 0.0, 1.0 / size, jnp.nan)
    return spread_segments(jnp.where(live > 0, share, 0.0), batch)


def _count_units(batch: TokenBatch, by: str, live: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the live tokens in the unit of each segment, [B, S], and how many units have any.

    The segments of a trajectory or group may lie anywhere in the batch, and their number is not
    known to the compiler: sorting them by name gives each unit a number below B * S.
    """
    names = [jnp.asarray(batch.segment_group).reshape(-1)]
    if by == "trajectory":
        names.append(jnp.asarray(batch.segment_trajectory).reshape(-1))
    order = jnp.lexsort(names)
    changes = [name[order][1:] != name[order][:-1] for name in names]
    rank = jnp.cumsum(jnp.any(jnp.stack(changes), axis=0).astype(jnp.int32))
    first = jnp.zeros((min(live.size, 1),), jnp.int32)
    unit = jnp.zeros(live.size, jnp.int32).at[order].set(jnp.concatenate([first, rank]))
    per_unit = jax.ops.segment_sum(live.reshape(-1), unit, live.size)
    return per_unit[unit].reshape(live.shape), jnp.sum(per_unit > 0)


def _look_up(batch: TokenBatch, by: str, counts: LiveCounts) -> tuple[jax.Array, Array]:
    """Return the same from the counts of the whole step; 0 tokens in a unit they don't know."""

    def entry(table: Array, index: jax.Array) -> jax.Array:
        return jnp.asarray(table).at[index].get(mode="fill", fill_value=0)

    group = jnp.asarray(batch.segment_group)
    if by == "group":
        return entry(counts.group_tokens, group), counts.groups
    slot = entry(counts.group_offsets, group) + jnp.asarray(batch.segment_trajectory)
    known = slot < entry(counts.group_offsets, group + 1)
    return jnp.where(known, entry(counts.trajectory_tokens, slot), 0), counts.trajectories
