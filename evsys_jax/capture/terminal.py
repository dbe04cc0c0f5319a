"""Which call's response was scored.

Up to four witnesses name a call: the caller, the harness's declared response id, the id of the
scored response, and its content. They must agree; a witness that cannot speak abstains.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from evsys_jax.capture.fingerprint import (
    FINGERPRINT_VERSION,
    assistant_fingerprint,
    is_model_authored,
)
from evsys_jax.capture.records import TokenEntry

_DISAGREEMENT = "witness_disagreement["


@dataclass(frozen=True)
class TerminalAttribution:
    """The call that the witnesses agree on.

    Args:
      model_call_id: the call, or None where nobody was attributed.
      method: the first witness: `explicit`, `declared`, `response_id`, `content_cumulative` or
        `content_output`; "" where nobody was attributed.
      reason: why each other witness abstained, and who corroborated, joined by commas.
    """

    model_call_id: str | None = None
    method: str = ""
    reason: str = ""

    @property
    def attributed(self) -> bool:
        """Whether a call was named."""
        return self.model_call_id is not None

    @property
    def disagreed(self) -> bool:
        """Whether the witnesses named different calls."""
        return not self.attributed and _DISAGREEMENT in self.reason


def resolve_terminal(
    entries: Sequence[TokenEntry],
    response: Any,
    explicit_call_id: str | None = None,
    *,
    declared_response_id: str | None = None,
) -> TerminalAttribution:
    """Find the call whose response was scored, if the witnesses agree on one.

    Stricter than NeMo Gym 0.7: contradicting witnesses are reported as such, and the consumer
    masks the rollout. More patient than it in one place: malformed content of the response or
    of a record costs that one reading, not every witness.

    Args:
      entries: the captured records, repeats included.
      response: the scored response as an object (dict); anything else is no response.
      explicit_call_id: the caller's own word for the call.
      declared_response_id: the response id that the harness says it kept. One that names no call,
        or several different ones, ends the attribution, whatever the others say.

    Returns:
      The attribution. Never an error for malformed content.
    """
    reasons: list[str] = []
    witnesses: list[tuple[str, TokenEntry]] = []
    if explicit_call_id:
        named = [entry for entry in entries if entry.model_call_id == explicit_call_id]
        if named:
            witnesses.append(("explicit", named[-1]))
        else:
            reasons.append("explicit_terminal_not_captured")
    if declared_response_id:
        named = [entry for entry in entries if entry.response_id == declared_response_id]
        declared = _collapse(named)
        if declared is None:
            reasons.append("declared_ambiguous" if named else "declared_terminal_not_captured")
            return TerminalAttribution(reason=",".join(reasons))
        witnesses.append(("declared", declared))
    if isinstance(response, dict):
        for witness, reason in (
            _read_response_id(entries, response.get("id")),
            _read_content(entries, response.get("output")),
        ):
            if witness is not None:
                witnesses.append(witness)
            else:
                reasons.append(reason)
    else:
        reasons.append("no_response_object")
    return _agree(witnesses, reasons)


_Witness = tuple[str, TokenEntry]


def _agree(witnesses: list[_Witness], reasons: list[str]) -> TerminalAttribution:
    if not witnesses:
        return TerminalAttribution(reason=",".join(reasons))
    if _collapse([entry for _, entry in witnesses]) is None:
        words = ";".join(f"{method}={entry.model_call_id}" for method, entry in witnesses)
        return TerminalAttribution(reason=",".join([*reasons, f"{_DISAGREEMENT}{words}]"]))
    if len(witnesses) > 1:
        reasons = [*reasons, "corroborated_by=" + "+".join(method for method, _ in witnesses[1:])]
    method, entry = witnesses[0]
    return TerminalAttribution(entry.model_call_id, method, ",".join(reasons))


def _read_response_id(
    entries: Sequence[TokenEntry], response_id: Any
) -> tuple[_Witness | None, str]:
    if not response_id:
        return None, "response_has_no_id"
    text = str(response_id)
    named = [entry for entry in entries if entry.response_id and entry.response_id == text]
    entry = _collapse(named)
    if entry is None:
        return None, "response_id_ambiguous" if named else "response_id_no_match"
    return ("response_id", entry), ""


def _read_content(entries: Sequence[TokenEntry], output: Any) -> tuple[_Witness | None, str]:
    if not isinstance(output, list) or not output:
        return None, "response_has_no_output"
    items = [item for item in output if isinstance(item, dict)]
    target = _try_fingerprint(items)
    if target is None:
        return None, "response_output_unfingerprintable"
    if not target:
        return None, "no_model_authored_output"
    tail_start = len(items)
    while tail_start and is_model_authored(items[tail_start - 1]):
        tail_start -= 1
    own_targets = {target}
    if 0 < tail_start < len(items):
        own_targets.add(assistant_fingerprint(items[tail_start:]))

    matches: dict[str, TokenEntry] = {}
    cumulative = False
    for entry in entries:
        if entry.continuation_fingerprint == target and entry.fingerprint_version in (
            None,
            FINGERPRINT_VERSION,
        ):
            cumulative = True
            matches[entry.model_call_id] = entry
        elif _try_fingerprint(entry.output_items) in own_targets:
            matches[entry.model_call_id] = entry
    entry_found = _collapse(matches.values())
    if entry_found is None:
        return None, "content_ambiguous" if matches else "no_content_match"
    return ("content_cumulative" if cumulative else "content_output", entry_found), ""


def _try_fingerprint(items: Any) -> str | None:
    # None is the reading that failed. Whatever goes wrong inside foreign content, it costs this
    # one reading and no more.
    try:
        return assistant_fingerprint(items)
    except Exception:
        return None


def _collapse(entries: Iterable[TokenEntry]) -> TokenEntry | None:
    candidates = list(entries)
    if not candidates:
        return None
    if len(candidates) > 1 and len({_identity(entry) for entry in candidates}) > 1:
        return None
    return min(candidates, key=lambda entry: entry.model_call_id)


def _identity(entry: TokenEntry) -> tuple[Any, ...]:
    if entry.digest and entry.cum_len is not None:
        return "stamp", entry.digest, entry.cum_len
    return "tokens", _to_bytes(entry.prompt_token_ids), _to_bytes(entry.generation_token_ids)


def _to_bytes(token_ids: Any) -> bytes:
    return np.asarray(token_ids, np.int64).tobytes()
