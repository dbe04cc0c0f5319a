"""The captured calls of a rollout as a tree that reads from top to bottom.

A conversation is a long trunk with a few short branches. The trunk stays at one depth, however
many turns it has; what leaves it is shown right below the call that it left, one step deeper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from evsys_jax.capture.build import RolloutBuild
from evsys_jax.capture.builder import CallReport


@dataclass(frozen=True, slots=True)
class ShownCall:
    """One call in its place.

    Args:
      call_id: the call.
      parent_id: the call that it continues; of a call that was set aside, the one it claims.
      prompt_length: of the whole prompt; 0 where it is not known.
      generated: number of generated tokens.
      claimed_parent_id: what its record says.
      depth: how many branches lead to it.
      branches: it is the first call of its branch.
      on_chain: it is part of the chain that counts.
      terminal: it is the scored call.
      chain: the chain that ends with it, or "".
      note: what is odd about its link, or "".
      empty: it generated nothing.
      retry: `kept` or `quarantined` where another call answered the same prompt, `unresolved`
        where nothing tells which answer was kept, "" where there is no other.
      contested: a second copy of it disagrees.
      broken: a delta that cannot be rebuilt.
    """

    call_id: str
    parent_id: str | None
    prompt_length: int
    generated: int
    claimed_parent_id: str | None = None
    depth: int = 0
    branches: bool = False
    on_chain: bool = False
    terminal: bool = False
    chain: str = ""
    note: str = ""
    empty: bool = False
    retry: str = ""
    contested: bool = False
    broken: bool = False


def arrange_calls(build: RolloutBuild) -> list[ShownCall]:
    """Put the calls of a build in the order in which they are shown.

    Args:
      build: of one rollout.

    Returns:
      Every call once, parents before their children, and a branch before the trunk goes on.
    """
    on_chain = {span.call_id for span in build.spans}
    ends = {call_id: chain for chain, call_id in build.chains}
    retries = _find_retries(build)
    calls = {
        report.call_id: ShownCall(
            report.call_id,
            None,
            report.prompt_length,
            report.generated,
            report.claimed_parent_id,
            on_chain=report.call_id in on_chain,
            terminal=report.call_id == build.attribution.model_call_id,
            chain=ends.get(report.call_id, ""),
            note=report.note,
            empty=report.empty,
            retry=retries.get(report.call_id, ""),
            contested=report.contested,
            broken=report.broken,
        )
        for report in build.calls
    }
    parents = _find_parents(build.calls, calls)
    return _lay_out({key: replace(calls[key], parent_id=parents[key]) for key in calls})


def _find_retries(build: RolloutBuild) -> dict[str, str]:
    found = {call.call_id: "quarantined" for call in build.calls if call.quarantined}
    prompts = {(call.parent_id, call.prompt_length) for call in build.calls if call.quarantined}
    answers: dict[tuple[str | None, int], list[str]] = {}
    for call in build.calls:
        prompt = call.parent_id, call.prompt_length
        if prompt in prompts and not (call.quarantined or call.empty or call.broken):
            answers.setdefault(prompt, []).append(call.call_id)
    for kept in answers.values():
        # Of several, some may answer another prompt of the same length.
        if len(kept) == 1:
            found[kept[0]] = "kept"
    return found | dict.fromkeys(build.unresolved_retries, "unresolved")


def _find_parents(
    reports: Sequence[CallReport], calls: Mapping[str, ShownCall]
) -> dict[str, str | None]:
    """Return under which call each is shown; no call is its own ancestor."""
    parents: dict[str, str | None] = {}
    for report in reports:
        parent = report.parent_id
        if parent is None and (report.empty or report.broken):
            parent = report.claimed_parent_id if report.claimed_parent_id in calls else None
        parents[report.call_id] = parent
    settled: set[str] = set()
    for call_id in parents:
        walk: dict[str, None] = {}
        current: str | None = call_id
        while current is not None and current not in settled:
            walk[current] = None
            above = parents[current]
            if above in walk:  # the claims come round
                parents[current] = above = None
            current = above
        settled.update(walk)
    return parents


def _lay_out(calls: Mapping[str, ShownCall]) -> list[ShownCall]:
    children: dict[str | None, list[str]] = {}
    for call in sorted(calls.values(), key=lambda call: (call.prompt_length, call.broken)):
        children.setdefault(call.parent_id, []).append(call.call_id)
    heights = _measure(calls, children)

    def is_trunk(call_id: str) -> tuple[bool, bool, int]:
        call = calls[call_id]
        aside = call.empty or call.broken or call.retry == "quarantined"
        return call.on_chain, not aside, heights[call_id]

    roots = sorted(children.get(None, ()), key=is_trunk, reverse=True)
    shown: list[ShownCall] = []
    stack = [(root, 0, False) for root in reversed(roots)]
    while stack:
        call_id, depth, branches = stack.pop()
        shown.append(replace(calls[call_id], depth=depth, branches=branches))
        below = children.get(call_id, [])
        if not below:
            continue
        trunk = max(below, key=is_trunk)
        stack.append((trunk, depth, False))
        sides = [child for child in below if child != trunk]
        stack += [(child, depth + 1, True) for child in reversed(sides)]
    return shown


def _measure(
    calls: Mapping[str, ShownCall], children: Mapping[str | None, list[str]]
) -> dict[str, int]:
    """Count the calls on the longest way down from each."""
    order = list(children.get(None, ()))
    for call_id in order:  # grows on the way
        order += children.get(call_id, ())
    heights = dict.fromkeys(order, 1)
    for call_id in reversed(order):
        parent = calls[call_id].parent_id
        if parent is not None:
            heights[parent] = max(heights[parent], heights[call_id] + 1)
    return heights
