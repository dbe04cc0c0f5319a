"""Digests of token sequences: the hash that two stamps of the same tokens share."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

DIGEST_VERSION = 1
WORD = np.dtype(">u8")

_LABEL = b"nemo-gym-tokens"


def encode_token_ids(token_ids: Sequence[int] | NDArray[np.integer[Any]]) -> bytes:
    """Encode ids as `u8(1) u64(count) u64(id) u64(id) ...`, big-endian.

    Args:
      token_ids: [N] integers in [0, 2**64), also those that a record refuses.

    Raises:
      ValueError: an id is negative or too large.
      TypeError: an id is no integer (a bool is none), or the ids are no list, tuple or array.
    """
    words = _as_words(token_ids)
    return struct.pack(">BQ", DIGEST_VERSION, words.size) + words.tobytes()


def compute_digest(token_ids: Sequence[int] | NDArray[np.integer[Any]]) -> str:
    """Give the lower-case hex SHA-256 of a label and the encoded ids; of the label if empty.

    Args:
      token_ids: [N] integers in [0, 2**64).

    Raises:
      ValueError: an id is negative or too large.
      TypeError: an id is no integer, or the ids are no list, tuple or array.
    """
    return digest_words([_as_words(token_ids)])


def digest_words(pieces: Sequence[NDArray[Any]]) -> str:
    """Do as `compute_digest` for ids that are big-endian words already, in one piece or more."""
    digest = hashlib.sha256(_LABEL)
    count = sum(map(len, pieces))
    if count:
        digest.update(struct.pack(">BQ", DIGEST_VERSION, count))
        for piece in pieces:
            digest.update(piece.data)
    return digest.hexdigest()


def _as_words(token_ids: Any) -> NDArray[Any]:
    if isinstance(token_ids, np.ndarray):
        if token_ids.ndim != 1 or (token_ids.size and token_ids.dtype.kind not in "iu"):
            raise TypeError(f"token ids are no 1-D integer array: {token_ids.dtype}")
        if token_ids.dtype.kind == "i" and token_ids.size and token_ids.min() < 0:
            index = int(np.flatnonzero(token_ids < 0)[0])
            raise ValueError(f"token id [{index}] is outside [0, 2**64): {token_ids[index]}")
        return token_ids.astype(WORD)
    if not isinstance(token_ids, list | tuple):
        raise TypeError(f"token ids are no list, tuple or array: {type(token_ids).__name__}")
    for index, item in enumerate(token_ids if set(map(type, token_ids)) - {int} else ()):
        if isinstance(item, bool) or not isinstance(item, int | np.integer):
            raise TypeError(f"token id [{index}] is no integer: {item!r}")
    try:
        return np.array([int(i) for i in token_ids], dtype=np.uint64).astype(WORD)
    except OverflowError:
        index = next(i for i, item in enumerate(token_ids) if not 0 <= item < 2**64)
        raise ValueError(f"token id [{index}] is outside [0, 2**64)") from None
