"""Token fields of any kind into flat arrays, checked and copied once, without a loop per token."""

from __future__ import annotations

import array as array_module
import struct
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evsys_jax import checks

_BOOLS = {bool, np.bool_}


@dataclass
class Pieces:
    """What goes where, before anything is copied: rows as runs of pieces, read or written."""

    tokens: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)  # None for a piece that was only read
    lengths: list[int] = field(default_factory=list)
    row_pieces: list[int] = field(default_factory=list)  # index of each row's first piece
    row_trajectory: list[int] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    chains: list[tuple[int, NDArray[np.int32], NDArray[np.int32]]] = field(default_factory=list)

    def begin_row(self, trajectory: int, turn: int) -> None:
        """Open a row; the pieces that follow belong to it."""
        self.row_pieces.append(len(self.tokens))
        self.row_trajectory.append(trajectory)
        self.turn.append(turn)

    def add(self, piece: Any, logprobs: Any) -> None:
        """Append a piece of tokens, with logprobs if the policy wrote it."""
        self.tokens.append(piece)
        self.logprobs.append(logprobs)
        self.lengths.append(len(piece))

    def add_chain(
        self,
        tokens: NDArray[np.int32],
        logprobs: NDArray[np.float32],
        starts: NDArray[np.int32],
        ends: NDArray[np.int32],
    ) -> None:
        """Append a piece of which the policy wrote `[starts[k], ends[k])`; logprobs 0 elsewhere."""
        self.chains.append((len(self.tokens), starts, ends))
        self.add(tokens, logprobs)


def fill(pieces: Pieces, *, keep_lists: bool = False) -> dict[str, Any] | None:
    """Copy all pieces into flat arrays; None where some value is not what it must be.

    Args:
      pieces: the rows.
      keep_lists: add `inputs`, per row the tokens but the last as one list where all its pieces
        are lists, else None. Joined while the tokens are being copied, it costs little.
    """
    lengths = np.array(pieces.lengths, np.int64)
    ends = np.cumsum(lengths)
    starts = (ends - lengths).tolist()
    total = int(ends[-1]) if len(ends) else 0
    tokens = np.empty(total, np.int32)
    logprobs = np.zeros(total, np.float32)
    try:
        with np.errstate(over="ignore"):
            inputs = _fill_tokens(pieces, tokens, starts, keep_lists)
            _fill_logprobs(pieces, logprobs, starts)
    except (struct.error, ValueError, TypeError, OverflowError):
        return None
    # What is not a number is both the least and the greatest of all.
    if total and (tokens.min() < 0 or not np.isfinite([logprobs.min(), logprobs.max()]).all()):
        return None
    if _hides_bool(pieces, tokens, starts):
        return None
    return {
        "tokens": tokens,
        "sampled": _sampled(pieces, lengths, ends),
        "logprobs": logprobs,
        "offsets": np.append(np.array(starts, np.int64)[pieces.row_pieces], total),
        "row_trajectory": np.array(pieces.row_trajectory, np.int32),
        "turn": np.array(pieces.turn, np.int32),
        **({"inputs": inputs} if keep_lists else {}),
    }


