"""TokenEntry: one captured model call, and the one JSON line that stores it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evsys_jax.capture.canonical import canonical_json, canonical_object
from evsys_jax.capture.checks import (
    check_float,
    check_int,
    checked_items,
    checked_log_probs,
    checked_token_ids,
    field_error,
)
from evsys_jax.capture.strict_json import read_object

TOKEN_ENTRY_RECORD_SCHEMA_VERSION = 1
TOKEN_ENTRY_MIN_SCHEMA_VERSION = 1

TokenIds: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]
LogProbs: TypeAlias = Sequence[float] | NDArray[np.floating[Any]]

_REQUIRED: Any = object()


class ParentResolutionStatus(StrEnum):
    """What was decided about a call's parent when its request came in."""

    ROOT = "root"
    RESOLVED = "resolved"
    UNRESOLVED = "unresolved"


RESOLUTIONS: dict[Any, ParentResolutionStatus] = {s.value: s for s in ParentResolutionStatus}


@dataclass(eq=False, kw_only=True, slots=True)
class TokenEntry:
    """One model call: what the engine saw and sampled, with the fields of NeMo Gym's record.

    The three arrays live as numpy arrays: token ids as int32, log-probabilities as float64,
    because every bit is written back. Those of records that were read from a file are
    read-only, because prompts that continue each other share memory.

    Types are strict: nothing is converted from text, 3.0 is no integer and true is no number.
    NeMo Gym 0.7 converts such values, and takes token ids that wrap in 32 bits and
    log-probabilities that are not finite.

    Args:
      rollout_id: names the files of the rollout.
      model_call_id: the call.
      prompt_token_ids: [P] ints in [0, 2**31), list, tuple or 1-D integer array. The whole
        prompt, or in a delta record only what it has behind the parent's sequence.
      generation_token_ids: [C] ints in [0, 2**31), likewise. The sampled tokens.
      generation_log_probs: [C] finite numbers, natural logarithm. The sampler's, one per
        generated token.
      schema_version: 1, the only version.
      model: the model's name.
      routed_experts: any JSON value, handed through.
      output_items: response items, without token arrays.
      token_item_index: index into `output_items` of the item that carried the arrays.
      response_id: the id that the client saw.
      created_at: when the call completed, in seconds.
      parent_call_id: the claimed parent.
      cum_len: length of the call's sequence (whole prompt and generation).
      digest: `compute_digest` of that sequence.
      parent_resolution: what was decided about the parent: `root` and `unresolved` come
        without a parent id, `resolved` with one.
      continuation_fingerprint: content fingerprint of request and output.
      continuation_context_len: number of messages of the request.
      continuation_context_digest: conversation digest of the request.
      parent_resolution_reason: for people.
      fingerprint_version: the algorithm of the fingerprint, now 2.
      prompt_is_delta: the prompt is a suffix; needs a resolved parent.
      prefix_requested: carried along.
      prefix_supplied: carried along.
      extra: further keys of the record; kept, written back, and meaning nothing. A
        `staging_key` other than null is refused: the tokens of such a row are elsewhere.

    Raises:
      ValueError: a field is missing, of another type or out of range, or a rule is broken; the
        text names the call and the field, for an array also the index.
    """

    rollout_id: str = _REQUIRED
    model_call_id: str = _REQUIRED
    prompt_token_ids: TokenIds = _REQUIRED
    generation_token_ids: TokenIds = _REQUIRED
    generation_log_probs: LogProbs = _REQUIRED
    schema_version: int = TOKEN_ENTRY_RECORD_SCHEMA_VERSION
    model: str = ""
    routed_experts: Any = None
    output_items: list[dict[str, Any]] = field(default_factory=list)
    token_item_index: int | None = None
    response_id: str | None = None
    created_at: float = 0.0
    parent_call_id: str | None = None
    cum_len: int | None = None
    digest: str | None = None
    parent_resolution: ParentResolutionStatus | str | None = None
    continuation_fingerprint: str = ""
    continuation_context_len: int = 0
    continuation_context_digest: str = ""
    parent_resolution_reason: str = ""
    fingerprint_version: int | None = None
    prompt_is_delta: bool = False
    prefix_requested: bool = False
    prefix_supplied: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check every type and rule, and turn the arrays into numpy's."""
        call = self.model_call_id if isinstance(self.model_call_id, str) else None
        for name in _REQUIRED_FIELDS:
            if getattr(self, name) is _REQUIRED:
                raise field_error(call, name, "is missing")
        self.prompt_token_ids = checked_token_ids(self.prompt_token_ids, call, "prompt_token_ids")
        self.generation_token_ids = checked_token_ids(
            self.generation_token_ids, call, "generation_token_ids"
        )
        self.generation_log_probs = checked_log_probs(self.generation_log_probs, call)
        self._check_fields(call)
        self._check_rules(call)

    def _check_fields(self, call: str | None) -> None:
        self._check_scalars(call)
        self._check_nested(call)

    def _check_scalars(self, call: str | None) -> None:
        for name, nullable in _TEXT_FIELDS.items():
            value = getattr(self, name)
            if not (isinstance(value, str) or (nullable and value is None)):
                raise field_error(call, name, f"is no text: {value!r}")
        for name, nullable in _INT_FIELDS.items():
            value = getattr(self, name)
            if not (nullable and value is None):
                setattr(self, name, check_int(value, call, name))
        for name in _BOOL_FIELDS:
            if type(getattr(self, name)) is not bool:
                raise field_error(call, name, f"is no bool: {getattr(self, name)!r}")
        self.created_at = check_float(self.created_at, call, "created_at")

    def _check_nested(self, call: str | None) -> None:
        self.output_items = checked_items(self.output_items, call)
        if self.parent_resolution is not None:
            status = (
                RESOLUTIONS.get(self.parent_resolution)
                if isinstance(self.parent_resolution, str)
                else None
            )
            if status is None:
                problem = f"is none of root, resolved, unresolved: {self.parent_resolution!r}"
                raise field_error(call, "parent_resolution", problem)
            self.parent_resolution = status
        self._check_extra(call)

    def _check_extra(self, call: str | None) -> None:
        if not isinstance(self.extra, Mapping):
            raise field_error(call, "extra", "is no mapping")
        for key in self.extra:
            if not isinstance(key, str):
                raise field_error(call, "extra", f"has a key that is no text: {key!r}")
            if key in RECORD_FIELDS:
                raise field_error(call, key, "is a field of the record, not an extra key")
        if self.extra.get("staging_key") is not None:
            raise field_error(call, "staging_key", "is set: the tokens of this row are elsewhere")

    def _check_rules(self, call: str | None) -> None:
        if self.schema_version != TOKEN_ENTRY_RECORD_SCHEMA_VERSION:
            problem = f"is {self.schema_version}, and 1 is the only version"
            raise field_error(call, "schema_version", problem)
        tokens, log_probs = len(self.generation_token_ids), len(self.generation_log_probs)
        if tokens != log_probs:
            problem = f"has {log_probs} elements for {tokens} generated tokens"
            raise field_error(call, "generation_log_probs", problem)
        index = self.token_item_index
        if index is not None and not 0 <= index < len(self.output_items):
            problem = f"is {index}, but there are {len(self.output_items)} output_items"
            raise field_error(call, "token_item_index", problem)
        if self.parent_resolution == ParentResolutionStatus.RESOLVED:
            if not self.parent_call_id:
                raise field_error(call, "parent_call_id", "is missing although resolved")
        elif self.parent_resolution is not None and self.parent_call_id is not None:
            problem = f"is {self.parent_call_id!r} although {self.parent_resolution}"
            raise field_error(call, "parent_call_id", problem)
        if self.prompt_is_delta and self.parent_resolution != ParentResolutionStatus.RESOLVED:
            raise field_error(call, "prompt_is_delta", "needs a resolved parent_call_id")

    def __eq__(self, other: object) -> bool:
        """Compare the contents; log-probabilities by their bits, as a store does."""
        if not isinstance(other, TokenEntry):
            return NotImplemented
        if any(getattr(self, name) != getattr(other, name) for name in _PLAIN_FIELDS):
            return False
        if dict(self.extra) != dict(other.extra):
            return False
        return (
            np.array_equal(self.prompt_token_ids, other.prompt_token_ids)
            and np.array_equal(self.generation_token_ids, other.generation_token_ids)
            and np.asarray(self.generation_log_probs, np.float64).tobytes()
            == np.asarray(other.generation_log_probs, np.float64).tobytes()
        )

    __hash__ = None  # type: ignore[assignment]  # the fields may be assigned

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> TokenEntry:
        """Make a record of a mapping; keys that are no fields go to `extra`.

        Raises:
          ValueError: as the constructor; also if `mapping` is none.
        """
        if not isinstance(mapping, Mapping):
            raise ValueError(f"a record is no mapping but {type(mapping).__name__}")
        known: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        for key, value in mapping.items():
            (known if key in RECORD_FIELDS else extra)[key] = value
        return cls(**known, extra=extra)

    @classmethod
    def from_json(cls, line: bytes | str) -> TokenEntry:
        """Read a record from one line; white space around it is allowed.

        Stricter than NeMo Gym 0.7: a field that is given twice, a lone surrogate and a number
        that is not finite are errors wherever they stand.

        Raises:
          ValueError: the line is not exactly one JSON object in UTF-8, or breaks a rule.
        """
        text = line.encode("utf-8") if isinstance(line, str) else bytes(line)
        value, not_finite = read_object(text, RECORD_FIELDS)
        entry = cls.from_dict(value)
        if not_finite:
            problem = "holds a number that is NaN, infinite or too large for a double"
            raise ValueError(f"call {entry.model_call_id!r}: the record {problem}")
        return entry

    @classmethod
    def from_checked(
        cls,
        values: dict[str, Any],
        prompt_token_ids: NDArray[np.int32],
        generation_token_ids: NDArray[np.int32],
        generation_log_probs: NDArray[np.float64],
    ) -> TokenEntry:
        """Make a record around arrays that were checked already and that nobody changes.

        Args:
          values: the other fields and the extra keys as orjson reads them, so that no integer
            is out of range; taken apart.

        Raises:
          ValueError: as the constructor, but for the three arrays.
        """
        entry = cls.__new__(cls)
        checked = True
        for name, (default, types) in _DEFAULTS.items():
            value = values.pop(name, default)
            checked = checked and (types is None or type(value) in types)
            setattr(entry, name, value)
        entry.prompt_token_ids = prompt_token_ids
        entry.generation_token_ids = generation_token_ids
        entry.generation_log_probs = generation_log_probs
        entry.extra = values
        call = entry.model_call_id if isinstance(entry.model_call_id, str) else None
        if not checked:
            entry._check_scalars(call)
        entry._check_nested(call)
        entry._check_rules(call)
        return entry

    def to_dict(self) -> dict[str, Any]:
        """Give the record as plain Python values: every field and the extra keys.

        Nested values (items, extra values) are shared with the record, not copied.
        """
        plain = self._plain_fields()
        for name in _ARRAY_FIELDS:
            value = getattr(self, name)
            plain[name] = value.tolist() if isinstance(value, np.ndarray) else list(value)
        return plain

    def to_json(self) -> bytes:
        """Write the canonical line, without a line end.

        Raises:
          ValueError: a value cannot be written as canonical JSON.
        """
        arrays = {name: getattr(self, name) for name in _ARRAY_FIELDS}
        if all(isinstance(array, np.ndarray) for array in arrays.values()):
            return canonical_object(self._plain_fields(), arrays)
        return canonical_json(self.to_dict())

    def _plain_fields(self) -> dict[str, Any]:
        plain: dict[str, Any] = dict(self.extra)
        for name in _PLAIN_FIELDS:
            plain[name] = getattr(self, name)
        if self.parent_resolution is not None:
            plain["parent_resolution"] = str(self.parent_resolution)
        plain["output_items"] = list(self.output_items)
        return plain


