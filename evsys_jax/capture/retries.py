"""Retries: calls of one parent with the same prompt, of which the harness kept one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from evsys_jax.capture.lineage import Call
from evsys_jax.capture.tokentree import Mark


def set_retries_aside(calls: Iterable[Call], terminal_path: Sequence[Call]) -> list[str]:
    """Quarantine the retries that were not kept; what follows them stays as it is.

    Of each group the call on the terminal path is kept; without one, all that were continued;
    without any, the one with the smallest id.

    Args:
      calls: linked calls in order; their `quarantined` is set.
      terminal_path: the calls from the root to the terminal, empty where it is not linked.

    Returns:
      Ids of the groups where nothing tells which answer was kept, while no terminal is linked.
    """
    groups: dict[int, dict[Mark, list[Call]]] = {}
    for call in calls:
        siblings = groups.setdefault(0 if call.parent is None else id(call.parent), {})
        siblings.setdefault(call.prompt, []).append(call)
    on_path = {id(call) for call in terminal_path}
    unresolved: list[str] = []
    for siblings in groups.values():
        for group in siblings.values():
            if len(group) == 1:
                continue
            kept = [call for call in group if id(call) in on_path]
            kept = kept or [call for call in group if call.children]
            if not kept:
                kept = [min(group, key=lambda call: call.call_id)]
                if not terminal_path:
                    unresolved += [call.call_id for call in group]
            kept_ids = {id(call) for call in kept}
            for call in group:
                call.quarantined = id(call) not in kept_ids
    return unresolved