def _sampled(
    pieces: Pieces, lengths: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return a bool per token: the policy wrote it."""
    wrote = np.array([piece is not None for piece in pieces.logprobs], bool)
    if not pieces.chains:
        return np.repeat(wrote, lengths)
    wrote[[index for index, _, _ in pieces.chains]] = False
    begins = ends - lengths
    firsts, lasts = [begins[wrote]], [ends[wrote]]
    for index, inner, outer in pieces.chains:
        firsts.append(begins[index] + inner)
        lasts.append(begins[index] + outer)
    # No two overlap, so that each kind of edge can be sorted alone.
    edges = np.stack([np.sort(np.concatenate(each)) for each in (firsts, lasts)], axis=1).ravel()
    runs = np.diff(edges, prepend=0, append=ends[-1])
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs)


def _fill_tokens(
    pieces: Pieces, out: NDArray[np.int32], starts: list[int], keep_lists: bool
) -> list[list[int] | None]:
    """Write all tokens into `out`; return what `fill` calls inputs."""
    rows = len(pieces.row_pieces)
    if _joined_arrays(pieces.tokens, "iu", out):
        return [None] * rows
    inputs: list[list[int] | None] = []
    for first, last in pairwise([*pieces.row_pieces, len(pieces.tokens)]):
        row = pieces.tokens[first:last]
        if keep_lists and all(isinstance(piece, list) for piece in row):
            joined = list(row[0])
            for piece in row[1:]:
                joined += piece
            _copy_tokens(joined, out, starts[first], len(joined))
            del joined[-1:]
            inputs.append(joined)
            continue
        inputs.append(None)
        for i, piece in enumerate(row, start=first):
            _copy_tokens(piece, out, starts[i], pieces.lengths[i])
    return inputs


def _fill_logprobs(pieces: Pieces, out: NDArray[np.float32], starts: list[int]) -> None:
    """Write the logprobs of all pieces that have some into `out`, which holds zeros."""
    longest = max(pieces.lengths, default=0)
    nothing = np.zeros(longest, np.float32)
    whole = [
        nothing[:length] if piece is None else piece
        for piece, length in zip(pieces.logprobs, pieces.lengths, strict=True)
    ]
    if _joined_arrays(whole, "fiu", out):
        return
    for piece, start, length in zip(pieces.logprobs, starts, pieces.lengths, strict=True):
        if piece is not None:
            _copy_logprobs(piece, out, start, length)


def _joined_arrays(pieces: list[Any], kinds: str, out: NDArray[Any]) -> bool:
    """Write pieces into `out` in one go where all are 1-D arrays of numbers; tell whether so.

    Args:
      pieces: that together are as long as `out`.
      kinds: of numbers that are welcome, in numpy's letters.
      out: int32 or float32.

    Raises:
      ValueError: an integer that int32 can't hold.
    """
    if set(map(type, pieces)) != {np.ndarray} or not all(piece.ndim == 1 for piece in pieces):
        return False
    dtypes = {piece.dtype for piece in pieces}
    if any(dtype.kind not in kinds for dtype in dtypes):
        return False
    common = np.result_type(*dtypes)
    if common.kind not in kinds:  # of int64 and uint64 together numpy makes floats
        return False
    if out.dtype == np.int32 and not np.can_cast(common, np.int32):
        wide = np.concatenate(pieces)
        if wide.size and not (0 <= int(wide.min()) and int(wide.max()) < checks.TOKEN_LIMIT):
            raise ValueError("token ids must lie in [0, 2**31)")
        out[:] = wide
    else:
        np.concatenate(pieces, out=out, casting="same_kind")
    return True


def token_array(values: Any) -> NDArray[np.int32]:
    """Copy token ids, a list or 1-D array, into an int32 array.

    Raises:
      ValueError: one of them is no integer in [0, 2**31).
    """
    pieces = Pieces()
    pieces.begin_row(0, 0)
    pieces.add(values, None)
    flat = fill(pieces)
    if flat is None:
        raise ValueError("a token id is no integer in [0, 2**31)")
    tokens: NDArray[np.int32] = flat["tokens"]
    return tokens


def logprob_array(values: Any) -> NDArray[np.float32]:
    """Copy logprobs, a list or 1-D array, into a float32 array.

    Raises:
      ValueError: one of them is no finite float32.
    """
    out = np.empty(len(values), np.float32)
    try:
        with np.errstate(over="ignore"):
            _copy_logprobs(values, out, 0, len(values))
    except (struct.error, TypeError, OverflowError) as error:
        raise ValueError(str(error)) from error
    if not np.isfinite(out).all():
        raise ValueError("a logprob is not a finite float32")
    return out


def _copy_tokens(piece: Any, out: NDArray[np.int32], start: int, length: int) -> None:
    """Write token ids into `out`; raise at what int32 cannot hold or what is no integer."""
    if not length:
        return
    if not isinstance(piece, list | tuple):
        array = plain_array(piece)
        if array is not None:
            if array.ndim != 1 or array.dtype.kind not in "iu":
                raise ValueError("token ids must be a list or a 1-D array of integers")
            if array.dtype != np.int32 and not (
                0 <= int(array.min()) and int(array.max()) < checks.TOKEN_LIMIT
            ):
                raise ValueError("token ids must lie in [0, 2**31)")
            out[start : start + length] = array
            return
        piece = checks.as_list(piece)
        if bool in set(map(type, piece)):
            raise ValueError("a token id is an integer, not a bool")
    # struct checks type and range in C and is the fastest way from ints to memory.
    struct.pack_into(f"{length}i", out.data, 4 * start, *piece)


def plain_array(piece: Any) -> NDArray[Any] | None:
    """Return what is an array of numbers as numpy; None for any other sequence."""
    if not hasattr(piece, "dtype") and not isinstance(piece, array_module.array):
        return None
    if isinstance(piece, np.ma.MaskedArray):  # its list has None where it is masked
        return None
    array = np.asarray(piece)
    return None if array.dtype == object else array


def _copy_logprobs(piece: Any, out: NDArray[np.float32], start: int, length: int) -> None:
    """Write logprobs into `out`, rounded to float32; raise at what is no number."""
    if not isinstance(piece, list | tuple):
        array = plain_array(piece)
        if array is not None and array.ndim == 1 and array.dtype.kind in "fiu":
            out[start : start + length] = array
            return
        piece = checks.as_list(piece)
    struct.pack_into(f"{length}f", out.data, 4 * start, *piece)
    # C takes True and False for 1 and 0; below them there is nothing to suspect.
    if length and not out[start : start + length].max() < 0 and _BOOLS & set(map(type, piece)):
        raise ValueError("a logprob is a number, not a bool")


def _hides_bool(pieces: Pieces, tokens: NDArray[np.int32], starts: list[int]) -> bool:
    """Tell whether a list holds True or False, which C takes for 1 and 0."""
    if not any(isinstance(piece, list | tuple) for piece in pieces.tokens):
        return False
    suspects = np.flatnonzero(tokens <= 1)
    owners = np.searchsorted(starts, suspects, side="right") - 1
    return any(
        isinstance(pieces.tokens[owner], list | tuple)
        and isinstance(pieces.tokens[owner][suspect - starts[owner]], bool)
        for suspect, owner in zip(suspects.tolist(), owners.tolist(), strict=True)
    )
