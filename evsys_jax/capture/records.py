"""Records of model calls: their types, their stamps, and where their tokens come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evsys_jax.capture.checks import checked_token_ids, field_error
from evsys_jax.capture.digests import DIGEST_VERSION, compute_digest, encode_token_ids
from evsys_jax.capture.entry import (
    RESOLUTIONS,
    TOKEN_ENTRY_MIN_SCHEMA_VERSION,
    TOKEN_ENTRY_RECORD_SCHEMA_VERSION,
    ParentResolutionStatus,
    TokenEntry,
    TokenIds,
)
from evsys_jax.capture.fingerprint import (
    FINGERPRINT_VERSION,
    assistant_fingerprint,
    conversation_digest,
)
from evsys_jax.capture.responses import (
    TOKEN_FIELDS,
    extract_token_fields,
    response_to_output_items,
    strip_token_fields,
)

__all__ = [
    "DIGEST_VERSION",
    "TOKEN_ENTRY_MIN_SCHEMA_VERSION",
    "TOKEN_ENTRY_RECORD_SCHEMA_VERSION",
    "TOKEN_FIELDS",
    "ParentResolutionStatus",
    "TokenEntry",
    "compute_digest",
    "cumulative_tokens",
    "encode_token_ids",
    "extract_token_fields",
    "response_to_output_items",
    "stamp_continuation",
    "stamp_lineage",
    "strip_token_fields",
]


def cumulative_tokens(entry: TokenEntry) -> NDArray[np.int32]:
    """Give the sequence of a call: the whole prompt, then the generation.

    Returns:
      [P + C] int32.

    Raises:
      ValueError: a delta record, whose sequence begins with tokens of other records.
    """
    if entry.prompt_is_delta:
        raise ValueError(f"call {entry.model_call_id!r}: a delta record has a suffix only")
    prompt = checked_token_ids(entry.prompt_token_ids, entry.model_call_id, "prompt_token_ids")
    generation = checked_token_ids(
        entry.generation_token_ids, entry.model_call_id, "generation_token_ids"
    )
    return np.concatenate([prompt, generation])


def stamp_lineage(
    entry: TokenEntry,
    parent_call_id: str | None,
    *,
    parent_resolution: ParentResolutionStatus | str | None = None,
    cumulative: TokenIds | None = None,
) -> TokenEntry:
    """Stamp a record with its parent, and with length and digest of its sequence.

    Args:
      entry: the record; it is changed.
      parent_call_id: the claimed parent.
      parent_resolution: what was decided about the parent.
      cumulative: [P + C] ids of the sequence; needed for a delta record, and for another it
        must be the record's own.

    Returns:
      The same record.

    Raises:
      ValueError: the decision and the parent id contradict each other, `cumulative` is not
        the record's own sequence, or a delta record comes without it. Nothing is changed then.
    """
    call = entry.model_call_id
    status = None
    if parent_resolution is not None:
        status = RESOLUTIONS.get(parent_resolution)
        if status is None:
            raise field_error(call, "parent_resolution", f"is unknown: {parent_resolution!r}")
    if status is ParentResolutionStatus.RESOLVED and not parent_call_id:
        raise field_error(call, "parent_call_id", "is missing although resolved")
    if status not in (None, ParentResolutionStatus.RESOLVED) and parent_call_id is not None:
        raise field_error(call, "parent_call_id", f"is {parent_call_id!r} although {status}")
    if cumulative is None:
        sequence = cumulative_tokens(entry)
    else:
        sequence = checked_token_ids(cumulative, call, "cumulative")
        if not entry.prompt_is_delta and not np.array_equal(sequence, cumulative_tokens(entry)):
            raise field_error(call, "cumulative", "is not the record's own prompt and generation")
    entry.cum_len = len(sequence)
    entry.digest = compute_digest(sequence)
    entry.parent_call_id = parent_call_id
    entry.parent_resolution = status
    return entry


def stamp_continuation(entry: TokenEntry, request_items: Sequence[Any]) -> TokenEntry:
    """Stamp a record with the content fingerprints that tell what may continue it.

    Args:
      entry: the record, with its output items; it is changed.
      request_items: the messages of the request.

    Returns:
      The same record.

    Raises:
      ValueError: a message cannot be fingerprinted. Nothing is changed then.
    """
    request = list(request_items)
    fingerprint = assistant_fingerprint([*request, *entry.output_items])
    context = conversation_digest(request)
    entry.continuation_fingerprint = fingerprint
    entry.continuation_context_len = len(request)
    entry.continuation_context_digest = context
    entry.fingerprint_version = FINGERPRINT_VERSION
    return entry
