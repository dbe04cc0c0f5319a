"""Records to calls: one per id, deltas made whole, each with its place in one token tree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from evsys_jax.capture.records import TokenEntry
from evsys_jax.capture.stamps import Stamps
from evsys_jax.capture.tokentree import START, Ids, Mark, TokenTree, as_ids


@dataclass(slots=True, eq=False)
class Call:
    """One captured call and what the builder finds out about it.

    Args:
      entry: its record, the first copy, as stored.
      prompt: mark of the whole prompt.
      sequence: mark of the whole prompt and the generation.
      contested: its id has a second copy that says something else.
      parent: the call that it was linked to, None for a root.
      first: the first call of its path; None for a root, since one that referred to itself would
        be kept, with its record, until the garbage collector comes round.
      children: how many calls are linked to it.
      note: what was odd about its link.
      boundary: it starts a fragment without being known to be a root.
      quarantined: a retry that was not kept.
      spoiled: it or a call above it is quarantined.
    """

    entry: TokenEntry
    prompt: Mark
    sequence: Mark
    contested: bool = False
    parent: Call | None = None
    first: Call | None = None
    children: int = 0
    note: str = ""
    boundary: bool = False
    quarantined: bool = False
    spoiled: bool = False

    @property
    def root(self) -> Call:
        """The first call of its path, itself for a root."""
        return self if self.first is None else self.first

    @property
    def call_id(self) -> str:
        """The id of the call."""
        return self.entry.model_call_id

    @property
    def generated(self) -> int:
        """How many tokens it generated."""
        return self.sequence[1] - self.prompt[1]

    def path(self) -> list[Call]:
        """The calls from the root down to this one."""
        calls = [self]
        while calls[-1].parent is not None:
            calls.append(calls[-1].parent)
        return calls[::-1]


@dataclass(slots=True)
class Placement:
    """What `place_calls` made of the records.

    Args:
      tree: every sequence.
      stamps: their digests.
      calls: the calls in record order, empty ones included, broken ones not.
      broken: records of the deltas that cannot be rebuilt, in record order.
      conflicts: the call id of every copy that disagrees with the first one.
    """

    tree: TokenTree
    stamps: Stamps
    calls: list[Call]
    broken: list[TokenEntry]
    conflicts: list[str]


def place_calls(entries: Iterable[TokenEntry]) -> Placement:
    """Keep one record per call id and rebuild the sequence of each.

    A delta's sequence is its parent's sequence, its own suffix and its own generation, through
    empty calls as well. Lineages may be of any depth and in any order; the work is linear in the
    tokens stored, except that every stamped digest covers its whole sequence.

    Stricter than NeMo Gym 0.7: copies that differ in log-probs, response id or kind of prompt are
    conflicts, too. It gave up on lineages of more than 10,000 calls in some file orders.

    Args:
      entries: the records, repeats included. The first copy of a call id is kept.

    Returns:
      The calls and their places. A delta is broken if its parent ids leave the capture, come
      round, or if its digest is not that of the rebuilt sequence.

    Raises:
      ValueError: token ids are no integers in [0, 2**31).
    """
    first: dict[str, TokenEntry] = {}
    conflicts: list[str] = []
    for entry in entries:
        kept = first.setdefault(entry.model_call_id, entry)
        if kept is not entry and not _say_the_same(kept, entry):
            conflicts.append(entry.model_call_id)

    tree = TokenTree()
    marks: dict[str, tuple[Mark, Mark] | None] = {}
    for entry in first.values():
        _place(entry, first, tree, marks)

    contested = frozenset(conflicts)
    stamps = Stamps(tree)
    stamps.hash_ahead(_stamped_marks(first, marks))
    placement = Placement(tree, stamps, [], [], conflicts)
    for call_id, entry in first.items():
        placed = marks[call_id]
        if placed is None or (
            entry.prompt_is_delta and entry.digest and entry.digest != stamps.digest(placed[1])
        ):
            placement.broken.append(entry)
        else:
            placement.calls.append(Call(entry, *placed, contested=call_id in contested))
    return placement


def _stamped_marks(
    first: dict[str, TokenEntry], marks: dict[str, tuple[Mark, Mark] | None]
) -> Iterator[Mark]:
    """The sequences whose stamped digest will be checked: of deltas and of parents."""
    parents = {entry.parent_call_id for entry in first.values()}
    for call_id, entry in first.items():
        placed = marks[call_id]
        if placed is not None and entry.digest and (entry.prompt_is_delta or call_id in parents):
            yield placed[1]


def _place(
    entry: TokenEntry,
    first: dict[str, TokenEntry],
    tree: TokenTree,
    marks: dict[str, tuple[Mark, Mark] | None],
) -> None:
    waiting: list[TokenEntry] = []
    current: TokenEntry | None = entry
    while current is not None and current.model_call_id not in marks:
        # None stands for "cannot be rebuilt", which a walk that comes round to here then finds.
        marks[current.model_call_id] = None
        waiting.append(current)
        if not current.prompt_is_delta:
            break
        parent_id = current.parent_call_id
        current = None if parent_id is None else first.get(parent_id)
    while waiting:
        call = waiting.pop()
        call_id = call.model_call_id
        begin: Mark = START
        if call.prompt_is_delta:
            above = None if call.parent_call_id is None else marks.get(call.parent_call_id)
            if above is None:
                continue
            begin = above[1]
        prompt = tree.extend(begin, as_ids(call.prompt_token_ids, call_id, "prompt_token_ids"))
        marks[call_id] = prompt, tree.extend(prompt, _generation(call))


def _generation(entry: TokenEntry) -> Ids:
    return as_ids(entry.generation_token_ids, entry.model_call_id, "generation_token_ids")


def _say_the_same(left: TokenEntry, right: TokenEntry) -> bool:
    return (
        left.prompt_is_delta == right.prompt_is_delta
        and left.response_id == right.response_id
        and (not left.prompt_is_delta or left.parent_call_id == right.parent_call_id)
        and np.array_equal(left.prompt_token_ids, right.prompt_token_ids)
        and np.array_equal(left.generation_token_ids, right.generation_token_ids)
        and np.array_equal(left.generation_log_probs, right.generation_log_probs)
    )
