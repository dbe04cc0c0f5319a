"""The proof of parity: the plain reference and the array path, side by side on real rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evsys_jax import reference
from evsys_jax.advantage_inputs import trajectory_advantages
from evsys_jax.batch import iter_packed
from evsys_jax.ragged import RaggedRows, RowKind, ragged_rows
from evsys_jax.unpadded import iter_runs

MAX_DIFFERENCES = 10

_FIELDS = ("input_tokens", "target_tokens", "logprobs", "advantages", "mask")
_DATUM_FIELDS = ("input_tokens", "target_tokens", "logprobs", "advantages")
_INT_FIELDS = ("input_tokens", "target_tokens")


@dataclass
class Comparison:
    """What `compare` found.

    Args:
      rows: rows compared.
      positions: positions compared.
      differing: rows that differ.
      differences: the first of them, each with its place, for people.
    """

    rows: int = 0
    positions: int = 0
    differing: int = 0
    differences: list[str] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        """Tell whether nothing differs."""
        return self.differing == 0


def compare(
    groups: Sequence[Any],
    *,
    rows: RowKind = "turns",
    normalize: bool = True,
    on_rows: Callable[[int], None] | None = None,
) -> Comparison:
    """Compute every row plainly and as arrays, and compare field by field.

    Both ways of the arrays are held to the reference: padded batches, as a training loop gets
    them, and the unpadded runs that Datums are cut from. Tokens, targets, masks and logprobs
    (rounded to float32) must agree bit for bit, advantages to the last bit of float32.

    Args:
      groups: [G] groups; see `evsys_jax.rollouts`.
      rows: "turns" or "merged".
      normalize: subtract the mean of each group's voters.
      on_rows: called with the number of rows done, now and then.
    """
    result = Comparison()
    # First, while no turn of a chain has been asked for: the way that a build goes.
    ragged = ragged_rows(groups, rows=rows)
    advantages = reference.compute_advantages(groups, normalize=normalize)
    plain = reference.iter_training_rows(groups, advantages, rows=rows)
    padded, unpadded = _padded_rows(ragged, normalize), _unpadded_rows(ragged, normalize)
    for expected, *actual in zip_longest(plain, padded, unpadded):
        pairs = zip(actual, (_FIELDS, _DATUM_FIELDS), ("arrays", "unpadded arrays"), strict=True)
        found = next(filter(None, (_first_difference(expected, *pair) for pair in pairs)), "")
        result.rows += 1
        result.positions += len(expected.mask) if expected is not None else 0
        if found:
            result.differing += 1
            if len(result.differences) < MAX_DIFFERENCES:
                result.differences.append(f"row {result.rows - 1}{_place(expected)}: {found}")
        if on_rows is not None and result.rows % 64 == 0:
            on_rows(result.rows)
    return result


def _padded_rows(rows: RaggedRows, normalize: bool) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield each row of the padded batches as arrays by field, padding cut off."""
    for _, batch in iter_packed(rows, normalize=normalize):
        host = {name: np.asarray(getattr(batch, name)) for name in _FIELDS}
        places = np.stack(
            [
                np.asarray(batch.segment_group),
                np.asarray(batch.segment_trajectory),
                np.asarray(batch.segment_turn),
            ]
        )
        for b, length in enumerate(np.asarray(batch.segment_lengths)[:, 0].tolist()):
            if length:
                row = {name: values[b, :length] for name, values in host.items()}
                yield {**row, "place": places[:, b, 0]}


def _unpadded_rows(rows: RaggedRows, normalize: bool) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield each row of the unpadded runs as arrays by field."""
    advantages = trajectory_advantages(rows.table, baseline="mean" if normalize else "none")
    places = np.stack([rows.group, rows.trajectory, rows.turn], axis=1)
    positions = (rows.lengths - 1).tolist()
    for run in iter_runs(rows, advantages):
        for r, begin in zip(run.rows, run.begins, strict=True):
            own = slice(begin, begin + positions[r])
            start = int(rows.offsets[r])
            yield {
                "input_tokens": rows.tokens[start : start + positions[r]],
                "target_tokens": run.target_tokens[own],
                "logprobs": run.logprobs[own],
                "advantages": run.advantages[own],
                "place": places[r],
            }


def _first_difference(
    expected: reference.Row | None, actual: dict[str, Any] | None, fields: Sequence[str], way: str
) -> str:
    """Describe where two rows differ first, or return ""; `way` names the arrays."""
    if expected is None and actual is None:
        return ""
    if expected is None or actual is None:
        return f"only in the {way if expected is None else 'reference'}"
    place = [expected.group, expected.trajectory, expected.turn]
    if actual["place"].tolist() != place:
        return f"the {way} have the row of (group, trajectory, turn) {actual['place'].tolist()}"
    for name in fields:
        plain, array = getattr(expected, name), actual[name]
        if len(plain) != len(array):
            return f"{name}: reference has {len(plain)} positions, {way} {len(array)}"
        wanted = np.array(plain, np.int64 if name in _INT_FIELDS else array.dtype)
        # One unit in the last place: two correct float64 means may round to neighbours. And
        # the smallest normal number: XLA rounds what lies below it to zero.
        smallest = np.finfo(np.float32).tiny
        slack = np.maximum(np.spacing(np.abs(wanted)), smallest) if name == "advantages" else 0
        same = np.abs(wanted - array) <= slack if name == "advantages" else wanted == array
        if not same.all():
            i = int(np.flatnonzero(~same)[0])
            return f"{name}[{i}]: reference {plain[i]!r}, {way} {array[i].item()!r}"
    return ""


def _place(row: reference.Row | None) -> str:
    if row is None:
        return ""
    return f" (group {row.group}, trajectory {row.trajectory}, turn {row.turn})"
