"""What became of each rollout, in numbers; and one rollout whole, for people who look at it.

Looking changes nothing: capture directories are read as they are. A rollout that is still being
written is shown as a freeze would give it now, and its writers go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evsys_jax.calltree import ShownCall, arrange_calls
from evsys_jax.capture.build import RolloutBuild
from evsys_jax.capture.peek import lost_calls
from evsys_jax.capture.sources import find_directory
from evsys_jax.capture.terminal import TerminalAttribution
from evsys_jax.collect import JudgedRollout, judge_rollouts
from evsys_jax.inline import MaskedError, generated_items, inline_turns
from evsys_jax.rollouts import Trajectory, TrajectoryGroup, Turn
from evsys_jax.verdicts import RolloutVerdict

Records: TypeAlias = str | PathLike[str] | Iterable[Mapping[str, Any]]
Directories: TypeAlias = Sequence[str | PathLike[str]]

PROMPT, BETWEEN, SAMPLED = "prompt", "between", "sampled"


@dataclass(slots=True)
class RolloutSummary:
    """One rollout in numbers.

    Args:
      rollout_id: "" where the record has no usable one.
      record: number of its record, from 1.
      task: `_ng_task_index`.
      group: index of its group, None where it is in none.
      trajectory: its place in the group.
      trains: its tokens yield rows.
      reason: why it doesn't, a short word; "" where it does.
      detail: the particulars, for people.
      calls: captured calls, or generated items of the record.
      chains: that the calls make.
      prompt: tokens of the chain's first prompt.
      between: tokens of the chain that came between the turns.
      sampled: tokens of the chain that the policy wrote.
      captured: tokens that the policy wrote in all calls.
      trained: those of them that are live targets, with rows of one turn each.
      reward: None where it is absent or no finite number.
      advantage: None where the rollout doesn't train, or was looked at alone.
    """

    rollout_id: str
    record: int
    task: int | None = None
    group: int | None = None
    trajectory: int | None = None
    trains: bool = False
    reason: str = ""
    detail: str = ""
    calls: int = 0
    chains: int = 0
    prompt: int = 0
    between: int = 0
    sampled: int = 0
    captured: int = 0
    trained: int = 0
    reward: float | None = None
    advantage: float | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """A run of tokens of the chain with one origin.

    Args:
      kind: `prompt`, `between` (added by the environment after a turn) or `sampled`.
      start: its first token.
      length: number of tokens.
      call: the call that wrote it, or the generated item; "" where none did.
    """

    kind: str
    start: int
    length: int
    call: str = ""


@dataclass(frozen=True, eq=False)
class RolloutPicture:
    """One rollout whole.

    Args:
      summary: in numbers.
      captured: its tokens come from captured calls; else the record carries them.
      frozen: the capture takes no more calls; None where there is none that can be read.
      incomplete: a call is lost.
      lost: ids of lost calls, as far as they are known.
      attribution: the scored call, and how it was found.
      terminal_chain: `delivered`, `broken`, `not_captured`, or "" without a scored call.
      calls: the calls as a tree, in the order in which they are shown.
      spans: the chain, from its first token to its last.
      tokens: [L] int32, the chain.
      mask: [L] bool, True where the token trains.
      logprobs: [L] float32, the sampler's; 0 where it did not sample.
    """

    summary: RolloutSummary
    captured: bool = False
    frozen: bool | None = None
    incomplete: bool = False
    lost: Sequence[str] = ()
    attribution: TerminalAttribution = field(default_factory=TerminalAttribution)
    terminal_chain: str = ""
    calls: Sequence[ShownCall] = ()
    spans: Sequence[Span] = ()
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    mask: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))


def summarize_rollouts(
    records: Records,
    *,
    captures: Directories | None = None,
    mask_incomplete_when_attributed: bool = True,
    workers: int = 1,
    on_record: Callable[[int], None] | None = None,
) -> list[RolloutSummary]:
    """Judge every rollout as `collect` does, and keep its numbers only.

    Args:
      records: as in `collect`.
      captures: capture directories, which are left as they are.
      mask_incomplete_when_attributed: as in `collect`.
      workers: as in `collect`.
      on_record: as in `collect`.

    Returns:
      One summary per record, in order, with the advantages that the default baseline gives.

    Raises:
      OSError: the file cannot be read, or a capture directory is missing.
    """
    summaries: list[RolloutSummary] = []
    for judged in judge_rollouts(
        records,
        captures=captures,
        mask_incomplete_when_attributed=mask_incomplete_when_attributed,
        workers=workers,
        freeze=False,
    ):
        summaries.append(_summarize(judged, _turns_of(judged)))
        if on_record is not None:
            on_record(len(summaries))
    _fill_advantages(summaries)
    return summaries


def select_rollouts(
    summaries: Iterable[RolloutSummary],
    *,
    masked: bool = False,
    group: int | None = None,
    reason: str | None = None,
) -> list[RolloutSummary]:
    """Return the rollouts that all given conditions hold for.

    Args:
      summaries: of rollouts.
      masked: those that don't train.
      group: those of the group with this index.
      reason: those that don't train for this reason.
    """
    return [
        each
        for each in summaries
        if not (masked and each.trains)
        and group in (None, each.group)
        and reason in (None, each.reason)
    ]


def inspect_rollout(
    records: Records,
    rollout_id: str,
    *,
    captures: Directories | None = None,
    mask_incomplete_when_attributed: bool = True,
) -> RolloutPicture | None:
    """Look at one rollout; others are neither built nor kept.

    Args:
      records: as in `collect`.
      rollout_id: the rollout; the first record with this id counts, as in `collect`.
      captures: capture directories, which are left as they are.
      mask_incomplete_when_attributed: as in `collect`.

    Returns:
      The picture, without an advantage, for which the siblings would be needed; None where no
      record has this id.

    Raises:
      OSError: the file cannot be read, or a capture directory is missing.
    """
    judging = judge_rollouts(
        records,
        captures=captures,
        mask_incomplete_when_attributed=mask_incomplete_when_attributed,
        freeze=False,
        only=rollout_id,
    )
    with closing(judging):
        judged = next(judging, None) if rollout_id else None
    if judged is None:
        return None
    turns = _turns_of(judged)
    summary = _summarize(judged, turns)
    tokens, mask, logprobs = _lay_out(turns, summary.trains)
    carried = [f"item {k}" for k in range(len(turns))]
    if judged.build is None:
        return RolloutPicture(
            summary,
            calls=_show_items(judged.record, on_chain=bool(turns)),
            spans=_spans(turns, carried),
            tokens=tokens,
            mask=mask,
            logprobs=logprobs,
        )
    build = judged.build
    return RolloutPicture(
        summary,
        captured=True,
        frozen=None if build.snapshot is None else bool(build.snapshot[0]),
        incomplete=build.incomplete,
        lost=_find_lost(build, captures or ()),
        attribution=build.attribution,
        terminal_chain=str(build.metrics.get("terminal_attribution", {}).get("chain", "")),
        calls=arrange_calls(build),
        spans=_spans(turns, [span.call_id for span in build.spans]),
        tokens=tokens,
        mask=mask,
        logprobs=logprobs,
    )


def _turns_of(judged: JudgedRollout) -> Sequence[Turn]:
    """Return the turns, also of a record that is masked for what its tokens don't show."""
    if judged.turns or judged.build is not None or not isinstance(judged.record, Mapping):
        return judged.turns
    try:
        return inline_turns(judged.record)
    except MaskedError:
        return []


