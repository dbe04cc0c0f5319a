"""The plain reference: lists and loops, one turn at a time, the definition of right.

Nothing here is fast and nothing here is an array. Every kernel of the package is held to these
functions on generated cases, `evsys-jax verify` runs them on a user's own rollouts, and the
benchmarks take them as their baseline. Python floats are float64; whoever stores a result as
float32 rounds it once, at the end.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from evsys_jax.checks import (
    as_list,
    check_advantages,
    check_choice,
    check_reward,
    check_turn,
    choose_baseline,
    match_logprobs,
    trains,
    votes,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """One training row as lists, target-aligned: position i holds input i and target i + 1.

    Args:
      input_tokens: [T] ints.
      target_tokens: [T] ints, the input shifted by one.
      logprobs: [T] floats, the sampler's; 0.0 where the target was not sampled.
      advantages: [T] floats; 0.0 where the target was not sampled.
      mask: [T] bools, True where the target was sampled.
      group: index of the group the row comes from.
      trajectory: index of the trajectory in its group.
      turn: index of the turn in its trajectory (of merged turns the first).
    """

    input_tokens: list[int]
    target_tokens: list[int]
    logprobs: list[float]
    advantages: list[float]
    mask: list[bool]
    group: int
    trajectory: int
    turn: int


@dataclass
class TokenSequence:
    """The tokens of one row before the shift, each with what is known about it."""

    turn: int
    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def read(self, tokens: Sequence[int]) -> None:
        """Append tokens that the policy was given."""
        self.tokens += tokens
        self.sampled += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)

    def write(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append tokens that the policy sampled."""
        self.tokens += tokens
        self.sampled += [True] * len(tokens)
        self.logprobs += logprobs


def compute_advantages(
    trajectory_groups: Sequence[Any],
    *,
    normalize: bool = True,
    baseline: str | None = None,
    scale: str = "none",
) -> list[list[float]]:
    """Return one advantage per trajectory: its reward minus a baseline of its group's voters.

    A group given with one trajectory keeps the raw reward. A group in which masking has left one
    voter gives that voter 0.0. A constant group gives exact zeros, since rewards are centred on
    the first voter before they are averaged. Where nobody votes there is no baseline: 0.0.

    Args:
      trajectory_groups: [G] groups; see `evsys_jax.rollouts`.
      normalize: False returns the rewards as they are.
      baseline: "mean" of the voters, "leave_one_out" for the mean of the other voters, "none";
        None takes "mean" or "none", as `normalize` says.
      scale: "none"; "group_std" divides by the population deviation of the rewards of the group's
        voters, "batch_std" by that of the advantages of all voters. Zero divides nothing.

    Returns:
      [G][N_g] floats. A trajectory that neither votes nor trains gets 0.0, and its reward is
      not looked at.

    Raises:
      ValueError: a reward that counts is not a finite number.
    """
    baseline = choose_baseline(normalize, baseline)
    check_choice("scale", scale, ("none", "group_std", "batch_std"))
    advantages: list[list[float]] = []
    of_voters: list[float] = []
    for g, group in enumerate(trajectory_groups):
        members = []
        for n, trajectory in enumerate(group.trajectories):
            live = votes(trajectory) or trains(trajectory)
            where = f"group {g}, trajectory {n}"
            reward = check_reward(trajectory.reward, where) if live else 0.0
            members.append((reward, votes(trajectory), live))
        alone = len(members) == 1
        voters = [reward for reward, voted, _ in members if voted]
        first = voters[0] if voters else 0.0
        mean = math.fsum(reward - first for reward in voters) / max(len(voters), 1)
        row = []
        for reward, voted, live in members:
            if not live or (not voters and not alone and baseline != "none"):
                row.append(0.0)
            elif alone or baseline == "none":
                row.append(reward)
            elif baseline == "leave_one_out" and voted and len(voters) > 1:
                # r - (sum - r) / (n - 1) = n / (n - 1) (r - mean), without losing exact zeros.
                row.append(((reward - first) - mean) * (len(voters) / (len(voters) - 1)))
            else:
                row.append((reward - first) - mean)
        if scale == "group_std":
            row = [_divide(advantage, deviation(voters)) for advantage in row]
        advantages.append(row)
        of_voters += [
            advantage for advantage, member in zip(row, members, strict=True) if member[1]
        ]
    if scale == "batch_std":
        spread = deviation(of_voters)
        advantages = [[_divide(advantage, spread) for advantage in row] for row in advantages]
    for g, row in enumerate(advantages):
        for n, advantage in enumerate(row):
            if not math.isfinite(advantage):
                raise ValueError(f"group {g}, trajectory {n}: advantage {advantage} is not finite")
    return advantages


def deviation(values: Sequence[float]) -> float:
    """Return the population standard deviation, exactly 0.0 for equal values and for none."""
    offsets = [value - values[0] for value in values]
    if not offsets:
        return 0.0
    mean = math.fsum(offsets) / len(offsets)
    return math.sqrt(math.fsum((offset - mean) ** 2 for offset in offsets) / len(offsets))


