"""Rollout records to groups: one verdict per rollout, and an account of every token.

A record that cannot be used masks its own rollout and nobody else's: it keeps its place in the
group with votes and trains off, and the report says why.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from evsys_jax import checks
from evsys_jax.account import TokenAccount
from evsys_jax.capture.build import RolloutBuild
from evsys_jax.capture.config import rollout_id_of
from evsys_jax.capture_jobs import CaptureJob, Captures, job_of, run_jobs
from evsys_jax.inline import MaskedError, carries_tokens, generated_items, inline_turns
from evsys_jax.rollouts import ChainTurns, Trajectory, TrajectoryGroup
from evsys_jax.verdicts import CollectReport, RolloutVerdict

MAX_REWARD = 2.0**120
"""A larger reward would be no finite float32 advantage, and would take its group along."""


def collect(
    records: str | PathLike[str] | Iterable[Mapping[str, Any]],
    *,
    captures: Captures | None = None,
    mask_incomplete_when_attributed: bool = True,
    workers: int = 1,
    on_record: Callable[[int], None] | None = None,
) -> tuple[list[TrajectoryGroup], CollectReport]:
    """Read NeMo Gym rollout records into groups, joined with their captured calls.

    A record holds `_ng_task_index` and `_ng_rollout_index` (ints), perhaps `_ng_attempt_index` and
    `_ng_rollout_id`, `reward`, perhaps `mask_sample`, and a `response`. Where the items of
    `response.output` carry `prompt_token_ids`, `generation_token_ids` and `generation_log_probs`,
    each prompt extending the prompt and generation before it, each such item becomes a Turn.
    Elsewhere the turns are those of the verified chain that `evsys_jax.capture` builds from the
    rollout's captured calls; the response, `_ng_terminal_model_call_id` and
    `terminal_response_id` tell it which call was scored. A rollout's turns are a `ChainTurns`: a
    sequence whose `Turn`s exist once one is asked for, their arrays views into one.

    Args:
      records: a JSONL file (one record a line), or an iterable of mappings.
      captures: a capture directory, several, or a `TokenSource`; None where the records carry
        their tokens.
      mask_incomplete_when_attributed: False keeps a rollout of which a call is lost, where the
        chain of its scored call was delivered whole.
      workers: processes that read capture directories, this one among them. A script that asks
        for several needs `if __name__ == "__main__":`, since each of them loads it.
      on_record: called with the number of records done, after each.

    Returns:
      The groups, one per task index, in order of first appearance, with their trajectories in
      record order, `metadata["rollout_id"]` on each; and the report. A rollout that must not train
      keeps its place with `votes` and `trains` off and `metadata["mask_reason"]`, one of:
      unreadable_record, bad_rollout_id, no_task_index, duplicate_rollout_id (each of them in no
      group where no task is known), mask_sample, bad_item, logprob_mismatch, broken_prefix,
      bad_tokens, no_generation, unscored, bad_reward, or a reason of `evsys_jax.capture.build`.

    Raises:
      OSError: the file cannot be read, or a capture directory does not exist.
      ValueError: the file is no UTF-8 text.
    """
    report = CollectReport()
    groups: dict[int, list[Trajectory]] = {}
    for judged in judge_rollouts(
        records,
        captures=captures,
        mask_incomplete_when_attributed=mask_incomplete_when_attributed,
        workers=workers,
    ):
        verdict, turns, build = judged.verdict, judged.turns, judged.build
        if verdict.task is not None:
            groups.setdefault(verdict.task, []).append(_trajectory(turns, verdict, build))
        report.verdicts.append(verdict)
        _account(report.account, turns, verdict, build)
        if on_record is not None:
            on_record(len(report.verdicts))
        # Before the next is read: two parsed records at once are twice the memory.
        del judged, build, turns
    return [TrajectoryGroup(members) for members in groups.values()], report


class JudgedRollout(NamedTuple):
    """One rollout record, and what became of it.

    Args:
      verdict: whether it trains, and why not.
      record: as it was read; an exception where the line is no JSON.
      turns: its turns, as far as they could be made.
      build: of its captured calls; None where the record carries its tokens, or is no rollout's.
    """

    verdict: RolloutVerdict
    record: Any
    turns: ChainTurns
    build: RolloutBuild | None


def judge_rollouts(
    records: str | PathLike[str] | Iterable[Mapping[str, Any]],
    *,
    captures: Captures | None = None,
    mask_incomplete_when_attributed: bool = True,
    workers: int = 1,
    freeze: bool = True,
    only: str | None = None,
) -> Generator[JudgedRollout, None, None]:
    """Do what `collect` does, one rollout at a time, and keep none of them.

    Args:
      records: as in `collect`.
      captures: as in `collect`.
      mask_incomplete_when_attributed: as in `collect`.
      workers: as in `collect`.
      freeze: False reads capture directories as they are, and changes nothing in them.
      only: a rollout id; the records of others are read and passed over.

    Yields:
      The rollouts, in the order of their records.

    Raises:
      OSError: the file cannot be read.
    """
    for reading, build in run_jobs(
        _read(records, captures is not None, mask_incomplete_when_attributed, only),
        captures,
        workers=workers,
        freeze=freeze,
    ):
        turns = _decide(reading, build)
        reading.verdict.turns = len(turns)
        reading.verdict.turn_tokens = turns.n_sampled
        yield JudgedRollout(reading.verdict, reading.record, turns, build)
        del reading, build, turns  # before the next is read


class _Reading(NamedTuple):
    """A record whose rollout is known, or what was wrong with it."""

    verdict: RolloutVerdict
    record: Any
    fault: MaskedError | None


def _read(
    records: str | PathLike[str] | Iterable[Mapping[str, Any]],
    captured: bool,
    mask_incomplete_when_attributed: bool,
    only: str | None,
) -> Iterator[tuple[_Reading, CaptureJob | None]]:
    """Yield each record with the capture build that it needs, if it needs one."""
    seen: set[str] = set()
    places: dict[int, tuple[int, int]] = {}  # task -> its group, and the next place in it
    for number, record in _numbered(records):
        verdict, fault, job = RolloutVerdict(number), None, None
        try:
            _identify(record, verdict, seen)
        except MaskedError as error:
            fault = error
        if verdict.task is not None:
            group, place = places.get(verdict.task, (len(places), 0))
            verdict.group, verdict.trajectory = group, place
            places[verdict.task] = group, place + 1
        if only is not None and verdict.rollout_id != only:
            continue
        try:
            if fault is None and captured and not carries_tokens(record):
                job = job_of(
                    record,
                    verdict.rollout_id,
                    mask_incomplete_when_attributed=mask_incomplete_when_attributed,
                )
        except RecursionError:
            fault = MaskedError("unreadable_record", "nested too deep")
        yield _Reading(verdict, record, fault), job
        del record, job


def _decide(reading: _Reading, build: RolloutBuild | None) -> ChainTurns:
    """Fill in the verdict, and return the turns as far as there are any."""
    verdict, record = reading.verdict, reading.record
    turns = ChainTurns()
    try:
        if reading.fault is not None:
            raise reading.fault
        if build is not None:
            verdict.tokens = sum(call.generated for call in build.calls)
            turns = _captured_turns(build)
        if _is_marked(record):
            raise MaskedError("mask_sample", _capture_error(record))
        if build is None:
            turns = inline_turns(record)
        elif not build.trains:
            raise MaskedError(build.reason, build.error or _describe(build))
        _check_score(record)
        verdict.trains = True
    except MaskedError as error:
        verdict.reason, verdict.detail = error.args
    return turns


def _captured_turns(build: RolloutBuild) -> ChainTurns:
    """Return the turns of a build, logprobs rounded to the float32 that rows hold."""
    large = np.abs(build.logprobs) >= checks.FLOAT32_LIMIT
    for span in build.spans if large.any() else ():
        wrong = np.flatnonzero(large[span.start : span.end])
        if len(wrong):
            value = build.logprobs[span.start + wrong[0]]
            where = f"call {span.call_id}: generation_log_probs[{wrong[0]}]"
            raise MaskedError("bad_tokens", f"{where} is {value}, no finite float32")
    bounds = np.array([(span.start, span.end) for span in build.spans], np.int32).reshape(-1, 2)
    starts, ends = bounds.T.copy()
    return ChainTurns(build.tokens, build.logprobs.astype(np.float32), starts, ends)


def _describe(build: RolloutBuild) -> str:
    """Say which calls a masked build stumbled over."""
    lost = "a call was announced or marked and is lost" if build.incomplete else ""
    named = [*build.unresolved_retries, *build.unresolved_parent_calls]
    return ", ".join([*filter(None, [lost, build.attribution.reason]), *map(str, named[:8])])


def _numbered(
    records: str | PathLike[str] | Iterable[Mapping[str, Any]],
) -> Iterator[tuple[int, Any]]:
    """Yield (number, record); a line that is no JSON comes as the error it raised."""
    if not isinstance(records, str | PathLike):
        yield from enumerate(records, start=1)
        return
    with Path(records).open("rb") as lines:
        start = lines.peek(4)[:4]
        if start[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in start:
            raise ValueError(f"{records}: not UTF-8 text")
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    yield number, orjson.loads(line)
                except orjson.JSONDecodeError:
                    yield number, _lenient(line)


def _lenient(line: bytes) -> Any:
    """Read a line as Python's json does, which knows NaN; else return the error."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return error