def _summarize(judged: JudgedRollout, turns: Sequence[Turn]) -> RolloutSummary:
    verdict, build = judged.verdict, judged.build
    if build is None:
        calls, chains = _count_items(judged.record), int(bool(turns))
    else:
        calls = len(build.calls) or int(build.metrics.get("n_calls", 0))
        chains = int(build.metrics.get("chains", 0))
    prompt = len(turns[0].prompt_tokens) if turns else 0
    sampled = sum(len(turn.completion_tokens) for turn in turns)
    return RolloutSummary(
        verdict.rollout_id,
        verdict.record,
        verdict.task,
        verdict.group,
        verdict.trajectory,
        verdict.trains,
        verdict.reason,
        verdict.detail,
        calls=calls,
        chains=chains,
        prompt=prompt,
        between=_length(turns) - prompt - sampled,
        sampled=sampled,
        captured=verdict.tokens,
        trained=_count_trained(turns, verdict),
        reward=verdict.reward,
    )


def _count_items(record: Any) -> int:
    return len(generated_items(record)) if isinstance(record, Mapping) else 0


def _length(turns: Sequence[Turn]) -> int:
    return len(turns[-1].prompt_tokens) + len(turns[-1].completion_tokens) if turns else 0


def _count_trained(turns: Sequence[Turn], verdict: RolloutVerdict) -> int:
    """Count the live targets: nothing predicts a token that stands before all others."""
    if not verdict.trains:
        return 0
    orphans = sum(len(turn.prompt_tokens) == 0 < len(turn.completion_tokens) for turn in turns)
    return sum(len(turn.completion_tokens) for turn in turns) - orphans


