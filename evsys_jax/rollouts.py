"""Rollout types: what a sampler hands over, before it becomes arrays.

Three plain dataclasses, and turns that share one array. Anything with the same attributes serves
in their place, so a trainer's own rollout objects need no conversion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

Tokens: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]
Floats: TypeAlias = Sequence[float] | NDArray[np.floating[Any]]


@dataclass(eq=False)
class Turn:
    """One model call: the whole context that the policy saw, and what it wrote.

    Args:
      prompt_tokens: [P] ints in [0, 2**31), list or 1-D array. The whole prompt, not only
        what is new since the last turn.
      completion_tokens: [C] ints in [0, 2**31), list or 1-D array. The sampled tokens.
      logprobs: [C] floats, natural logarithm, list or 1-D array. The sampler's log-probability
        of each completion token.
      text: the completion as text, for people; never used in arithmetic.
    """

    prompt_tokens: Tokens
    completion_tokens: Tokens
    logprobs: Floats = field(default_factory=list)
    text: str = ""


_NO_TOKENS = np.empty(0, np.int32)
_NO_LOGPROBS = np.empty(0, np.float32)


class ChainTurns(Sequence[Turn]):
    """The turns of one conversation, each of which saw all that came before it.

    A sequence of `Turn`s that exist from when one of them is first asked for; they are then kept,
    and may be changed. Their arrays are views into the chain's. A rollout of 40 turns that nobody
    looks into is a few objects instead of some 200.

    Args:
      tokens: [L] int32, the whole conversation.
      logprobs: [L] float32, 0.0 where the policy did not write.
      starts: [K] int32, where each turn's completion begins; its prompt is everything before.
      ends: [K] int32, where it ends: not before `starts[k]`, nor behind `starts[k + 1]`.

    Raises:
      ValueError: other lengths, or turns that overlap or reach beyond the tokens.
    """

    __slots__ = ("_turns", "ends", "logprobs", "starts", "tokens")

    def __init__(
        self,
        tokens: NDArray[np.int32] = _NO_TOKENS,
        logprobs: NDArray[np.float32] = _NO_LOGPROBS,
        starts: NDArray[np.int32] = _NO_TOKENS,
        ends: NDArray[np.int32] = _NO_TOKENS,
    ) -> None:
        if len(starts) != len(ends) or len(tokens) != len(logprobs):
            raise ValueError("starts and ends, or tokens and logprobs, differ in length")
        edges = np.stack([starts, ends], axis=1).ravel()
        if (np.diff(edges, prepend=0, append=len(tokens)) < 0).any():
            raise ValueError("turns overlap, or reach beyond the tokens")
        self.tokens = tokens
        self.logprobs = logprobs
        self.starts = starts
        self.ends = ends
        self._turns: list[Turn] | None = None

    @property
    def untouched(self) -> bool:
        """No turn has been asked for, so that none can differ from the arrays."""
        return self._turns is None

    @property
    def completion_lengths(self) -> NDArray[np.int32]:
        """[K] tokens that each turn wrote."""
        return self.ends - self.starts

    @property
    def n_sampled(self) -> int:
        """Tokens that all turns wrote."""
        return int(self.completion_lengths.sum())

    def fields(self, k: int) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
        """Return prompt, completion and logprobs of turn k, as the chain has them."""
        start, end = self.starts[k], self.ends[k]
        return self.tokens[:start], self.tokens[start:end], self.logprobs[start:end]

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, index: int) -> Turn: ...

    @overload
    def __getitem__(self, index: slice) -> list[Turn]: ...

    def __getitem__(self, index: int | slice) -> Turn | list[Turn]:
        if self._turns is None:
            self._turns = [Turn(*self.fields(k)) for k in range(len(self))]
        return self._turns[index]

    def __iter__(self) -> Iterator[Turn]:
        return iter(self[:])

    def __repr__(self) -> str:
        return f"<{len(self)} turns of {len(self.tokens)} tokens>"


@dataclass(eq=False)
class Trajectory:
    """One rollout: its turns in order and the reward it earned.

    Args:
      turns: the model calls, in order.
      reward: a finite number. May be anything where neither `votes` nor `trains` is set.
      metadata: free; `rollout_id` and `mask_reason` are written by `collect`.
      votes: the reward enters the baseline of the group.
      trains: the tokens yield rows.
    """

    turns: Sequence[Turn]
    reward: float = 0.0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    votes: bool = True
    trains: bool = True


@dataclass(eq=False)
class TrajectoryGroup:
    """The rollouts of one task, which are compared with each other.

    Args:
      trajectories: the siblings, in order. May be empty.
    """

    trajectories: Sequence[Trajectory]

    @property
    def rewards(self) -> list[float]:
        """The reward of each trajectory, in order, as given."""
        return [trajectory.reward for trajectory in self.trajectories]


def untouched_chain(trajectory: Any) -> ChainTurns | None:
    """Return a trajectory's turns if they are a chain that can be read without making them."""
    turns = trajectory.turns
    return turns if isinstance(turns, ChainTurns) and turns.untouched else None
