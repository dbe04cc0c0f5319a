"""The tokens that a rollout record carries itself: the generated items of its response as turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from evsys_jax import checks
from evsys_jax.flat import logprob_array, token_array
from evsys_jax.rollouts import ChainTurns, Turn

_TOKEN_KEYS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
_TURN_KEYS = ("prompt_tokens", "completion_tokens", "logprobs")


class MaskedError(Exception):
    """A rollout that must not train.

    Args:
      reason: a short, stable word.
      detail: the particulars, for people.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)


def generated_items(record: Mapping[str, Any]) -> list[Any]:
    """Return the items of a record's response that carry any token field, as they are."""
    response = record.get("response")
    output = response.get("output") if isinstance(response, Mapping) else None
    items = output if isinstance(output, list) else []
    return [
        item
        for item in items
        if isinstance(item, Mapping) and any(item.get(key) is not None for key in _TOKEN_KEYS)
    ]


def carries_tokens(record: Mapping[str, Any]) -> bool:
    """Tell whether some item of the response holds generated tokens."""
    generations = [item.get("generation_token_ids") for item in generated_items(record)]
    return any(hasattr(tokens, "__len__") and len(tokens) > 0 for tokens in generations)


def inline_turns(record: Mapping[str, Any]) -> ChainTurns:
    """Chain the generated items of a record and cut the chain into turns.

    Args:
      record: a rollout record.

    Returns:
      One turn per generated item; their arrays are views into one.

    Raises:
      MaskedError: an item is malformed, or its prompt does not extend what came before.
    """
    items = generated_items(record)
    chain: list[Any] = []
    logprobs: list[Any] = []
    spans = []
    for k, item in enumerate(items):
        prompt, generation, scores = (_list_of(item, key, k) for key in _TOKEN_KEYS)
        if len(scores) != len(generation):
            counts = (
                f"{len(generation)} generation_token_ids but {len(scores)} generation_log_probs"
            )
            raise MaskedError("logprob_mismatch", f"item {k}: {counts}")
        if prompt[: len(chain)] != chain:
            raise MaskedError(
                "broken_prefix", f"item {k}: the prompt does not begin with what came before"
            )
        if not set(map(type, generation)) <= {int}:
            # Compared with the next prompt, True and 2.0 would pass for 1 and 2.
            raise MaskedError("bad_tokens", _first_bad([item], k) or f"item {k}: no integers")
        spans.append((len(prompt), len(prompt) + len(generation)))
        logprobs += [0.0] * (len(prompt) - len(chain)) + scores
        chain = prompt + generation
    if not any(end > start for start, end in spans):
        raise MaskedError("no_generation", "no item with generated tokens")
    try:
        tokens = token_array(chain)
        scored = logprob_array(logprobs)
    except ValueError as error:
        raise MaskedError("bad_tokens", _first_bad(items) or str(error)) from error
    starts, ends = np.array(spans, np.int32).T.copy()
    return ChainTurns(tokens, scored, starts, ends)


def _list_of(item: Mapping[str, Any], key: str, k: int) -> list[Any]:
    """Return a token field as a list."""
    values = item.get(key)
    if (
        values is None
        or isinstance(values, str | bytes | Mapping)
        or not hasattr(values, "__len__")
    ):
        raise MaskedError("bad_item", f"item {k}: {key} is missing or no list")
    return values if isinstance(values, list) else checks.as_list(values)


def _first_bad(items: list[Any], first: int = 0) -> str:
    """Name the first value of the items that is no token id or no logprob."""
    for k, item in enumerate(items, start=first):
        prompt, generation, scores = (_list_of(item, key, k) for key in _TOKEN_KEYS)
        try:
            checks.check_turn(Turn(prompt, generation), scores, f"item {k}")
        except ValueError as error:
            text = str(error)
            for ours, theirs in zip(_TURN_KEYS, _TOKEN_KEYS, strict=True):
                text = text.replace(f" {ours}[", f" {theirs}[")
            return text
    return ""
