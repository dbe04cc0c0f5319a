"""The builder: against the slow reference on generated captures, in any order, and in size."""

import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_builder import build_by_reference

from evsys_jax.capture.build import build_rollout
from evsys_jax.capture.builder import BuildOutput, iter_chain_entries, prefix_merging, run_builder
from evsys_jax.capture.records import TokenEntry, compute_digest
from evsys_jax.capture.stamps import Stamps, one_thread
from evsys_jax.capture.tokentree import START, MarkIndex, TokenTree


def _call(call_id: str, prompt: list[int], generation: list[int], **fields: Any) -> TokenEntry:
    fields.setdefault("generation_log_probs", [-0.5] * len(generation))
    return TokenEntry(
        rollout_id="r",
        model_call_id=call_id,
        prompt_token_ids=prompt,
        generation_token_ids=generation,
        **fields,
    )


def _child(call_id: str, parent: str, prompt: list[int], generation: list[int], **fields: Any):
    return _call(
        call_id, prompt, generation, parent_call_id=parent, parent_resolution="resolved", **fields
    )


def _root(call_id: str, prompt: list[int], generation: list[int], **fields: Any) -> TokenEntry:
    return _call(call_id, prompt, generation, parent_resolution="root", **fields)


@st.composite
def captures(draw: st.DrawFn) -> list[TokenEntry]:
    """A capture over three tokens, so that prefixes, retries and conflicts are common."""
    names = "abcdefgh"[: draw(st.integers(1, 8))]
    sequences: dict[str, list[int]] = {}
    entries = []
    for name in names:
        known = list(sequences)
        parent = draw(st.sampled_from([*known, *known[-2:], *known[-2:], "", "z", name]))
        generation = draw(st.sampled_from([[], [], [1], [2], [1, 2]]))
        suffix = draw(st.sampled_from([[], [], [1], [3]]))
        prompt = sequences.get(parent, []) + suffix
        if draw(st.integers(0, 9)) == 0:
            prompt = suffix
        sequence = sequences[name] = prompt + generation
        fields: dict[str, Any] = {
            "created_at": float(draw(st.integers(-1, 2))),
            "generation_log_probs": [-0.5] * len(generation),
            "digest": draw(
                st.sampled_from([None, compute_digest(sequence), compute_digest(sequence)])
            ),
            "cum_len": draw(st.sampled_from([None, *[len(sequence)] * 8, len(sequence) + 1])),
            "parent_resolution": draw(st.sampled_from(["root"] * 4 + ["unresolved", None])),
        }
        if draw(st.integers(0, 15)) == 0:
            fields["digest"] = compute_digest(sequence[:-1])
        if parent:
            fields["parent_call_id"] = parent
            fields["parent_resolution"] = draw(st.sampled_from(["resolved", "resolved", None]))
            if fields["parent_resolution"] and draw(st.booleans()):
                fields["prompt_is_delta"] = True
                prompt = suffix
        entries.append(_call(name, prompt, generation, **fields))
        if draw(st.integers(0, 7)) == 0:
            other = draw(st.sampled_from(["response_id", "model", "parent", "kind"]))
            if other == "parent" and parent:
                fields["parent_call_id"] = "y"
            elif other == "kind" and parent:
                fields["prompt_is_delta"] = not fields.get("prompt_is_delta")
                fields["parent_resolution"] = "resolved"
            elif other in ("response_id", "model"):
                fields[other] = "other"
            entries.append(_call(name, prompt, generation, **fields))
    return draw(st.permutations(entries))


def _describe(out: BuildOutput) -> dict[str, Any]:
    notes = out.notes
    described: dict[str, Any] = {
        "chains": [[link.entry.model_call_id for link in chain.links] for chain in out.chains],
        "terminal_chain": notes.terminal_chain,
        "unresolved_parent_calls": notes.unresolved_parent_calls,
        "failures": notes.parent_link_failures,
    }
    if not out.chains:
        return described
    main = next(chain for chain in out.chains if chain.chain_id == "main")
    tokens = list(main.root_prompt)
    for link in main.links:
        tokens += [*link.interstitial, *link.entry.generation_token_ids]
    return described | {
        "main": [link.entry.model_call_id for link in main.links],
        "main_tokens": tokens,
        "prompts": [list(link.entry.prompt_token_ids) for link in main.links],
        "quarantined": sorted(out.quarantined),
        "roots": notes.roots,
        "captured": notes.generated_tokens_captured,
        "delivered": notes.generated_tokens_delivered,
        "fraction": notes.delivered_fraction,
        "unresolved_retries": notes.unresolved_retries,
        "empty": notes.empty_generation_calls,
    }