_ARRAY_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
_REQUIRED_FIELDS = ("rollout_id", "model_call_id", *_ARRAY_FIELDS)
RECORD_FIELDS = frozenset(f.name for f in fields(TokenEntry)) - {"extra"}
_PLAIN_FIELDS = tuple(sorted(RECORD_FIELDS - set(_ARRAY_FIELDS)))
# Name -> whether null is allowed.
_TEXT_FIELDS = {
    "model_call_id": False,
    "rollout_id": False,
    "model": False,
    "response_id": True,
    "parent_call_id": True,
    "digest": True,
    "continuation_fingerprint": False,
    "continuation_context_digest": False,
    "parent_resolution_reason": False,
}
_INT_FIELDS = {
    "schema_version": False,
    "token_item_index": True,
    "cum_len": True,
    "continuation_context_len": False,
    "fingerprint_version": True,
}
_BOOL_FIELDS = ("prompt_is_delta", "prefix_requested", "prefix_supplied")
# The types that need no look at the value; other fields have their own checks.
_EXACT_TYPES = (
    {name: {str} | ({type(None)} if nullable else set()) for name, nullable in _TEXT_FIELDS.items()}
    | {
        name: {int} | ({type(None)} if nullable else set())
        for name, nullable in _INT_FIELDS.items()
    }
    | {name: {bool} for name in _BOOL_FIELDS}
    | {"created_at": {float}}
)
_DEFAULTS: dict[str, tuple[Any, Any]] = {
    f.name: ([] if f.name == "output_items" else f.default, _EXACT_TYPES.get(f.name))
    for f in fields(TokenEntry)
    if f.name in _PLAIN_FIELDS
}