def _identify(record: Any, verdict: RolloutVerdict, seen: set[str]) -> None:
    """Fill in whose record this is and what it holds, as far as that can be read."""
    if not isinstance(record, Mapping):
        fault = record if isinstance(record, Exception) else f"a {type(record).__name__}"
        raise MaskedError("unreadable_record", f"not a JSON object: {fault}")
    generations = [item.get("generation_token_ids") for item in generated_items(record)]
    verdict.tokens = sum(len(tokens) for tokens in generations if hasattr(tokens, "__len__"))
    verdict.reward = _finite(record.get("reward"))
    try:
        verdict.task = _index(record, "_ng_task_index")
        verdict.rollout_id = rollout_id_of(record) or ""
    except (ValueError, RecursionError) as error:
        raise MaskedError("bad_rollout_id", str(error)) from error
    if verdict.task is None:
        raise MaskedError("no_task_index", "_ng_task_index is missing")
    if not verdict.rollout_id:
        raise MaskedError("bad_rollout_id", "_ng_rollout_id and _ng_rollout_index are missing")
    if verdict.rollout_id in seen:
        raise MaskedError("duplicate_rollout_id", f"{verdict.rollout_id} came before")
    seen.add(verdict.rollout_id)


def _is_marked(record: Mapping[str, Any]) -> bool:
    """Tell whether the recorder has masked the rollout; what is no clear no counts as yes."""
    try:
        return bool(record.get("mask_sample"))
    except ValueError:
        return True