@settings(max_examples=400, deadline=None)
@given(captures(), st.sampled_from([None, None, "a", "b", "c", "d", "e", "nobody"]))
def test_like_the_reference(entries: list[TokenEntry], terminal: str | None) -> None:
    out = prefix_merging(entries, terminal)
    assert _describe(out) == build_by_reference(entries, terminal)
    assert out.notes.terminal_call_id == terminal
    assert out.notes.chains == len(out.chains)
    branches = [chain.chain_id for chain in out.chains if chain.chain_id != "main"]
    assert branches == [f"branch-{index}" for index in range(len(branches))]
    for chain in out.chains:
        assert not any(link.entry.prompt_is_delta for link in chain.links)


@settings(max_examples=150, deadline=None)
@given(captures(), st.randoms(use_true_random=False))
def test_order_of_records_does_not_matter(entries: list[TokenEntry], random: Any) -> None:
    unique = list({entry.model_call_id: entry for entry in entries}.values())
    shuffled = random.sample(unique, len(unique))
    left, right = (_describe(prefix_merging(each)) for each in (unique, shuffled))
    for described in (left, right):
        described["unresolved_parent_calls"] = sorted(described["unresolved_parent_calls"])
    assert left == right


@settings(max_examples=150, deadline=None)
@given(captures())
def test_every_generated_token_is_somewhere(entries: list[TokenEntry]) -> None:
    out = prefix_merging(entries)
    lost = {report.call_id for report in out.calls if report.broken}
    kept = {entry.model_call_id: entry for entry in reversed(entries)}
    generated = {name: len(entry.generation_token_ids) for name, entry in kept.items()}
    assert {report.call_id: report.generated for report in out.calls} == generated
    in_calls = sum(count for name, count in generated.items() if name not in lost)
    assert out.notes.generated_tokens_captured == in_calls
    distinct = [entry.model_call_id for entry in iter_chain_entries(out.chains)]
    linked = {link.entry.model_call_id for chain in out.chains for link in chain.links}
    assert sorted(distinct) == sorted(linked)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(1, 2), max_size=9), min_size=1, max_size=9), st.data())
def test_the_token_tree_answers_like_lists(sequences: list[list[int]], data: st.DataObject) -> None:
    tree = TokenTree()
    growing = Stamps(tree)
    index: MarkIndex[int] = MarkIndex(tree)
    marks = []
    for number, sequence in enumerate(sequences):
        cut = data.draw(st.integers(0, len(sequence)))
        mark = tree.extend(START, np.array(sequence[:cut], np.int32))
        marks.append(tree.extend(mark, np.array(sequence[cut:], np.int32)))
        index.add(marks[-1], number)
        if data.draw(st.booleans()):
            assert growing.digest(marks[-1]) == compute_digest(sequence)
    stamps = Stamps(tree)
    for mark, sequence in zip(marks, sequences, strict=True):
        assert tree.tokens(mark).tolist() == sequence
        assert growing.digest(mark) == stamps.digest(mark) == compute_digest(sequence)
        prefixes = [each for each in sequences if sequence[: len(each)] == each]
        for other, beginning in zip(marks, sequences, strict=True):
            assert tree.begins_with(mark, other) == (beginning in prefixes)
            assert (mark == other) == (beginning == sequence)
        found = index.find_deepest(mark)
        assert [sequences[number] for number in found] == [
            each for each in prefixes if len(each) == len(max(prefixes, key=len))
        ]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(1, 2), max_size=9), min_size=1, max_size=9), st.data())