def _fill_advantages(summaries: list[RolloutSummary]) -> None:
    """Compare each reward with its group's, without the tokens."""
    groups: dict[int, list[RolloutSummary]] = {}
    for each in summaries:
        if each.group is not None:
            groups.setdefault(each.group, []).append(each)
    if not any(each.trains for each in summaries):
        return
    from evsys_jax.data_processing import compute_advantages

    members = list(groups.values())
    bare = [TrajectoryGroup([_bare_trajectory(each) for each in group]) for group in members]
    for group, advantages in zip(members, compute_advantages(bare), strict=True):
        for each, advantage in zip(group, advantages, strict=True):
            each.advantage = advantage if each.trains else None


def _bare_trajectory(summary: RolloutSummary) -> Trajectory:
    reward = 0.0 if summary.reward is None else summary.reward
    return Trajectory([], reward, votes=summary.trains, trains=summary.trains)


def _lay_out(
    turns: Sequence[Turn], trains: bool
) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.float32]]:
    """Lay the turns end to end: tokens, what trains, and the sampler's logprobs."""
    length = _length(turns)
    tokens, mask = np.empty(length, np.int32), np.zeros(length, np.bool_)
    logprobs = np.zeros(length, np.float32)
    if turns:
        tokens[: len(turns[-1].prompt_tokens)] = turns[-1].prompt_tokens
        tokens[len(turns[-1].prompt_tokens) :] = turns[-1].completion_tokens
    for turn in turns:
        start = len(turn.prompt_tokens)
        end = start + len(turn.completion_tokens)
        mask[start:end] = trains
        logprobs[start:end] = turn.logprobs
    mask[:1] = False  # nothing predicts the first token
    return tokens, mask, logprobs


def _spans(turns: Sequence[Turn], callers: list[str]) -> list[Span]:
    spans: list[Span] = []
    done = 0
    for turn, caller in zip(turns, callers, strict=True):
        start = len(turn.prompt_tokens)
        if start > done:
            spans.append(Span(BETWEEN if spans else PROMPT, done, start - done))
        spans.append(Span(SAMPLED, start, len(turn.completion_tokens), caller))
        done = start + len(turn.completion_tokens)
    return spans


def _show_items(record: Any, on_chain: bool) -> list[ShownCall]:
    """List the generated items of a record, each after the one before."""
    shown: list[ShownCall] = []
    for k, item in enumerate(generated_items(record) if isinstance(record, Mapping) else ()):
        prompt, generated = (
            len(tokens) if hasattr(tokens := item.get(key), "__len__") else 0
            for key in ("prompt_token_ids", "generation_token_ids")
        )
        above = shown[-1].call_id if shown else None
        shown.append(
            ShownCall(f"item {k}", above, prompt, generated, on_chain=on_chain, empty=not generated)
        )
    return shown


def _find_lost(build: RolloutBuild, directories: Directories) -> list[str]:
    if not build.incomplete:
        return []
    try:
        directory = find_directory(build.rollout_id, [Path(each) for each in directories])
        return lost_calls(build.rollout_id, directory)
    except (ValueError, OSError, RuntimeError, KeyError):  # the build says what is wrong with it
        return []