def _capture_error(record: Mapping[str, Any]) -> str:
    capture = record.get("_ng_token_capture")
    cause = capture.get("error") if isinstance(capture, Mapping) else None
    return cause if isinstance(cause, str) else checks.show(cause) if cause else ""


def _check_score(record: Mapping[str, Any]) -> None:
    """Raise unless the record has a reward that can be compared."""
    if record.get("reward") is None:
        raise MaskedError("unscored", "reward is missing")
    reward = _finite(record["reward"])
    if reward is None or abs(reward) >= MAX_REWARD:
        raise MaskedError(
            "bad_reward", f"reward {checks.show(record['reward'])} is no number below 2**120"
        )


def _index(record: Mapping[str, Any], key: str) -> int | None:
    value = record.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 0:
        raise ValueError(f"{key} {checks.show(value)} is not an integer from 0")
    return int(value)


def _finite(reward: Any) -> float | None:
    try:
        return checks.check_reward(reward, "")
    except ValueError:
        return None


def _trajectory(
    turns: ChainTurns, verdict: RolloutVerdict, build: RolloutBuild | None
) -> Trajectory:
    metadata: dict[str, Any] = {"rollout_id": verdict.rollout_id}
    if not verdict.trains:
        metadata["mask_reason"] = verdict.reason
    if build is not None:
        metadata["_ng_token_capture"] = (
            build.metrics if build.error is None else {**build.metrics, "error": build.error}
        )
    reward = 0.0 if verdict.reward is None else verdict.reward
    return Trajectory(turns, reward, metadata, votes=verdict.trains, trains=verdict.trains)


def _account(
    account: TokenAccount, turns: ChainTurns, verdict: RolloutVerdict, build: RolloutBuild | None
) -> None:
    """Enter one rollout: its tokens are masked; or trained, but for what has no place in a row."""
    account.captured += verdict.tokens
    if not verdict.trains:
        account.masked[verdict.reason] += verdict.tokens
        return
    sampled = turns.completion_lengths
    orphans = (sampled > 0) & (turns.starts == 0)
    account.trained += int(sampled.sum() - orphans.sum())
    for counter, reason, counted in (
        (account.dropped, "no_context", orphans),
        (account.dropped_turns, "no_context", orphans & (sampled == 1)),
        (account.dropped_turns, "empty_completion", sampled == 0),
    ):
        if counted.any():
            counter[reason] += int(counted.sum())
    delivered = {span.call_id for span in build.spans} if build is not None else set()
    for call in build.calls if build is not None else ():
        if call.call_id not in delivered:
            reason = (
                "empty_call" if call.empty else "quarantined" if call.quarantined else "off_chain"
            )
            if call.generated:
                account.dropped[reason] += call.generated
            account.dropped_turns[reason] += 1
