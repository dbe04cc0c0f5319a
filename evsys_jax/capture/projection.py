"""A chain as a Responses object: the items the model produced, with the tokens on them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from evsys_jax.capture.builder import BuildOutput, Chain

Item = dict[str, Any]


def project_chain_to_output_items(chain: Chain) -> list[Item]:
    """Lay the tokens of a chain on its output items, in order.

    Per call, the item at `token_item_index` carries the tokens; without an index, the items that
    have inline token ids already; without any, the last item. A call without items gives a bare
    message. The items are copies, what they contain is shared with the records.

    Args:
      chain: a chain of the builder.

    Returns:
      The items, with plain Python lists.
    """
    items, tokens = project_arrays(chain)
    return to_plain_items(items, tokens)


def project_main_chain_response(rollout_id: str, out: BuildOutput, model: str = "") -> Item:
    """Make a Responses object of the main chain.

    Args:
      rollout_id: names the response.
      out: what the builder returned.
      model: the model's name, handed through.

    Returns:
      The response, with plain Python values.

    Raises:
      ValueError: no chain, or no item with a generated token.
      KeyError: the first generated item has no `prompt_token_ids`.
    """
    items, tokens = project_arrays(find_main_chain(out))
    usage = measure_usage(items)
    return make_response(rollout_id, model, to_plain_items(items, tokens), usage)


def assert_prefix_contiguity(response: Item) -> None:
    """Check that every generated item's prompt begins with all prompts and tokens before it.

    Args:
      response: a Responses object. Items without `generation_token_ids` do not matter.

    Raises:
      AssertionError: a prompt does not begin so.
    """
    generated = [item for item in response["output"] if _is_generated(item)]
    pairs = [(item.get("prompt_token_ids"), item["generation_token_ids"]) for item in generated]
    if all(isinstance(part, np.ndarray) for pair in pairs for part in pair):
        _assert_contiguous_arrays(pairs)
        return
    seen: Any = []
    for index, pair in enumerate(pairs):
        prompt, generation = map(_to_list, pair)
        prompt = prompt or []
        if prompt[: len(seen)] != seen:
            raise AssertionError(_describe_break(index, len(seen)))
        seen = prompt + generation


def find_main_chain(out: BuildOutput) -> Chain:
    """The main chain of a build.

    Raises:
      ValueError: there is none.
    """
    for chain in out.chains:
        if chain.chain_id == "main":
            return chain
    raise ValueError("no call with generated tokens: there is no chain")


def concatenate_chain(chain: Chain) -> NDArray[np.int32]:
    """All tokens of a chain, [L] int32: the root prompt, then per call what is new and written."""
    pieces: list[Any] = [chain.root_prompt]
    for link in chain.links:
        pieces += (link.interstitial, link.entry.generation_token_ids)
    return np.concatenate([np.asarray(piece, np.int32) for piece in pieces])


def project_arrays(chain: Chain) -> tuple[list[Item], NDArray[np.int32]]:
    """`project_chain_to_output_items` before it makes lists.

    Returns:
      The items, whose token arrays are numpy arrays, and the tokens of the whole chain. Every
      prompt is a view of them.
    """
    tokens = concatenate_chain(chain)
    items: list[Item] = []
    length = len(chain.root_prompt)
    for link in chain.links:
        entry = link.entry
        length += len(link.interstitial)
        carried: Item = {
            "prompt_token_ids": tokens[:length],
            "generation_token_ids": np.asarray(entry.generation_token_ids),
            "generation_log_probs": np.asarray(entry.generation_log_probs),
        }
        if entry.routed_experts is not None:
            carried["routed_experts"] = entry.routed_experts
        own = [dict(item) for item in entry.output_items] or [{"type": "message"}]
        for item in _find_carriers(own, entry.token_item_index if entry.output_items else 0):
            item.update(carried)
        items += own
        length += len(entry.generation_token_ids)
    return items, tokens


def to_plain_items(items: list[Item], tokens: NDArray[np.int32]) -> list[Item]:
    """Turn the arrays of `project_arrays` into lists.

    Args:
      items: the items; left as they are.
      tokens: the tokens of the chain.

    Returns:
      Items that `json.dumps` takes.
    """
    # One conversion for all prompts: slicing a list shares its ints, converting makes new ones.
    whole = tokens.tolist()
    plain = []
    for item in items:
        if isinstance(item.get("prompt_token_ids"), np.ndarray):
            start = len(item["prompt_token_ids"])
            stop = start + len(item["generation_token_ids"])
            item = {
                **item,
                "prompt_token_ids": whole[:start],
                "generation_token_ids": whole[start:stop],
                "generation_log_probs": item["generation_log_probs"].tolist(),
            }
        plain.append(item)
    return plain


def measure_usage(items: list[Item]) -> dict[str, int]:
    """Count the tokens of a response: the first prompt, and everything generated.

    Raises:
      ValueError: no item has a generated token.
      KeyError: the first generated item has no `prompt_token_ids`.
    """
    generated = [item for item in items if _is_generated(item)]
    count = sum(len(item["generation_token_ids"]) for item in generated)
    if not count:
        raise ValueError("no output item carries a generated token")
    return {"input_tokens": len(generated[0]["prompt_token_ids"]), "output_tokens": count}


def make_response(rollout_id: str, model: str, output: list[Item], usage: dict[str, int]) -> Item:
    """The Responses object around projected items."""
    return {
        "id": f"proj-{rollout_id}",
        "model": model,
        "object": "response",
        "output": output,
        "usage": usage,
    }


def _find_carriers(items: list[Item], index: int | None) -> list[Item]:
    if index is not None and 0 <= index < len(items):
        return [items[index]]
    return [item for item in items if _is_generated(item)] or items[-1:]


def _is_generated(item: Item) -> bool:
    return item.get("generation_token_ids") is not None


def _assert_contiguous_arrays(pairs: list[tuple[Any, Any]]) -> None:
    prompt = generation = np.empty(0, np.int32)
    for index, (next_prompt, next_generation) in enumerate(pairs):
        middle, end = len(prompt), len(prompt) + len(generation)
        if not (
            len(next_prompt) >= end
            and (_share_start(next_prompt, prompt) or np.array_equal(next_prompt[:middle], prompt))
            and _same_ids(next_prompt[middle:end], generation)
        ):
            raise AssertionError(_describe_break(index, end))
        prompt, generation = next_prompt, next_generation


def _share_start(left: NDArray[Any], right: NDArray[Any]) -> bool:
    # Beginnings of one array need no comparison.
    return (
        left.base is not None
        and left.base is right.base
        and left.__array_interface__["data"] == right.__array_interface__["data"]
        and left.dtype == right.dtype
        and left.strides == right.strides
    )


def _same_ids(left: NDArray[Any], right: NDArray[Any]) -> bool:
    if left.dtype == right.dtype == np.int32:
        return left.tobytes() == right.tobytes()  # for a few hundred ids faster than numpy
    return np.array_equal(left, right)


def _to_list(values: Any) -> Any:
    return values.tolist() if isinstance(values, np.ndarray) else values


def _describe_break(index: int, length: int) -> str:
    return f"generated item {index}: its prompt does not begin with the {length} tokens before it"
