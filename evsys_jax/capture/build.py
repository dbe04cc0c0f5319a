"""One rollout's captured calls as arrays, with a verdict: the build behind every result.

`build_rollout` and its two siblings keep numpy arrays from the record to the end; the result
dictionaries of `consumer` are made from the same build.

A build that does not train says why in one short, stable word:

    capture_not_located         no directory, more than one that knows the rollout, or an id that
                                is no file name
    capture_unreadable          the capture could not be frozen or read
    no_records                  nothing was captured
    build_failed                the calls do not make one sound chain object (`error` has the rest)
    incomplete_capture          a call was announced or marked and is lost
    terminal_not_captured       the scored call is not among the usable ones
    terminal_broken             its chain has a boundary, a quarantined or a contested call
    conflicting_terminal        the witnesses name different calls
    attribution_failed          the search for the scored call raised
    declared_terminal_not_captured, declared_terminal_ambiguous
                                the harness's response id names no call, or several
    unresolved_retry            nothing tells which of several answers was kept
    contested_call              copies of a call disagree
    broken_delta                a delta cannot be rebuilt
    unresolved_parent           a call starts a fragment
    ambiguous_chains            more than one chain or root, and no terminal to choose

The first that applies, in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evsys_jax.capture.builder import (
    PREFIX_MERGING,
    BuildOutput,
    CallReport,
    Chain,
    iter_chain_entries,
    last_call_id,
    run_builder,
)
from evsys_jax.capture.projection import (
    Item,
    assert_prefix_contiguity,
    find_main_chain,
    measure_usage,
    project_arrays,
)
from evsys_jax.capture.records import TokenEntry
from evsys_jax.capture.terminal import TerminalAttribution, resolve_terminal
from evsys_jax.rollouts import Turn

ATTRIBUTION_ERROR = "attribution_error"


class CallSpan(NamedTuple):
    """Where a call of the main chain wrote.

    Args:
      call_id: the call.
      start: its first generated token; its whole prompt is everything before.
      end: behind its last one.
    """

    call_id: str
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class RolloutBuild:
    """The main chain of a rollout as arrays, and whether it may train.

    The arrays are empty where the build failed. A masked build that did not fail keeps them, for
    people to look at.

    Args:
      rollout_id: the rollout.
      builder: the algorithm.
      model: the model's name.
      tokens: [L] int32, the whole sequence of the chain's last call.
      sampled: [L] bool, True where the policy wrote the token.
      logprobs: [L] float64, the sampler's; 0 where not sampled.
      spans: the calls of the chain in order.
      trains: False masks the rollout.
      reason: why it does not train, a word of the list above; "" where it does.
      error: class name and text of what failed, None where nothing did.
      metrics: plain Python values, as in the result dictionary.
      attribution: the scored call, and how it was found.
      unresolved_retries: ids of retries of which none is known to be the one kept.
      unresolved_parent_calls: ids of conflicts, broken deltas and fragments.
      calls: a report on every call; empty where the capture could not be read.
      chains: (chain id, id of its last call) of every chain.
      incomplete: a call was announced or marked and is lost.
      snapshot: (snapshot id, version) of the frozen capture, where it was read from one.
    """

    rollout_id: str
    builder: str = PREFIX_MERGING
    model: str = ""
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    sampled: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    logprobs: NDArray[np.float64] = field(default_factory=lambda: np.empty(0, np.float64))
    spans: tuple[CallSpan, ...] = ()
    trains: bool = False
    reason: str = ""
    error: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    attribution: TerminalAttribution = field(default_factory=TerminalAttribution)
    unresolved_retries: tuple[str, ...] = ()
    unresolved_parent_calls: tuple[str, ...] = ()
    calls: Sequence[CallReport] = ()
    chains: tuple[tuple[str, str], ...] = ()
    incomplete: bool = False
    snapshot: tuple[str, int] | None = None

    def turns(self) -> list[Turn]:
        """The chain as turns, whose arrays are views into this build's.

        A chain of 200 turns therefore costs its length, not its square.
        """
        return [
            Turn(
                self.tokens[: span.start],
                self.tokens[span.start : span.end],
                self.logprobs[span.start : span.end],
            )
            for span in self.spans
        ]


def build_rollout(
    rollout_id: str,
    entries: Any,
    *,
    builder: str = PREFIX_MERGING,
    model: str = "",
    verified_response: Any = None,
    explicit_terminal_call_id: str | None = None,
    declared_response_id: str | None = None,
    mask_incomplete_when_attributed: bool = True,
    incomplete: bool = False,
) -> RolloutBuild:
    """Attribute, chain and check the captured calls of one rollout.

    Args:
      rollout_id: the rollout.
      entries: its records, repeats included; or a frozen snapshot of them.
      builder: `prefix_merging`.
      model: the model's name, handed through.
      verified_response: the response that was scored.
      explicit_terminal_call_id: the call that the caller names as the scored one.
      declared_response_id: the response id that the harness kept.
      mask_incomplete_when_attributed: False keeps an incomplete capture whose scored chain was
        delivered. Not known to NeMo Gym 0.7, which always masked.
      incomplete: a call is lost; a snapshot's own flag counts as well.

    Returns:
      The build. Bad data masks it; `trains` and `reason` say so.
    """
    snapshot = None
    if hasattr(entries, "entries"):
        snapshot = (entries.snapshot_id, entries.version)
        incomplete = incomplete or bool(entries.incomplete)
        entries = entries.entries
    records = list(entries)
    if records:
        build, _ = assemble(
            rollout_id,
            records,
            builder=builder,
            model=model,
            attribution=attribute_terminal(
                records, verified_response, explicit_terminal_call_id, declared_response_id
            ),
        )
    else:
        build = fail_build(rollout_id, "no_records", no_records_error(rollout_id), builder, model)
    build = replace(build, snapshot=snapshot)
    return mask_incomplete(build, mask_incomplete_when_attributed) if incomplete else build


def attribute_terminal(
    records: Sequence[TokenEntry],
    verified_response: Any,
    explicit_terminal_call_id: str | None,
    declared_response_id: str | None,
    resolve: Callable[..., TerminalAttribution] = resolve_terminal,
) -> TerminalAttribution:
    """`resolve_terminal`, where an exception is an attribution that failed and masks."""
    try:
        return resolve(
            records,
            verified_response,
            explicit_terminal_call_id,
            declared_response_id=declared_response_id,
        )
    except Exception:
        return TerminalAttribution(reason=ATTRIBUTION_ERROR)


def assemble(
    rollout_id: str,
    records: Sequence[TokenEntry],
    *,
    builder: str,
    model: str,
    attribution: TerminalAttribution,
    run: Callable[..., BuildOutput] = run_builder,
) -> tuple[RolloutBuild, list[Item]]:
    """Build with a known attribution; the incomplete flag is not looked at yet.

    Args:
      rollout_id: the rollout.
      records: its records, repeats included.
      builder: the algorithm.
      model: the model's name.
      attribution: the scored call.
      run: what builds; called once.

    Returns:
      The build, and the output items of the main chain with arrays in them (none if it failed).
    """
    out: BuildOutput | None = None
    try:
        out = run(records, builder=builder, terminal_call_id=attribution.model_call_id)
        check_log_probs(out.chains)
        chain = find_main_chain(out)
        items, tokens = project_arrays(chain)
        measure_usage(items)
        assert_prefix_contiguity({"output": items})
        build = RolloutBuild(rollout_id, builder, model, attribution=attribution)
        return _complete_build(build, len(records), out, chain, tokens), items
    except (AssertionError, ValueError, KeyError, IndexError, TypeError) as error:
        verdict = "error" if out is None else out.notes.terminal_chain or "error"
        metrics = {
            "n_calls": len(records),
            "terminal_attribution": _describe_terminal(attribution, verdict),
        }
        failed = fail_build(rollout_id, "build_failed", describe_error(error), builder, model)
        calls = () if out is None else out.calls
        return replace(failed, metrics=metrics, attribution=attribution, calls=calls), []


def mask_incomplete(build: RolloutBuild, always: bool) -> RolloutBuild:
    """Note that the capture is incomplete, and mask the build unless that does no harm.

    Args:
      build: the build.
      always: False keeps a build whose scored chain was delivered: the lost call cannot sit
        inside it.
    """
    metrics = {**build.metrics, "capture_incomplete": True}
    build = replace(build, metrics=metrics, incomplete=True)
    delivered = metrics.get("terminal_attribution", {}).get("chain") == "delivered"
    if build.error is not None or not (always or not delivered):
        return build
    return replace(build, trains=False, reason="incomplete_capture")


def fail_build(
    rollout_id: str,
    reason: str,
    error: str,
    builder: str = PREFIX_MERGING,
    model: str = "",
) -> RolloutBuild:
    """A masked build without anything in it."""
    return RolloutBuild(
        rollout_id, builder, model, reason=reason, error=error, metrics={"n_calls": 0}
    )


def describe_error(error: BaseException) -> str:
    """Class name and text."""
    return f"{type(error).__name__}: {error}"


def no_records_error(rollout_id: str) -> str:
    """The error of a rollout of which nothing was captured."""
    return f"ValueError: no captured records for rollout {rollout_id!r}"


def check_log_probs(chains: Iterable[Chain]) -> None:
    """Check that every call of every chain has one finite log-prob per generated token.

    Raises:
      ValueError: one has not; names the call.
    """
    entries = list(iter_chain_entries(chains))
    arrays = [np.asarray(entry.generation_log_probs, np.float64) for entry in entries]
    counts = [len(entry.generation_token_ids) for entry in entries]
    fitting = all(array.shape == (count,) for array, count in zip(arrays, counts, strict=True))
    if fitting and np.isfinite(np.concatenate([np.empty(0), *arrays])).all():
        return
    for entry, log_probs, tokens in zip(entries, arrays, counts, strict=True):
        what = f"call {entry.model_call_id!r}: generation_log_probs"
        if log_probs.shape != (tokens,):
            raise ValueError(f"{what} has shape {log_probs.shape} for {tokens} generated tokens")
        finite = np.isfinite(log_probs)
        if not finite.all():
            raise ValueError(f"{what}[{int(finite.argmin())}] is not finite")


def _complete_build(
    build: RolloutBuild, n_calls: int, out: BuildOutput, chain: Chain, tokens: NDArray[np.int32]
) -> RolloutBuild:
    notes = out.notes
    sampled = np.zeros(len(tokens), np.bool_)
    logprobs = np.zeros(len(tokens), np.float64)
    spans = []
    end = len(chain.root_prompt)
    for link in chain.links:
        start = end + len(link.interstitial)
        end = start + len(link.entry.generation_token_ids)
        sampled[start:end] = True
        logprobs[start:end] = link.entry.generation_log_probs
        spans.append(CallSpan(link.entry.model_call_id, start, end))
    reason = _find_reason(build.attribution, out)
    metrics = {
        "n_calls": n_calls,
        "terminal_attribution": _describe_terminal(build.attribution, notes.terminal_chain),
        "chains": notes.chains,
        "roots": notes.roots,
        "quarantined_calls": len(out.quarantined),
        "quarantined_fraction": round(len(out.quarantined) / n_calls, 4),
        "delivered_fraction": notes.delivered_fraction,
        "generated_tokens_captured": notes.generated_tokens_captured,
        "generated_tokens_delivered": notes.generated_tokens_delivered,
        "parent_link_failures": dict(notes.parent_link_failures),
        "unresolved_parent_calls": len(notes.unresolved_parent_calls),
        "empty_generation_calls": len(notes.empty_generation_calls),
    }
    return replace(
        build,
        tokens=tokens,
        sampled=sampled,
        logprobs=logprobs,
        spans=tuple(spans),
        trains=not reason,
        reason=reason,
        metrics=metrics,
        unresolved_retries=tuple(notes.unresolved_retries),
        unresolved_parent_calls=tuple(notes.unresolved_parent_calls),
        calls=out.calls,
        chains=tuple((each.chain_id, last_call_id(each)) for each in out.chains),
    )


def _describe_terminal(attribution: TerminalAttribution, chain: str) -> dict[str, Any]:
    return {
        "method": attribution.method or "none",
        "call_id": attribution.model_call_id,
        "reason": attribution.reason,
        "chain": chain,
    }


def _find_reason(attribution: TerminalAttribution, out: BuildOutput) -> str:
    notes = out.notes
    if notes.terminal_chain == "delivered":
        return ""
    if attribution.attributed:
        return f"terminal_{notes.terminal_chain or 'not_captured'}"
    if attribution.disagreed:
        # NeMo Gym 0.7 fell back to the single-chain rule here.
        return "conflicting_terminal"
    if attribution.reason == ATTRIBUTION_ERROR:
        return "attribution_failed"
    for declared, reason in _DECLARED_REASONS.items():
        if declared in attribution.reason.split(","):
            return reason
    if notes.unresolved_retries:
        return "unresolved_retry"
    if notes.unresolved_parent_calls:
        for failure, reason in _LINK_REASONS.items():
            if notes.parent_link_failures.get(failure):
                return reason
        return "unresolved_parent"
    return "ambiguous_chains" if (notes.roots, notes.chains) != (1, 1) else ""


_DECLARED_REASONS = {
    "declared_terminal_not_captured": "declared_terminal_not_captured",
    "declared_ambiguous": "declared_terminal_ambiguous",
}
_LINK_REASONS = {
    "duplicate_call_id_conflict": "contested_call",
    "delta_chain_unreconstructable": "broken_delta",
}
