"""Projection: where the tokens go, plain values out, contiguity checked as lists or arrays."""

import json
from typing import Any

import numpy as np
import pytest

from evsys_jax.capture.builder import BuildNotes, BuildOutput, Chain, ChainLink
from evsys_jax.capture.projection import (
    assert_prefix_contiguity,
    project_arrays,
    project_chain_to_output_items,
    project_main_chain_response,
)
from evsys_jax.capture.records import TokenEntry


def _chain(*calls: tuple[list[int], list[int], dict[str, Any]], chain_id: str = "main") -> Chain:
    links = []
    seen: list[int] = [1]
    for number, (between, generation, fields) in enumerate(calls):
        entry = TokenEntry(
            rollout_id="r",
            model_call_id=f"c{number}",
            prompt_token_ids=seen + between,
            generation_token_ids=generation,
            generation_log_probs=[-0.5] * len(generation),
            **fields,
        )
        seen = [*seen, *between, *generation]
        links.append(ChainLink(entry, np.array(between, np.int32)))
    return Chain(chain_id, links, np.array([1], np.int32))


def test_each_record_carries_its_whole_prompt_and_what_it_wrote() -> None:
    items = [{"type": "reasoning"}, {"type": "message"}]
    chain = _chain(
        ([], [2], {"output_items": items, "token_item_index": 0}),
        ([5, 6], [7, 8], {"routed_experts": [[0]]}),
        ([], [9], {"output_items": items}),
    )
    first = {"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.5]}
    assert project_chain_to_output_items(chain) == [
        {"type": "reasoning", **first},
        {"type": "message"},
        {
            "type": "message",
            "prompt_token_ids": [1, 2, 5, 6],
            "generation_token_ids": [7, 8],
            "generation_log_probs": [-0.5, -0.5],
            "routed_experts": [[0]],
        },
        {"type": "reasoning"},
        {
            "type": "message",
            "prompt_token_ids": [1, 2, 5, 6, 7, 8],
            "generation_token_ids": [9],
            "generation_log_probs": [-0.5],
        },
    ]
    assert items == [{"type": "reasoning"}, {"type": "message"}]


def test_a_response_is_plain_json() -> None:
    out = BuildOutput([_chain(([], [2], {}), ([4], [5, 6], {}))], [], BuildNotes())
    response = project_main_chain_response("r", out, "m")
    assert json.loads(json.dumps(response)) == response
    assert (response["id"], response["model"], response["object"]) == ("proj-r", "m", "response")
    assert response["usage"] == {"input_tokens": 1, "output_tokens": 3}
    output = response["output"]
    assert output[0]["prompt_token_ids"] is not output[1]["prompt_token_ids"]


def test_the_arrays_of_a_chain_are_views_of_one() -> None:
    items, tokens = project_arrays(_chain(([], [2], {}), ([4], [5, 6], {})))
    assert tokens.tolist() == [1, 2, 4, 5, 6]
    assert all(np.shares_memory(item["prompt_token_ids"], tokens) for item in items)


def test_nothing_to_project_is_an_error() -> None:
    with pytest.raises(ValueError, match="no chain"):
        project_main_chain_response("r", BuildOutput([], [], BuildNotes()))
    with pytest.raises(ValueError, match="no chain"):
        branch = _chain(([], [2], {}), chain_id="branch-0")
        project_main_chain_response("r", BuildOutput([branch], [], BuildNotes()))
    with pytest.raises(ValueError, match="generated token"):
        project_main_chain_response("r", BuildOutput([_chain(([], [], {}))], [], BuildNotes()))


def test_a_generated_item_without_prompt_is_a_key_error() -> None:
    items = [{"generation_token_ids": []}, {}]
    chain = _chain(([], [2], {"output_items": items, "token_item_index": 1}))
    with pytest.raises(KeyError, match="prompt_token_ids"):
        project_main_chain_response("r", BuildOutput([chain], [], BuildNotes()))


def _response(*pairs: tuple[Any, Any]) -> dict[str, Any]:
    output = [{"prompt_token_ids": p, "generation_token_ids": g} for p, g in pairs]
    return {"output": [{"type": "reasoning"}, *output]}


@pytest.mark.parametrize("kind", [list, lambda values: np.array(values, np.int32)])
def test_contiguity(kind: Any) -> None:
    def pairs(*given: tuple[list[int], list[int]]) -> dict[str, Any]:
        return _response(*((kind(p), kind(g)) for p, g in given))

    assert_prefix_contiguity(pairs())
    assert_prefix_contiguity(pairs(([1], [2]), ([1, 2], [3]), ([1, 2, 3, 4], [])))
    for broken in (([1], [3]), ([1, 3, 4], [5]), ([2, 2], [5]), ([], [])):
        with pytest.raises(AssertionError, match="generated item 1"):
            assert_prefix_contiguity(pairs(([1], [2]), broken))


def test_contiguity_of_views_and_of_mixed_values() -> None:
    tokens = np.arange(9, dtype=np.int32)
    assert_prefix_contiguity(_response((tokens[:2], tokens[2:3]), (tokens[:5], tokens[5:6])))
    with pytest.raises(AssertionError):
        assert_prefix_contiguity(_response((tokens[:2], tokens[4:5]), (tokens[:5], tokens[5:6])))
    assert_prefix_contiguity(_response((None, [0, 1]), (tokens[:2], [7]), ([0, 1, 7], [8])))
    with pytest.raises(AssertionError):
        assert_prefix_contiguity(_response((tokens[:2], [7]), ([0, 2, 7], [8])))
