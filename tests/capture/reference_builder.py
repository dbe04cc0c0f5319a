"""The builder once more, with lists and loops: slow, and written to be compared with the rules."""

from __future__ import annotations

from collections import Counter
from typing import Any

from evsys_jax.capture.records import TokenEntry, compute_digest


def build_by_reference(entries: list[TokenEntry], terminal_id: str | None = None) -> dict[str, Any]:
    """Build chains; sequences are lists, every question is answered by comparing them."""
    first: dict[str, TokenEntry] = {}
    conflicts = []
    for entry in entries:
        kept = first.setdefault(entry.model_call_id, entry)
        if _facts(kept) != _facts(entry):
            conflicts.append(entry.model_call_id)

    whole = {name: _rebuild(entry, first) for name, entry in first.items()}
    broken = []
    for name, entry in first.items():
        sequence = whole[name]
        stale = entry.prompt_is_delta and entry.digest and sequence is not None
        if sequence is None or (stale and entry.digest != compute_digest(sequence)):
            broken.append(name)
    good = {name: whole[name] or [] for name in first if name not in broken}
    prompt = {
        name: sequence[: len(sequence) - len(first[name].generation_token_ids)]
        for name, sequence in good.items()
    }
    order = sorted(good, key=lambda name: (len(prompt[name]), name))
    empties = [name for name in order if not len(first[name].generation_token_ids)]
    calls = [name for name in order if name not in empties]
    if not calls:
        return {
            "chains": [],
            "terminal_chain": "" if terminal_id is None else "not_captured",
            "unresolved_parent_calls": broken,
            "failures": {"delta_chain_unreconstructable": len(broken)} if broken else {},
        }

    failures = Counter({"duplicate_call_id_conflict": len(conflicts)})
    failures["delta_chain_unreconstructable"] = len(broken)
    parents: dict[str, str | None] = {}
    boundaries = []

    def fits(parent: str, call: str) -> bool:
        stamps, sequence = first[parent], good[parent]
        return (
            (stamps.cum_len is None or stamps.cum_len == len(sequence))
            and (not stamps.digest or stamps.digest == compute_digest(sequence))
            and prompt[call][: len(sequence)] == sequence
        )

    def recover(call: str) -> str | None:
        seen, current = set(), first[call].parent_call_id
        if current not in empties or current in conflicts:
            return None
        while current in empties and current not in conflicts and current not in seen:
            seen.add(current)
            current = first[current].parent_call_id
        if current not in parents:
            return None
        fitting = [each for each in parents if prompt[call][: len(good[each])] == good[each]]
        longest = max((len(good[each]) for each in fitting), default=0)
        holders = [each for each in fitting if len(good[each]) == longest]
        return current if holders == [current] and fits(current, call) else None

    for call in calls:
        entry, parent, note = first[call], None, ""
        if entry.parent_resolution == "unresolved":
            note = "parent_unresolved"
        elif entry.parent_resolution != "root":
            claimed = entry.parent_call_id
            if claimed is None:
                note = "missing_resolution"
            elif claimed in parents:
                parent = claimed if fits(claimed, call) else None
                note = "" if parent else "parent_digest_mismatch"
            else:
                parent = recover(call)
                note = "parent_call_id_missing" + ("_recovered" if parent else "")
        parents[call] = parent
        if note:
            failures[note] += 1
        if note and not note.endswith("_recovered"):
            boundaries.append(call)

    def path(call: str | None) -> list[str]:
        calls_up = []
        while call is not None:
            calls_up.append(call)
            call = parents[call]
        return calls_up[::-1]

    terminal_path = path(terminal_id) if terminal_id in parents else []
    quarantined, retries = [], []
    for parent in dict.fromkeys(parents[call] for call in calls):
        siblings = [call for call in calls if parents[call] == parent]
        for text in dict.fromkeys(tuple(prompt[call]) for call in siblings):
            group = [call for call in siblings if tuple(prompt[call]) == text]
            if len(group) < 2:
                continue
            kept = [call for call in group if call in terminal_path]
            kept = kept or [call for call in group if call in parents.values()]
            if not kept:
                kept = [min(group)]
                retries += [] if terminal_path else group
            quarantined += [call for call in group if call not in kept]

    verdict = "" if terminal_id is None else "not_captured"
    if terminal_path:
        spoils = {*boundaries, *quarantined, *conflicts}
        verdict = "broken" if spoils & set(terminal_path) else "delivered"
    chains = [terminal_path] if verdict == "delivered" else []
    for call in calls:
        if call in parents.values() or set(path(call)) & set(quarantined):
            continue
        if not (verdict == "delivered" and terminal_id in path(call)):
            chains.append(path(call))
    main = chains[0]
    if verdict != "delivered":
        main = min(chains, key=lambda chain: (first[chain[0]].created_at, chain[0]))
    captured = sum(len(first[call].generation_token_ids) for call in calls)
    delivered = sum(len(first[call].generation_token_ids) for call in main)
    return {
        "chains": chains,
        "main": main,
        "main_tokens": good[main[-1]],
        "prompts": [prompt[call] for call in main],
        "quarantined": sorted(quarantined),
        "roots": [parents[call] for call in calls].count(None),
        "captured": captured,
        "delivered": delivered,
        "fraction": round(delivered / captured, 4),
        "terminal_chain": verdict,
        "unresolved_retries": retries,
        "unresolved_parent_calls": [*conflicts, *broken, *boundaries],
        "empty": empties,
        "failures": {name: count for name, count in failures.items() if count},
    }


def _facts(entry: TokenEntry) -> tuple[Any, ...]:
    return (
        list(entry.prompt_token_ids),
        list(entry.generation_token_ids),
        list(entry.generation_log_probs),
        entry.response_id,
        entry.prompt_is_delta,
        entry.parent_call_id if entry.prompt_is_delta else None,
    )


def _rebuild(entry: TokenEntry, first: dict[str, TokenEntry]) -> list[int] | None:
    lineage = [entry]
    while lineage[-1].prompt_is_delta:
        above = first.get(lineage[-1].parent_call_id or "")
        if above is None or above in lineage:
            return None
        lineage.append(above)
    sequence: list[int] = []
    for each in reversed(lineage):
        sequence += [*map(int, each.prompt_token_ids), *map(int, each.generation_token_ids)]
    return sequence
