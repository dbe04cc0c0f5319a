"""Rows in parts of whole groups, so that the memory of a long run is that of a part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import length_hint
from typing import Any

import numpy as np

from evsys_jax import checks
from evsys_jax.ragged import RaggedRows, ragged_rows
from evsys_jax.rollouts import TrajectoryGroup, untouched_chain

MAX_TOKENS = 2**23
"""Tokens that are flat at a time: about 75 MB."""


def iter_ragged_rows(
    groups: Sequence[Any], *, max_tokens: int = MAX_TOKENS, **options: Any
) -> Iterator[RaggedRows]:
    """Flatten groups some at a time: the memory that takes is that of a part.

    Args:
      groups: [G] groups.
      max_tokens: of the rows of a part, where one group alone has no more. Turns that
        are no `ChainTurns`, or were looked into, count as rows of their own.
      **options: of `ragged_rows`.

    Yields:
      The rows of consecutive groups, which together are those of `ragged_rows`. Groups keep the
      index that they have among all; a table knows only the trajectories of its part, which is
      all that baselines and `group_std` look at, and not what `batch_std` does.

    Raises:
      ValueError: as `ragged_rows`, when the bad part is asked for.
    """
    ragged_rows([], **options)  # so that bad options are told even where there are no groups
    groups = list(checks.sequence(groups, "groups"))
    counts = np.zeros(len(groups) + 1, np.int64)
    for g, _, trajectory, _ in checks.members(groups):
        chain = untouched_chain(trajectory)
        if chain is None:
            counts[g + 1] += sum(map(_count_tokens, trajectory.turns))
        elif options.get("rows") == "merged":
            counts[g + 1] += len(chain.tokens)
        else:
            counts[g + 1] += chain.ends.sum()
    sizes = np.cumsum(counts)
    first = 0
    while first < len(groups):
        fitting = int(np.searchsorted(sizes, sizes[first] + max_tokens, side="right")) - 1
        last = max(fitting, first + 1)
        yield _numbered_rows(groups[first:last], first, options)
        first = last


def _count_tokens(turn: Any) -> int:
    """Count the tokens of a turn; of what has no length none, which the checks then name."""
    return length_hint(turn.prompt_tokens) + length_hint(turn.completion_tokens)


def _numbered_rows(groups: list[Any], first: int, options: dict[str, Any]) -> RaggedRows:
    """Flatten groups of which the first has another index than 0."""
    try:
        rows = ragged_rows(groups, **options)
    except ValueError:
        # Once more with as many groups in front, so that the error names the right one.
        ragged_rows([TrajectoryGroup([])] * first + groups, **options)
        raise
    table = rows.table
    sizes = np.concatenate([np.zeros(first, np.int32), table.group_sizes])
    return replace(
        rows, table=replace(table, group=table.group + np.int32(first), group_sizes=sizes)
    )