def _divide(value: float, spread: float) -> float:
    return value / spread if spread > 0 else value


def compute_trajectory_metrics(groups: Sequence[Any]) -> dict[str, float]:
    """Roll the rewards of all voters up into a flat dictionary.

    Args:
      groups: [G] groups; see `evsys_jax.rollouts`.

    Returns:
      `reward/mean`, `reward/std` (population), `reward/n_trajectories` (voters),
      `reward/n_groups`, and `reward/n_masked` (trajectories that do not vote) where there are
      any. Empty where nobody votes.

    Raises:
      ValueError: the reward of a voter is not a finite number.
    """
    rewards, masked = [], 0
    for g, group in enumerate(groups):
        for n, trajectory in enumerate(group.trajectories):
            if votes(trajectory):
                rewards.append(check_reward(trajectory.reward, f"group {g}, trajectory {n}"))
            else:
                masked += 1
    if not rewards:
        return {}
    mean = rewards[0] + math.fsum(reward - rewards[0] for reward in rewards) / len(rewards)
    metrics = {
        "reward/mean": mean,
        "reward/std": deviation(rewards),
        "reward/n_trajectories": float(len(rewards)),
        "reward/n_groups": float(len(groups)),
    }
    if masked:
        metrics["reward/n_masked"] = float(masked)
    return metrics


def training_rows(
    trajectory_groups: Sequence[Any],
    advantages: Sequence[Sequence[float]],
    *,
    rows: str = "turns",
    on_logprob_mismatch: str = "error",
) -> list[Row]:
    """Flatten groups into training rows, in the order group, trajectory, turn.

    Args:
      trajectory_groups: [G] groups; see `evsys_jax.rollouts`.
      advantages: [G][N_g] floats, one per trajectory.
      rows: "turns" for one row per turn; "merged" joins consecutive turns whose prompt extends
        everything before it.
      on_logprob_mismatch: "error", or "pad" to fill up missing logprobs with 0.0 and cut
        surplus ones.

    Returns:
      The rows of all trajectories that train. Turns without completion, and rows without a
      position (one token, no prompt), yield none.

    Raises:
      ValueError: bad tokens or logprobs, named by group, trajectory, turn and index; or groups
        and advantages that do not match.
    """
    return list(
        iter_training_rows(
            trajectory_groups, advantages, rows=rows, on_logprob_mismatch=on_logprob_mismatch
        )
    )


def iter_training_rows(
    trajectory_groups: Sequence[Any],
    advantages: Sequence[Sequence[float]],
    *,
    rows: str = "turns",
    on_logprob_mismatch: str = "error",
) -> Iterator[Row]:
    """Yield what `training_rows` returns, one row at a time."""
    check_choice("rows", rows, ("turns", "merged"))
    check_choice("on_logprob_mismatch", on_logprob_mismatch, ("error", "pad"))
    check_advantages(
        advantages,
        [[trains(member) for member in group.trajectories] for group in trajectory_groups],
    )
    padded = 0
    for g, group in enumerate(trajectory_groups):
        for n, trajectory in enumerate(group.trajectories):
            if not trains(trajectory):
                continue
            where = f"group {g}, trajectory {n}"
            turns = []
            for k, turn in enumerate(trajectory.turns):
                logprobs, changed = match_logprobs(turn, f"{where}, turn {k}", on_logprob_mismatch)
                padded += changed
                if len(turn.completion_tokens) > 0:
                    check_turn(turn, logprobs, f"{where}, turn {k}")
                    turns.append((k, turn, logprobs))
            advantage = float(advantages[g][n])
            for sequence in _sequences(turns, merge=rows == "merged"):
                if len(sequence.tokens) > 1:
                    yield _shift(sequence, advantage, g, n)
    if padded:
        logger.warning("logprobs padded or cut to the completion's length in %d turns", padded)


def _sequences(
    turns: list[tuple[int, Any, list[float]]], *, merge: bool
) -> Iterator[TokenSequence]:
    """Yield the token sequences of one trajectory, one a turn or as few as extend each other."""
    sequence: TokenSequence | None = None
    for k, turn, logprobs in turns:
        prompt = as_list(turn.prompt_tokens)
        if merge and sequence is not None and prompt[: len(sequence.tokens)] == sequence.tokens:
            sequence.read(prompt[len(sequence.tokens) :])
        else:
            if sequence is not None:
                yield sequence
            sequence = TokenSequence(turn=k)
            sequence.read(prompt)
        sequence.write(as_list(turn.completion_tokens), logprobs)
    if sequence is not None:
        yield sequence


def _shift(sequence: TokenSequence, advantage: float, group: int, trajectory: int) -> Row:
    """Align everything with the target: drop the last input and the first of all the rest."""
    mask = sequence.sampled[1:]
    return Row(
        input_tokens=sequence.tokens[:-1],
        target_tokens=sequence.tokens[1:],
        logprobs=sequence.logprobs[1:],
        advantages=[advantage if live else 0.0 for live in mask],
        mask=mask,
        group=group,
        trajectory=trajectory,
        turn=sequence.turn,
    )
