"""A tree of token sequences that share their beginnings, for prefix questions at memory cost.

Every sequence of a rollout is put into one prefix tree whose edges (*strands*) are growing numpy
buffers. A prefix that two sequences share is stored once, a delta costs only its own tokens, and
"does P begin with A" becomes arithmetic on positions. Work is linear in the tokens handed in,
memory in the distinct ones.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
# (strand, length): the sequence that ends there. Equal sequences have equal marks.
Mark = tuple[int, int]

START: Mark = (0, 0)
_BLOCK = 1 << 16

T = TypeVar("T")


class TokenTree:
    """The prefix tree. `extend` is the only way in; marks are the names of what is in it."""

    def __init__(self) -> None:
        self._strands = [_Strand(parent=-1, start=0)]
        self._children: dict[tuple[int, int, int], int] = {}

    def extend(self, mark: Mark, tokens: Ids) -> Mark:
        """Follow tokens from a position, adding what is not there yet.

        Args:
          mark: where to begin; `START` for a whole sequence.
          tokens: [n] int32.

        Returns:
          The mark of the sequence of `mark` followed by `tokens`.
        """
        index, length = mark
        taken, count = 0, len(tokens)
        while taken < count:
            strand = self._strands[index]
            rest = tokens[taken:]
            if length == strand.end:
                # Nothing branches off at a strand's end, because there it is extended instead.
                strand.append(rest)
                return index, length + len(rest)
            agreed = _count_common(strand.view(length), rest)
            taken += agreed
            length += agreed
            if taken < count and length < strand.end:
                key = (index, length, int(tokens[taken]))
                child = self._children.get(key)
                if child is None:
                    child = self._children[key] = len(self._strands)
                    self._strands.append(_Strand(parent=index, start=length))
                index = child
        return index, length

    def begins_with(self, mark: Mark, prefix: Mark) -> bool:
        """Whether the sequence at `mark` begins with the one at `prefix`; equal ones do."""
        index, length = mark
        while index > prefix[0]:  # a strand is newer than the one it branches off
            length = self._strands[index].start
            index = self._strands[index].parent
        return index == prefix[0] and prefix[1] <= length

    def tokens(self, mark: Mark) -> Ids:
        """The whole sequence at a mark, [length] int32: a view where one strand holds it."""
        pieces = [self.strand(index)[:end] for index, end in self.pieces(mark)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def pieces(self, mark: Mark) -> list[tuple[int, int]]:
        """The strands that hold the sequence at a mark, and how much of each, from the start."""
        index, length = mark
        pieces: list[tuple[int, int]] = []
        while index >= 0:
            strand = self._strands[index]
            pieces.append((index, length - strand.start))
            index, length = strand.parent, strand.start
        return pieces[::-1]

    def strand(self, index: int) -> Ids:
        """What one strand holds by now, without what it branched off from."""
        return self._strands[index].view(self._strands[index].start)

    def parent_of(self, index: int) -> Mark:
        """The position that a strand branches off; strand -1 above the first."""
        strand = self._strands[index]
        return strand.parent, strand.start


class MarkIndex(Generic[T]):
    """Things at marks, to be found from any longer sequence.

    Args:
      tree: the tree that the marks belong to.
    """

    def __init__(self, tree: TokenTree) -> None:
        self._tree = tree
        self._lengths: dict[int, list[int]] = {}
        self._held: dict[Mark, list[T]] = {}

    def add(self, mark: Mark, thing: T) -> None:
        """Put a thing at a mark."""
        held = self._held.setdefault(mark, [])
        if not held:
            insort(self._lengths.setdefault(mark[0], []), mark[1])
        held.append(thing)

    def find_deepest(self, mark: Mark) -> list[T]:
        """All things at the longest occupied prefix of the sequence at `mark`, itself included."""
        index, length = mark
        while index >= 0:
            lengths = self._lengths.get(index, [])
            place = bisect_right(lengths, length)
            if place:
                return self._held[index, lengths[place - 1]]
            index, length = self._tree.parent_of(index)
        return []


class _Strand:
    __slots__ = ("buffer", "end", "parent", "start")

    def __init__(self, *, parent: int, start: int) -> None:
        self.parent = parent
        self.start = self.end = start
        self.buffer: Ids = np.empty(0, np.int32)

    def append(self, tokens: Ids) -> None:
        used = self.end - self.start
        needed = used + len(tokens)
        if needed > len(self.buffer):
            grown = np.empty(max(needed, 2 * used), np.int32)
            grown[:used] = self.buffer[:used]
            self.buffer = grown
        self.buffer[used:needed] = tokens
        self.end += len(tokens)

    def view(self, begin: int, end: int | None = None) -> Ids:
        stop = self.end if end is None else end
        return self.buffer[begin - self.start : stop - self.start]


def _count_common(left: Ids, right: Ids) -> int:
    count = min(len(left), len(right))
    for begin in range(0, count, _BLOCK):
        end = min(begin + _BLOCK, count)
        differs: NDArray[np.bool_] = left[begin:end] != right[begin:end]
        place = int(differs.argmax())
        if differs[place]:
            return begin + place
    return count


def as_ids(values: Any, call_id: str, field: str) -> Ids:
    """Token ids as int32, without a copy where they are that already.

    Raises:
      ValueError: not a list of integers in [0, 2**31); names call and field. Records refuse such
        values when they are made, but let them be assigned later.
    """
    if isinstance(values, np.ndarray) and values.dtype == np.int32 and values.ndim == 1:
        return values
    array = np.asarray(values)
    if array.ndim == 1 and not array.size:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"call {call_id!r}: {field} is not a list of integers")
    if array.min() < 0 or array.max() >= 1 << 31:
        raise ValueError(f"call {call_id!r}: {field} has a token id outside [0, 2**31)")
    return array.astype(np.int32)
