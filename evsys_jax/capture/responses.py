"""Response payloads of the common APIs: their items, and the token arrays they carry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

TOKEN_FIELDS = (
    "prompt_token_ids",
    "generation_token_ids",
    "generation_log_probs",
    "routed_experts",
)


def response_to_output_items(payload: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Bring a response payload to a list of response items.

    Args:
      payload: a Responses object (`output`), else an Anthropic message (`content`), else a
        chat completion (`choices`).

    Returns:
      The objects of a non-empty `output`, as they are; of an Anthropic message one reasoning
      item per thinking block, then one message of the other blocks; of a chat completion a
      copy of each message, with `type` and `role` filled in where absent.
    """
    output = payload.get("output")
    if isinstance(output, list) and output:
        return [item for item in output if isinstance(item, dict)]
    if payload.get("type") == "message" and payload.get("role") == "assistant":
        return _anthropic_items(payload.get("content"))
    return [
        {"type": "message", "role": "assistant", **message} for message in _choice_messages(payload)
    ]


def _anthropic_items(content: Any) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    others: list[Any] = []
    blocks = [content] if isinstance(content, str) else content
    for block in blocks if isinstance(blocks, list) else ():
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            text = block.get("thinking")
            part = {"type": "summary_text", "text": text}
            items.append({"type": "reasoning", "summary": [part] if isinstance(text, str) else []})
        elif kind == "redacted_thinking":
            item: dict[str, Any] = {"type": "reasoning", "summary": []}
            if block.get("data") is not None:
                item["encrypted_content"] = block["data"]
            items.append(item)
        else:
            others.append(block)
    if others:
        items.append({"type": "message", "role": "assistant", "content": others})
    return items


def _choice_messages(payload: Mapping[str, Any]) -> list[dict[str, Any]]:
    choices = payload.get("choices")
    messages: list[dict[str, Any]] = []
    for choice in choices if isinstance(choices, list) else ():
        message = choice.get("message") if isinstance(choice, dict) else choice or None
        if message is None:
            message = {}
        if isinstance(message, dict):
            messages.append(message)
    return messages


def strip_token_fields(
    items: Iterable[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], int | None]:
    """Take the token arrays out of response items.

    Returns:
      The items without `TOKEN_FIELDS`, and the index of the one whose `generation_token_ids`
      was not null, or None.

    Raises:
      ValueError: two items carry generated tokens.
    """
    stripped: list[dict[str, Any]] = []
    carrier: int | None = None
    for index, item in enumerate(items):
        if item.get("generation_token_ids") is not None:
            if carrier is not None:
                raise ValueError(f"items {carrier} and {index} both have generation_token_ids")
            carrier = index
        stripped.append({key: value for key, value in item.items() if key not in TOKEN_FIELDS})
    return stripped, carrier


def extract_token_fields(payload: Mapping[str, Any]) -> dict[str, Any] | None:
    """Find the token arrays that a response payload carries.

    Args:
      payload: a Responses object or a chat completion.

    Returns:
      The four `TOKEN_FIELDS` of the one item or message that has any of the first three
      (`routed_experts` may be None), or None if there is no such item.

    Raises:
      ValueError: several items carry arrays, or one carries some of the three only.
    """
    output = payload.get("output")
    candidates = (
        [item for item in output if isinstance(item, dict)] if isinstance(output, list) else []
    )
    candidates += _choice_messages(payload)
    arrays = TOKEN_FIELDS[:3]
    carriers = [c for c in candidates if any(c.get(name) is not None for name in arrays)]
    if not carriers:
        return None
    if len(carriers) > 1:
        raise ValueError(f"{len(carriers)} items carry token arrays")
    missing = [name for name in arrays if carriers[0].get(name) is None]
    if missing:
        raise ValueError(f"the item with token arrays lacks {', '.join(missing)}")
    return {name: carriers[0].get(name) for name in TOKEN_FIELDS}
