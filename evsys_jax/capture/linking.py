"""Links: the decision of each record about its parent, checked against tokens."""

from __future__ import annotations

from collections.abc import Iterable

from evsys_jax.capture.lineage import Call
from evsys_jax.capture.stamps import Stamps
from evsys_jax.capture.tokentree import MarkIndex, TokenTree


class Linker:
    """Joins calls to parents, one after the other in order of their prompts' lengths.

    Stricter than NeMo Gym 0.7: a missing parent is recovered only across empty calls of this
    capture, and only to the ancestor that their parent ids lead to; it also bridged lost calls,
    whose policy tokens became prompt. A parent's stamps must agree with its own tokens; there
    they could vouch for other or fewer ones.

    Args:
      tree: where the sequences of all calls are.
      stamps: their digests.
      empties: the calls that generated nothing.
    """

    def __init__(self, tree: TokenTree, stamps: Stamps, empties: Iterable[Call]) -> None:
        self.linked: dict[str, Call] = {}
        self._tree = tree
        self._stamps = stamps
        self._passable = {call.call_id: call for call in empties if not call.contested}
        self._beyond: dict[str, str | None] = {}
        self._sequences: MarkIndex[Call] = MarkIndex(tree)

    def link(self, call: Call) -> None:
        """Decide on the parent of the next call and remember the call."""
        parent, call.note = self._find_parent(call)
        call.boundary = bool(call.note) and not call.note.endswith("_recovered")
        if parent is not None:
            call.parent, call.first = parent, parent.root
            parent.children += 1
        self.linked[call.call_id] = call
        self._sequences.add(call.sequence, call)

    def _find_parent(self, call: Call) -> tuple[Call | None, str]:
        entry = call.entry
        if entry.parent_resolution == "root":
            return None, ""
        if entry.parent_resolution == "unresolved":
            return None, "parent_unresolved"
        if entry.parent_call_id is None:
            return None, "missing_resolution"
        parent = self.linked.get(entry.parent_call_id)
        if parent is not None:
            if self._check(parent, call):
                return parent, ""
            return None, "parent_digest_mismatch"
        recovered = self._recover(entry.parent_call_id, call)
        if recovered is not None:
            return recovered, "parent_call_id_missing_recovered"
        return None, "parent_call_id_missing"

    def _check(self, parent: Call, call: Call) -> bool:
        # Stamps never win over tokens: they must be those of the parent's own sequence, and the
        # prompt must begin with that sequence.
        stamps = parent.entry
        return (
            (stamps.cum_len is None or stamps.cum_len == parent.sequence[1])
            and self._tree.begins_with(call.prompt, parent.sequence)
            and (not stamps.digest or stamps.digest == self._stamps.digest(parent.sequence))
        )

    def _recover(self, parent_id: str, call: Call) -> Call | None:
        # Only across empty calls: what a lost call had generated would turn into prompt.
        ancestor_id = self._pass_empties(parent_id)
        ancestor = None if ancestor_id is None else self.linked.get(ancestor_id)
        if ancestor is None:
            return None
        holders = self._sequences.find_deepest(call.prompt)
        if len(holders) != 1 or holders[0] is not ancestor or not self._check(ancestor, call):
            return None
        return ancestor

    def _pass_empties(self, call_id: str) -> str | None:
        passed: list[str] = []
        current: str | None = call_id
        while current is not None and current in self._passable:
            if current in self._beyond:
                current = self._beyond[current]
                break
            self._beyond[current] = None  # what a walk that comes round finds
            passed.append(current)
            current = self._passable[current].entry.parent_call_id
        self._beyond.update(dict.fromkeys(passed, current))
        return current
