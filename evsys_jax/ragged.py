"""Rollouts of any length as flat host arrays: one row per trainable sequence.

`ragged_rows` is the only place where Python objects become arrays. It checks everything once, so
that the kernels behind it need not, and it accounts for every token that it leaves out.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evsys_jax import checks
from evsys_jax.account import TokenAccount
from evsys_jax.flat import Pieces, fill, plain_array
from evsys_jax.rollouts import ChainTurns, untouched_chain
from evsys_jax.trajectories import (
    TrajectoryTable,
    constant_groups,
    mask_reason,
    trajectory_table,
)

RowKind: TypeAlias = Literal["turns", "merged"]
MismatchPolicy: TypeAlias = Literal["error", "pad"]

MIN_FLAT = 2**18
"""Flat buffers below this many tokens are not worth another shape."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class RaggedRows:
    """R rows laid end to end, and the table of the N trajectories that they come from.

    A row holds whole sequences, not yet shifted. All arrays are numpy, on the host. L is the
    number of tokens of all rows together.

    Args:
      tokens: [L] int32, prompt and completion of every row.
      sampled: [L] bool, True where the policy wrote the token.
      logprobs: [L] float32, the sampler's; 0.0 where `sampled` is off.
      offsets: [R + 1] int64; row r is `[offsets[r], offsets[r + 1])` of the flat arrays.
      row_trajectory: [R] int32, index into the trajectory table.
      turn: [R] int32, index of the row's (first) turn in its trajectory.
      table: the N trajectories, also those that yield no row.
      account: where every completion token went.
      advantages: None, or [L] float32, one per token; stored rows carry theirs along.
      inputs: None, or per row its tokens but the last as the list they came in as, None where
        they came as arrays.
    """

    tokens: NDArray[np.int32]
    sampled: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    offsets: NDArray[np.int64]
    row_trajectory: NDArray[np.int32]
    turn: NDArray[np.int32]
    table: TrajectoryTable
    account: TokenAccount
    advantages: NDArray[np.float32] | None = None
    inputs: list[list[int] | None] | None = None

    def __len__(self) -> int:
        return len(self.row_trajectory)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[R] tokens of each row; a row has one position less."""
        return np.diff(self.offsets)

    @property
    def group(self) -> NDArray[np.int32]:
        """[R] group of each row."""
        return self.table.group[self.row_trajectory]

    @property
    def trajectory(self) -> NDArray[np.int32]:
        """[R] place of each row's trajectory in its group."""
        return self.table.place[self.row_trajectory]

    def take(self, rows: ArrayLike) -> RaggedRows:
        """Select rows, in the order asked for. The trajectory table stays whole, so that the
        baseline of a group does not depend on which of its rows are at hand.

        Args:
          rows: [K] indices of rows, or [R] bools.

        Returns:
          The K rows; their flat arrays are copies.
        """
        chosen_rows = np.asarray(rows)
        if chosen_rows.dtype == bool:
            chosen_rows = np.flatnonzero(chosen_rows)
        index = chosen_rows.astype(np.int64)
        if len(index) and not 0 <= index.min() <= index.max() < len(self):
            raise IndexError(f"rows {index.min()} to {index.max()} of {len(self)}")
        lengths = self.lengths[index]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        spans = self._spans(index)

        def chosen(flat: NDArray[Any]) -> NDArray[Any]:
            return np.concatenate([flat[:0], *(flat[start:end] for start, end in spans)])

        return replace(
            self,
            tokens=chosen(self.tokens),
            sampled=chosen(self.sampled),
            logprobs=chosen(self.logprobs),
            offsets=offsets,
            row_trajectory=self.row_trajectory[index],
            turn=self.turn[index],
            advantages=None if self.advantages is None else chosen(self.advantages),
            inputs=None if self.inputs is None else [self.inputs[r] for r in index.tolist()],
        )

    def lay(
        self,
        slots: NDArray[np.int64],
        advantages: NDArray[np.float32] | None,
        *,
        size: int,
        room: int,
        shrink: bool,
    ) -> tuple[tuple[NDArray[Any] | None, ...], NDArray[np.int32]]:
        """Lay chosen rows end to end in buffers of a given size, with room behind them.

        What lies behind the tokens stays unset, since a batch masks it.

        Args:
          slots: [B, S] row indices, -1 where there is none.
          advantages: [L] float32 or None.
          size: of the buffers.
          room: tokens that must lie behind, so that a slice from anywhere is never clamped.
          shrink: halve the size while it is large and everything fits: more shapes, but no more
            than twice the bytes that have to be moved to a device.

        Returns:
          tokens, sampled, logprobs and advantages, laid; and [B, S] where each slot begins.
        """
        order = slots[slots >= 0]
        lengths = self.lengths[order]
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        while shrink and size > MIN_FLAT and size // 2 >= total + room:
            size //= 2
        if size >= np.iinfo(np.int32).max:
            raise ValueError(f"a batch of {size} tokens is more than int32 can index")
        starts = np.zeros(slots.shape, np.int32)
        starts[slots >= 0] = ends - lengths
        spans = self._spans(order)

        def laid(values: NDArray[Any] | None) -> NDArray[Any] | None:
            if values is None:
                return None
            out = np.empty(size, values.dtype)
            np.concatenate([values[:0], *(values[a:b] for a, b in spans)], out=out[:total])
            return out

        flat = (self.tokens, self.sampled, self.logprobs, advantages)
        return tuple(laid(values) for values in flat), starts

    def _spans(self, order: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Return the spans of rows in the flat arrays, rows that follow each other as one."""
        breaks = np.flatnonzero(np.diff(order) != 1) + 1
        firsts = order[np.concatenate([[0], breaks]).astype(np.int64)] if len(order) else order
        lasts = order[np.concatenate([breaks - 1, [-1]]).astype(np.int64)] if len(order) else order
        return list(
            zip(self.offsets[firsts].tolist(), self.offsets[lasts + 1].tolist(), strict=True)
        )

    def without_overlong(self, width: int) -> RaggedRows:
        """Leave out the rows of more than `width` positions, and account for them as masked."""
        fits = self.lengths - 1 <= width
        account = copy.deepcopy(self.account)
        kept = self.take(np.flatnonzero(fits))
        lost = self.take(np.flatnonzero(~fits))
        untargeted = np.count_nonzero(lost.sampled[lost.offsets[:-1]])
        tokens = int(np.count_nonzero(lost.sampled) - untargeted)
        account.trained -= tokens
        account.masked["overlong"] += tokens
        return replace(kept, account=account)


def ragged_rows(
    groups: Sequence[Any],
    *,
    rows: RowKind = "turns",
    drop_constant: bool = False,
    on_logprob_mismatch: MismatchPolicy = "error",
    keep_lists: bool = False,
) -> RaggedRows:
    """Flatten groups into rows, in the order group, trajectory, turn.

    Args:
      groups: [G] groups; see `evsys_jax.rollouts`. Token fields may be lists or 1-D arrays.
      rows: "turns" for one row per turn; "merged" joins consecutive turns whose prompt extends
        everything before it, and begins a new row where it doesn't.
      drop_constant: leave out the rows of groups in which all trajectories that vote or train
        have one reward, since their advantage is zero. A group given with one trajectory stays.
      on_logprob_mismatch: "error", or "pad" to fill up missing logprobs with 0.0 and cut
        surplus ones, with a warning that counts the turns.
      keep_lists: keep `inputs`, for a boundary that hands out lists again.

    Returns:
      The rows of all trajectories that train. Turns without completion and rows without a
      position (one token and no prompt) yield none and are counted in `account`.

    Raises:
      ValueError: a token id outside [0, 2**31) or a logprob that is not finite, named by group,
        trajectory, turn and index; other counts of logprobs than of completion tokens; a reward
        that counts and is not a finite number.
    """
    checks.check_choice("rows", rows, ("turns", "merged"))
    checks.check_choice("on_logprob_mismatch", on_logprob_mismatch, ("error", "pad"))
    table = trajectory_table(groups)
    constant = constant_groups(table) if drop_constant else np.zeros(len(groups), bool)
    account, plan, padded = TokenAccount(), Pieces(), 0
    for index, (g, _, trajectory, where) in enumerate(checks.members(groups)):
        chain = untouched_chain(trajectory)
        generated = _generated(trajectory.turns, where) if chain is None else chain.n_sampled
        account.captured += generated
        if not table.trains[index]:
            account.masked[mask_reason(trajectory)] += generated
        elif constant[g]:
            account.dropped["constant_group"] += generated
            account.dropped_turns["constant_group"] += len(trajectory.turns)
        elif chain is not None:
            _plan_chain(plan, chain, index, rows == "merged", account)
        else:
            turns, changed = _completed_turns(trajectory, where, on_logprob_mismatch, account)
            padded += changed
            _plan_rows(plan, turns, index, rows == "merged", account)
    if padded:
        logger.warning("logprobs padded or cut to the completion's length in %d turns", padded)
    flat = fill(plan, keep_lists=keep_lists)
    if flat is None:
        raise _first_fault(groups, constant, on_logprob_mismatch)
    untargeted = np.count_nonzero(flat["sampled"][flat["offsets"][:-1]])
    account.trained = int(np.count_nonzero(flat["sampled"]) - untargeted)
    return RaggedRows(**flat, table=table, account=account)


def _generated(turns: Sequence[Any], where: str) -> int:
    """Count the completion tokens of a trajectory."""
    return sum(
        len(turn.completion_tokens)
        if _is_plain(turn.completion_tokens)
        else _length(turn, "completion_tokens", f"{where}, turn {k}")
        for k, turn in enumerate(turns)
    )


def _is_plain(values: Any) -> bool:
    """Tell whether values have a length and an order for sure; cheap, since most have."""
    kind = type(values)
    return kind is list or kind is tuple or (kind is np.ndarray and values.ndim > 0)


def _length(turn: Any, name: str, where: str) -> int:
    values = checks.sequence(getattr(turn, name), f"{where}: {name}")
    try:
        return len(values)
    except TypeError as error:  # an array without a dimension
        raise ValueError(f"{where}: {name}: {error}") from error


def _completed_turns(
    trajectory: Any, where: str, on_mismatch: MismatchPolicy, account: TokenAccount
) -> tuple[list[tuple[int, Any, Any, Any]], int]:
    """Return (k, prompt, completion, logprobs) of each turn that sampled, and the count padded."""
    turns, padded = [], 0
    for k, turn in enumerate(trajectory.turns):
        completion, logprobs = turn.completion_tokens, turn.logprobs
        for name in ("prompt_tokens", "logprobs"):
            if not _is_plain(getattr(turn, name)):
                _length(turn, name, f"{where}, turn {k}")
        if len(logprobs) != len(completion):
            logprobs, _ = checks.match_logprobs(turn, f"{where}, turn {k}", on_mismatch)
            padded += 1
        if len(completion):
            turns.append((k, turn.prompt_tokens, completion, logprobs))
        else:
            account.dropped_turns["empty_completion"] += 1
    return turns, padded


def _plan_rows(
    plan: Pieces,
    turns: list[tuple[int, Any, Any, Any]],
    trajectory: int,
    merge: bool,
    account: TokenAccount,
) -> None:
    """Add the rows of one trajectory to the plan; count what has no place in one."""
    spans: list[list[int]] = []  # turns [first, last) of each row
    for i, (_, prompt, _, _) in enumerate(turns):
        if merge and i and _extends(prompt, turns[i - 1][1], turns[i - 1][2]):
            spans[-1][1] = i + 1
        else:
            spans.append([i, i + 1])
    for first, last in spans:
        if len(turns[first][1]) == 0:
            # Nothing comes before the first token, so nothing can predict it.
            account.dropped["no_context"] += 1
            if len(turns[last - 1][1]) + len(turns[last - 1][2]) == 1:
                account.dropped_turns["no_context"] += 1
                continue
        plan.begin_row(trajectory, turns[first][0])
        known = 0
        for _, prompt, completion, logprobs in turns[first:last]:
            plan.add(prompt[known:] if known else prompt, None)
            plan.add(completion, logprobs)
            known = len(prompt) + len(completion)


def _plan_chain(
    plan: Pieces, chain: ChainTurns, trajectory: int, merge: bool, account: TokenAccount
) -> None:
    """Do as `_plan_rows` for turns that extend each other for sure."""
    wrote = np.flatnonzero(chain.completion_lengths)
    if len(wrote) < len(chain):
        account.dropped_turns["empty_completion"] += len(chain) - len(wrote)
    if not merge or not len(wrote):
        turns = [(k, *chain.fields(k)) for k in wrote.tolist()]
        _plan_rows(plan, turns, trajectory, False, account)
        return
    starts, ends = chain.starts[wrote], chain.ends[wrote]
    if starts[0] == 0:
        account.dropped["no_context"] += 1
        if ends[-1] == 1:
            account.dropped_turns["no_context"] += 1
            return
    plan.begin_row(trajectory, int(wrote[0]))
    plan.add_chain(chain.tokens[: ends[-1]], chain.logprobs[: ends[-1]], starts, ends)


def _extends(prompt: Any, before: Any, completion: Any) -> bool:
    """Tell whether a prompt begins with the last turn's prompt and completion."""
    middle, end = len(before), len(before) + len(completion)
    if len(prompt) < end:
        return False
    whole, head, tail = (plain_array(part) for part in (prompt, before, completion))
    if whole is None or head is None or tail is None or whole.ndim != 1:
        known, *history = map(checks.as_list, (prompt, before, completion))
        # True and 2.0 equal 1 and 2, but are no tokens: such a prompt is left to the checks.
        kinds = set(map(type, known[:end]))
        integers = bool not in kinds and all(issubclass(kind, Integral) for kind in kinds)
        return integers and known[:middle] == history[0] and known[middle:end] == history[1]
    if whole.dtype.kind not in "iu":
        return False
    if _address(whole) == _address(head) and _address(tail) == _address(whole) + 4 * middle:
        return True  # views into one array of int32, as `collect` hands them out
    return np.array_equal(whole[:middle], head) and np.array_equal(whole[middle:end], tail)


def _address(array: NDArray[Any]) -> int:
    """Return where a contiguous int32 array begins in memory; something unequal for others."""
    plain = array.dtype == np.int32 and array.flags.c_contiguous
    return array.__array_interface__["data"][0] if plain else id(array)


def _first_fault(
    groups: Sequence[Any], constant: NDArray[np.bool_], on_mismatch: MismatchPolicy
) -> ValueError:
    """Find the value that stopped `fill`, one turn at a time, and return the error for it."""
    for g, _, trajectory, place in checks.members(groups):
        if constant[g] or not checks.trains(trajectory):
            continue
        for k, turn in enumerate(trajectory.turns):
            where = f"{place}, turn {k}"
            try:
                logprobs, _ = checks.match_logprobs(turn, where, on_mismatch)
                if len(turn.completion_tokens):
                    checks.check_turn(turn, logprobs, where)
            except ValueError as error:
                return error
    return ValueError("token ids and logprobs must be lists or 1-D arrays of plain numbers")
