"""What an input must be: the contract that the reference and the arrays share, in plain Python.

Whoever finds something wrong fast and in bulk comes here for the one error that names it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from numbers import Integral, Real
from typing import Any

TOKEN_LIMIT = 2**31
"""Token ids are int32 on the device: an id at or above this would wrap silently."""

FLOAT32_LIMIT = float.fromhex("0x1.ffffffp+127")
"""The first magnitude that rounds to infinity in float32."""


def as_list(values: Any) -> list[Any]:
    """Return a list or an array as a list of plain Python numbers.

    Raises:
      ValueError: it is no sequence.
    """
    if hasattr(values, "tolist"):
        listed = values.tolist()
        return listed if isinstance(listed, list) else [listed]
    return list(sequence(values, "token ids and logprobs"))


def sequence(values: Any, name: str) -> Any:
    """Return `values` where they have a length and an order, else raise ValueError."""
    if isinstance(values, list | tuple):
        return values
    unordered = isinstance(values, str | bytes | Set | Mapping)
    if unordered or not hasattr(values, "__len__") or not hasattr(values, "__getitem__"):
        raise ValueError(f"{name}: a {type(values).__name__} is no sequence")
    return values


def members(groups: Any) -> Iterator[tuple[int, int, Any, str]]:
    """Yield (group, place in the group, trajectory, words for where that is).

    Raises:
      ValueError: groups, trajectories or turns are no sequence; a generator could be read once.
    """
    for g, group in enumerate(sequence(groups, "groups")):
        for n, trajectory in enumerate(sequence(group.trajectories, f"group {g}: trajectories")):
            where = f"group {g}, trajectory {n}"
            sequence(trajectory.turns, f"{where}: turns")
            yield g, n, trajectory, where


def show(value: Any) -> str:
    """Return a short `repr`, whatever the value: deep nesting and huge integers have none."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def votes(trajectory: Any) -> bool:
    """Tell whether the reward enters the baseline; True where the object doesn't say."""
    return bool(getattr(trajectory, "votes", True))


def trains(trajectory: Any) -> bool:
    """Tell whether the tokens yield rows; True where the object doesn't say."""
    return bool(getattr(trajectory, "trains", True))


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}")


def check_reward(reward: Any, where: str) -> float:
    """Return a reward as float, or raise ValueError that names it. Bools and ints are numbers."""
    value = _number(reward, f"{where}: reward")
    if not math.isfinite(value):
        raise ValueError(f"{where}: reward {value} is not finite")
    return value


def _number(value: Any, what: str) -> float:
    """Return anything that is a number as a float; text is none, whatever it spells."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise ValueError(f"{what} {show(value)} is not a number")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{what} {show(value)} is not a number") from error


def check_advantages(
    advantages: Sequence[Sequence[float]], trains: Sequence[Sequence[bool]]
) -> None:
    """Raise ValueError unless there is one finite float32 per trajectory that trains.

    Args:
      advantages: [G][N_g] floats.
      trains: [G][N_g] bools.
    """
    sequence(advantages, "advantages")
    if len(trains) != len(advantages):
        raise ValueError(f"{len(trains)} groups but {len(advantages)} lists of advantages")
    for g, (members, row) in enumerate(zip(trains, advantages, strict=True)):
        if len(members) != len(sequence(row, f"group {g}: advantages")):
            raise ValueError(f"group {g}: {len(members)} trajectories but {len(row)} advantages")
        for n, (live, advantage) in enumerate(zip(members, row, strict=True)):
            where = f"group {g}, trajectory {n}: advantage"
            if live and not abs(_number(advantage, where)) < FLOAT32_LIMIT:
                raise ValueError(f"{where} {show(advantage)} is not a finite float32")


def match_logprobs(turn: Any, where: str, on_mismatch: str) -> tuple[list[float], bool]:
    """Return one logprob per completion token, and whether that took padding or cutting."""
    logprobs, count = as_list(turn.logprobs), len(turn.completion_tokens)
    if len(logprobs) == count:
        return logprobs, False
    if on_mismatch == "error":
        raise ValueError(f"{where}: {count} completion_tokens but {len(logprobs)} logprobs")
    return (logprobs + [0.0] * count)[:count], True


def check_turn(turn: Any, logprobs: Sequence[float], where: str) -> None:
    """Raise ValueError at the first token id or logprob that is not what it must be."""
    for name in ("prompt_tokens", "completion_tokens"):
        for i, token in enumerate(as_list(getattr(turn, name))):
            # Exact ints come first: the abstract check costs more than the rest of the loop.
            if type(token) is not int and (
                isinstance(token, bool) or not isinstance(token, Integral)
            ):
                raise ValueError(f"{where}: {name}[{i}] is {show(token)}, not an integer")
            if not 0 <= int(token) < TOKEN_LIMIT:
                raise ValueError(f"{where}: {name}[{i}] is {show(token)}, outside [0, 2**31)")
    for i, logprob in enumerate(logprobs):
        if type(logprob) is not float and (
            isinstance(logprob, bool) or not isinstance(logprob, Real)
        ):
            raise ValueError(f"{where}: logprobs[{i}] is {show(logprob)}, not a number")
        if not abs(logprob) < FLOAT32_LIMIT:
            raise ValueError(f"{where}: logprobs[{i}] is {logprob}, not a finite float32")


def choose_baseline(normalize: bool, baseline: str | None) -> str:
    """Return the baseline that a pair of options asks for."""
    if baseline is None:
        return "mean" if normalize else "none"
    check_choice("baseline", baseline, ("mean", "leave_one_out", "none"))
    return baseline