def test_a_second_thread_hashes_the_same(sequences: list[list[int]], data: st.DataObject) -> None:
    tree = TokenTree()
    marks = [tree.extend(START, np.array(sequence, np.int32)) for sequence in sequences]
    some = data.draw(st.lists(st.sampled_from(marks)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evsys_jax.capture.stamps._WORTH_A_THREAD", 0)
        ahead = Stamps(tree)
        ahead.hash_ahead(some)
        for mark, sequence in data.draw(st.permutations(list(zip(marks, sequences, strict=True)))):
            assert ahead.digest(mark) == compute_digest(sequence)


def test_the_second_thread_can_be_done_without() -> None:
    asked: list[str] = []
    tree = TokenTree()
    mark = tree.extend(START, np.array([1, 2, 3], np.int32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evsys_jax.capture.stamps._WORTH_A_THREAD", 0)
        patch.setattr("evsys_jax.capture.stamps._helper", lambda: asked.append("thread"))
        with one_thread():
            alone = Stamps(tree)
            alone.hash_ahead([mark])
            assert asked == []
        assert alone.digest(mark) == compute_digest([1, 2, 3])
        Stamps(tree).hash_ahead([mark])
        assert asked == ["thread"]


def test_a_forked_child_does_not_wait_for_the_thread_of_its_parent() -> None:
    code = """
import os, sys
import numpy as np
from evsys_jax.capture import compute_digest, stamps
from evsys_jax.capture.tokentree import START, TokenTree

stamps._WORTH_A_THREAD = 0

def check():
    tree = TokenTree()
    marks = [tree.extend(START, np.arange(n, dtype=np.int32)) for n in (10, 1000, 3)]
    ahead = stamps.Stamps(tree)
    ahead.hash_ahead(marks)
    assert [ahead.digest(mark) for mark in marks] == [
        compute_digest(list(range(mark[1]))) for mark in marks
    ]
    helper = stamps._helper()
    return helper is None or helper.submit(int).result(timeout=60) == 0

assert check()
child = os.fork()
if not child:
    os._exit(0 if check() else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    # Newer versions of Python warn of any fork beside a thread.
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_a_call_report_says_what_became_of_each_call() -> None:
    entries = [
        _root("a", [1], [2], created_at=1.0),
        _child("e", "a", [1, 2], []),
        _child("b", "e", [1, 2, 3], [4]),
        _child("b2", "a", [1, 2, 3], [5]),
        _child("c", "gone", [9], [9], prompt_is_delta=True),
        _root("a", [1], [2], generation_log_probs=[-0.25]),
    ]
    out = prefix_merging(entries, "b")
    reports = {report.call_id: report for report in out.calls}
    assert reports["a"].contested and reports["a"].parent_id is None
    assert reports["e"].empty and reports["e"].prompt_length == 2
    assert reports["b"].parent_id == "a" and reports["b"].claimed_parent_id == "e"
    assert reports["b"].note == "parent_call_id_missing_recovered"
    assert reports["b2"].quarantined and not reports["b"].quarantined
    assert reports["c"].broken and reports["c"].generated == 1
    assert out.notes.terminal_chain == "broken"


def test_another_builder_is_an_error() -> None:
    with pytest.raises(ValueError, match="other"):
        run_builder([], "other")


def test_values_assigned_behind_the_records_back_are_named() -> None:
    entry = _root("a", [1], [2])
    for bad in ([2**31], [-1], [1.5], ["x"], [[1]], None):
        entry.prompt_token_ids = bad
        with pytest.raises(ValueError, match="'a': prompt_token_ids"):
            prefix_merging([entry])


def _lineage(count: int, stride: int) -> list[TokenEntry]:
    calls = [_root("d00000", [1], [2])]
    calls += [
        _child(f"d{i:05}", f"d{i - 1:05}", [1], [2], prompt_is_delta=True) for i in range(1, count)
    ]
    return [calls[j * stride % count] for j in range(count)]


@pytest.mark.parametrize("stride", [1, -1, 7919])
def test_a_lineage_of_20000_deltas_is_quick_in_any_order(stride: int) -> None:
    entries = _lineage(20_000, stride)
    start = time.perf_counter()
    build = build_rollout("r", entries)
    assert time.perf_counter() - start < 5.0
    assert build.trains and build.tokens.tolist() == [1, 2] * 20_000
    assert len(build.turns()) == 20_000


def test_many_branches_that_share_a_long_beginning_are_quick() -> None:
    # Every call of a lineage also has a branch of another prompt: 3,000 chains of 1,500 calls on
    # average, which must not be written out one by one.
    entries = _lineage(3_000, 1)
    entries += [
        _child(f"x{i:05}", f"d{i:05}", [9], [9], prompt_is_delta=True) for i in range(3_000)
    ]
    start = time.perf_counter()
    build = build_rollout("r", entries, explicit_terminal_call_id="d02999")
    assert time.perf_counter() - start < 5.0
    assert build.trains and build.metrics["chains"] == 3_000
