"""From captured calls to chains: who continued whom, which retry was kept, which chain counts.

The decision a record carries is checked against tokens at every link; nothing is guessed. The
order of the records does not matter, and apart from the choice of the main chain neither do
their times.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, overload

from evsys_jax.capture.lineage import Call, Placement, place_calls
from evsys_jax.capture.linking import Linker
from evsys_jax.capture.records import TokenEntry
from evsys_jax.capture.retries import set_retries_aside
from evsys_jax.capture.tokentree import Ids, TokenTree

PREFIX_MERGING = "prefix_merging"


@dataclass(frozen=True, eq=False)
class ChainLink:
    """One call of a chain.

    Args:
      entry: its record with the whole prompt, never a delta.
      interstitial: what its prompt has behind the sequence of the call before; empty for the
        first.
    """

    entry: TokenEntry
    interstitial: Ids


@dataclass(frozen=True, eq=False)
class Chain:
    """A run of calls from a root, each continuing the one before.

    Args:
      chain_id: `main`, `branch-0`, `branch-1`, ...
      links: the calls in order, made when they are first looked at.
      root_prompt: the whole prompt of the first call.
    """

    chain_id: str
    links: Sequence[ChainLink]
    root_prompt: Ids


@dataclass(frozen=True)
class BuildNotes:
    """What the builder counted and found odd.

    Args:
      builder: the name of the algorithm.
      roots: calls without a parent, quarantined ones too.
      chains: number of chains.
      generated_tokens_captured: of all calls that generated something.
      generated_tokens_delivered: of the main chain.
      delivered_fraction: delivered / captured, to four places.
      terminal_call_id: the terminal asked for.
      terminal_chain: `delivered`, `broken`, `not_captured`, or "" without a terminal.
      unresolved_retries: retries of which none is known to be the one that was kept.
      unresolved_parent_calls: conflicts, broken deltas, and calls that start a fragment.
      empty_generation_calls: calls that generated nothing.
      parent_link_failures: how often each kind of oddity occurred.
    """

    builder: str = PREFIX_MERGING
    roots: int = 0
    chains: int = 0
    generated_tokens_captured: int = 0
    generated_tokens_delivered: int = 0
    delivered_fraction: float = 0.0
    terminal_call_id: str | None = None
    terminal_chain: str = ""
    unresolved_retries: list[str] = field(default_factory=list)
    unresolved_parent_calls: list[str] = field(default_factory=list)
    empty_generation_calls: list[str] = field(default_factory=list)
    parent_link_failures: dict[str, int] = field(default_factory=dict)


class CallReport(NamedTuple):
    """One captured call, for people who look at a capture.

    Args:
      call_id: the call.
      claimed_parent_id: what its record says.
      parent_id: the call it was linked to.
      prompt_length: of the whole prompt; 0 for a broken delta.
      generated: number of generated tokens.
      note: what was odd about its link, "" if nothing.
      empty: generated nothing, set aside.
      quarantined: a retry that was not kept.
      contested: a second copy of it disagrees.
      broken: a delta that cannot be rebuilt.
    """

    call_id: str
    claimed_parent_id: str | None
    parent_id: str | None
    prompt_length: int
    generated: int
    note: str = ""
    empty: bool = False
    quarantined: bool = False
    contested: bool = False
    broken: bool = False


@dataclass(frozen=True, eq=False)
class BuildOutput:
    """The chains of one rollout.

    Args:
      chains: the terminal chain first, if there is one.
      quarantined: ids of the retries that were not kept.
      notes: counts and oddities.
      calls: a report on every call.
    """

    chains: list[Chain]
    quarantined: list[str]
    notes: BuildNotes
    calls: Sequence[CallReport] = ()


def run_builder(
    entries: Iterable[TokenEntry],
    builder: str = PREFIX_MERGING,
    terminal_call_id: str | None = None,
) -> BuildOutput:
    """Build chains with the algorithm of that name; `prefix_merging` is the only one.

    Raises:
      ValueError: another name, or whatever that algorithm raises.
    """
    if builder != PREFIX_MERGING:
        raise ValueError(f"unknown builder {builder!r}; there is {PREFIX_MERGING!r} only")
    return prefix_merging(entries, terminal_call_id)


def prefix_merging(
    entries: Iterable[TokenEntry], terminal_call_id: str | None = None
) -> BuildOutput:
    """Join calls to chains where a prompt begins with everything its parent saw and wrote.

    Stricter than NeMo Gym 0.7 in three places: a parent that is missing is recovered only across
    empty calls of this capture, and only to the ancestor that their parent ids lead to; a
    parent's stamps must agree with its own tokens; a contested call breaks the delivered chain.

    Args:
      entries: the records, repeats included.
      terminal_call_id: the call whose response was scored, if it is known.

    Returns:
      Chains, quarantined calls and notes. Work and memory are about linear in the tokens.

    Raises:
      ValueError: token ids are no integers in [0, 2**31).
    """
    placement = place_calls(entries)
    broken = [entry.model_call_id for entry in placement.broken]
    order = sorted(placement.calls, key=lambda call: (call.prompt[1], call.call_id))
    empties = [call for call in order if not call.generated]
    calls = [call for call in order if call.generated]
    empty_ids = [call.call_id for call in empties]
    if not calls:
        notes = BuildNotes(
            terminal_call_id=terminal_call_id,
            terminal_chain="" if terminal_call_id is None else "not_captured",
            unresolved_parent_calls=broken,
            empty_generation_calls=empty_ids,
            parent_link_failures={_BROKEN: len(broken)} if broken else {},
        )
        return BuildOutput([], [], notes, _report(placement))

    linker = Linker(placement.tree, placement.stamps, empties)
    for call in calls:
        linker.link(call)
    failures = Counter({_CONFLICT: len(placement.conflicts), _BROKEN: len(broken)})
    failures.update(call.note for call in calls if call.note)
    unresolved_parents = [*placement.conflicts, *broken]
    unresolved_parents += [call.call_id for call in calls if call.boundary]

    terminal = None if terminal_call_id is None else linker.linked.get(terminal_call_id)
    terminal_path = terminal.path() if terminal else []
    unresolved_retries = set_retries_aside(calls, terminal_path)
    verdict = "" if terminal_call_id is None else "not_captured"
    if terminal:
        broken_path = any(c.boundary or c.quarantined or c.contested for c in terminal_path)
        verdict = "broken" if broken_path else "delivered"

    ends, main = _choose_chains(calls, terminal if verdict == "delivered" else None)
    captured = sum(call.generated for call in calls)
    delivered = sum(call.generated for call in main.path()) if main else 0
    notes = BuildNotes(
        roots=sum(call.parent is None for call in calls),
        chains=len(ends),
        generated_tokens_captured=captured,
        generated_tokens_delivered=delivered,
        delivered_fraction=round(delivered / captured, 4),
        terminal_call_id=terminal_call_id,
        terminal_chain=verdict,
        unresolved_retries=unresolved_retries,
        unresolved_parent_calls=unresolved_parents,
        empty_generation_calls=empty_ids,
        parent_link_failures={name: count for name, count in failures.items() if count},
    )
    quarantined = [call.call_id for call in calls if call.quarantined]
    return BuildOutput(
        _make_chains(placement.tree, ends, main), quarantined, notes, _report(placement)
    )


def iter_chain_entries(chains: Iterable[Chain]) -> Iterator[TokenEntry]:
    """The records of all chains; one that several built chains share comes once."""
    seen: set[int] = set()
    for chain in chains:
        if isinstance(chain.links, _CallLinks):
            # Chains of one build form a tree: above a call that was seen, all were seen.
            call: Call | None = chain.links.end
            while call is not None and id(call) not in seen:
                seen.add(id(call))
                yield call.entry
                call = call.parent
        else:
            yield from (link.entry for link in chain.links)


def last_call_id(chain: Chain) -> str:
    """The id of the call that a chain ends with."""
    if isinstance(chain.links, _CallLinks):
        return chain.links.end.call_id
    return chain.links[-1].entry.model_call_id


_CONFLICT = "duplicate_call_id_conflict"
_BROKEN = "delta_chain_unreconstructable"


def _choose_chains(calls: list[Call], terminal: Call | None) -> tuple[list[Call], Call | None]:
    ends = [] if terminal is None else [terminal]
    beyond: set[int] = set()
    for call in calls:  # parents come before their children
        call.spoiled = call.quarantined or (call.parent is not None and call.parent.spoiled)
        if call is terminal or (call.parent is not None and id(call.parent) in beyond):
            beyond.add(id(call))
        elif not call.children and not call.spoiled:
            ends.append(call)
    if terminal is not None:
        return ends, terminal
    return ends, min(ends, key=_start_of, default=None)


def _start_of(end: Call) -> tuple[float, str]:
    return end.root.entry.created_at, end.root.call_id


def _make_chains(tree: TokenTree, ends: list[Call], main: Call | None) -> list[Chain]:
    prompts: dict[int, Ids] = {}
    chains = []
    branches = count()
    for end in ends:
        root = end.root
        if id(root) not in prompts:
            prompts[id(root)] = tree.tokens(root.prompt)
        chain_id = "main" if end is main else f"branch-{next(branches)}"
        chains.append(Chain(chain_id, _CallLinks(tree, end), prompts[id(root)]))
    return chains


class _CallLinks(Sequence[ChainLink]):
    """The links down to one call, made on first use: many chains may share a long beginning."""

    def __init__(self, tree: TokenTree, end: Call) -> None:
        self.end = end
        self._tree = tree
        self._links: list[ChainLink] | None = None

    def _make(self) -> list[ChainLink]:
        if self._links is None:
            # Every prompt of the chain is a beginning of this one array.
            tokens = self._tree.tokens(self.end.sequence)
            done = None
            self._links = []
            for call in self.end.path():
                prompt = tokens[: call.prompt[1]]
                entry = call.entry
                if entry.prompt_is_delta:
                    entry = copy.copy(entry)
                    entry.prompt_token_ids = prompt
                    entry.prompt_is_delta = False
                self._links.append(ChainLink(entry, prompt[done:] if done else prompt[:0]))
                done = call.sequence[1]
        return self._links

    @overload
    def __getitem__(self, index: int) -> ChainLink: ...
    @overload
    def __getitem__(self, index: slice) -> list[ChainLink]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._make()[index]

    def __iter__(self) -> Iterator[ChainLink]:
        return iter(self._make())

    def __len__(self) -> int:
        return len(self._make())


def _report(placement: Placement) -> list[CallReport]:
    reports = [
        CallReport(
            call_id=call.call_id,
            claimed_parent_id=call.entry.parent_call_id,
            parent_id=call.parent.call_id if call.parent else None,
            prompt_length=call.prompt[1],
            generated=call.generated,
            note=call.note,
            empty=not call.generated,
            quarantined=call.quarantined,
            contested=call.contested,
        )
        for call in placement.calls
    ]
    contested = frozenset(placement.conflicts)
    reports += [
        CallReport(
            call_id=entry.model_call_id,
            claimed_parent_id=entry.parent_call_id,
            parent_id=None,
            prompt_length=0,
            generated=len(entry.generation_token_ids),
            contested=entry.model_call_id in contested,
            broken=True,
        )
        for entry in placement.broken
    ]
    return reports
