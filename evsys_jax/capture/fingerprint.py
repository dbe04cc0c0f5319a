"""Content fingerprints of messages: the same words give the same hash in every wire format.

A chat message, a Responses item and an Anthropic message that say the same thing are hashed
alike, so that a call can be recognised by what it produced when ids were lost on the way. Every
hash is SHA-256 over a prefix and tagged, length-framed fields:

    field(t, text) = u8(t) u64(length of the UTF-8 text) UTF-8 text

with big-endian integers. Messages are plain JSON objects (dicts). What has no fingerprint is a
`ValueError`, never a guess.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from evsys_jax.capture.canonical import canonical_json

FINGERPRINT_VERSION = 2

_ASSISTANT_PREFIX = b"nemo-gym-lineage"
_CONTEXT_PREFIX = b"nemo-gym-lineage-context"
_TEXT_KINDS = frozenset({"", "text", "input_text", "output_text"})
_TOOL_BLOCKS = frozenset({"tool_use", "tool_result"})


def assistant_fingerprint(messages: Any) -> str:
    """Hash what the model wrote in a conversation: its text and its tool calls, in order.

    Args:
      messages: list of message objects in any of the wire formats; None counts as empty.

    Returns:
      64 lower-case hex digits, or "" where no message is model-authored. A model-authored
      message without content adds no bytes, but counts.

    Raises:
      ValueError: an element is no object, content or tool calls have the wrong shape, or a value
        or text cannot be written as canonical JSON.
    """
    hasher = hashlib.sha256(_ASSISTANT_PREFIX)
    authored = False
    for message in _check_messages(messages):
        if not is_model_authored(message):
            continue
        authored = True
        for kind, payload in _content_parts(message):
            hasher.update(_field(0, kind) + _field(1, payload))
        for call_id, name, arguments in _tool_calls(message):
            hasher.update(_field(2, call_id) + _field(3, name) + _field(4, arguments))
    return hasher.hexdigest() if authored else ""


def conversation_digest(messages: Any) -> str:
    """Hash a whole conversation: roles, content, tool calls and tool results.

    The content of a chat `tool` message counts twice, as content and as a result.

    Args:
      messages: list of message objects in any of the wire formats; None counts as empty.

    Returns:
      64 lower-case hex digits, also for the empty conversation.

    Raises:
      ValueError: as in `assistant_fingerprint`.
    """
    hasher = hashlib.sha256(_CONTEXT_PREFIX)
    for message in _check_messages(messages):
        hasher.update(_field(0, _first_truthy(message, "role", "type")))
        for kind, payload in _content_parts(message):
            hasher.update(_field(1, kind) + _field(2, payload))
        for call_id, name, arguments in _tool_calls(message):
            hasher.update(_field(3, call_id) + _field(4, name) + _field(5, arguments))
        for call_id, payload in _tool_results(message):
            hasher.update(_field(6, call_id) + _field(7, payload))
    return hasher.hexdigest()


def canonicalize_tool_arguments(value: Any) -> str:
    """Bring the arguments of a tool call to one spelling.

    Args:
      value: text, which is read as JSON where it is JSON; or any JSON value.

    Returns:
      Canonical JSON of the arguments; text that is no JSON, without white space around it; ""
      for None.

    Raises:
      ValueError: the text nests too deeply to be read, holds a lone surrogate, or the value has
        no canonical JSON.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        try:
            value = json.loads(value, parse_int=_parse_int)
        except RecursionError as error:
            raise ValueError("tool arguments nest too deeply to be read") from error
        except ValueError:
            text = value.strip()
            text.encode()
            return str(text)
    return canonical_json(value).decode()


def is_model_authored(message: dict[Any, Any]) -> bool:
    """Whether the model wrote this message: an assistant's message or a function call."""
    return bool(message.get("role") == "assistant" or message.get("type") == "function_call")


def _parse_int(digits: str) -> int:
    # More digits than Python converts by default are an integer all the same: out of range, to
    # be refused as such, and not "text that is no JSON".
    return int(digits) if len(digits) <= 40 else 1 << 128


def _check_messages(messages: Any) -> Iterator[dict[Any, Any]]:
    if messages is None:
        return
    if not isinstance(messages, (list, tuple)):
        raise ValueError(f"messages must be a list, not {type(messages).__name__}")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"message {index} is {type(message).__name__}, not an object")
        yield message


def _field(tag: int, text: str) -> bytes:
    encoded = text.encode()  # a lone surrogate raises UnicodeEncodeError, a ValueError
    return bytes((tag,)) + len(encoded).to_bytes(8, "big") + encoded


def _first_truthy(message: dict[Any, Any], *keys: str) -> str:
    for key in keys:
        value = message.get(key)
        if value:
            return str(value)
    return ""


def _content_elements(message: dict[Any, Any]) -> list[Any]:
    content = message.get("content")
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if isinstance(content, list):
        return content
    raise ValueError(f"message content is {type(content).__name__}, not text or a list")


def _content_parts(message: dict[Any, Any]) -> Iterator[tuple[str, str]]:
    for element in _content_elements(message):
        if isinstance(element, str):
            if element:
                yield "text", element
            continue
        if not isinstance(element, dict):
            raise ValueError(f"content element is {type(element).__name__}, not text or an object")
        kind = _first_truthy(element, "type")
        if kind in _TOOL_BLOCKS:
            continue
        text = element.get("text")
        if isinstance(text, str) and kind in _TEXT_KINDS:
            if text:
                yield "text", text
        elif not kind:
            raise ValueError("content element has neither a type nor text")
        else:
            yield kind, canonical_json(element).decode()


def _tool_calls(message: dict[Any, Any]) -> Iterator[tuple[str, str, str]]:
    if message.get("type") == "function_call":
        name = str(message.get("name", ""))
        namespace = message.get("namespace")
        yield (
            _first_truthy(message, "call_id", "id"),
            f"{namespace}__{name}" if namespace else name,
            canonicalize_tool_arguments(message.get("arguments")),
        )
    for block in _blocks(message, "tool_use"):
        yield (
            _first_truthy(block, "id"),
            str(block.get("name", "")),
            canonicalize_tool_arguments(block.get("input")),
        )
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ValueError(f"tool_calls is {type(calls).__name__}, not a list")
    for call in calls:
        call = _object_or_empty(call, "tool call")
        function = _object_or_empty(call.get("function"), "function of a tool call")
        yield (
            _first_truthy(call, "id"),
            str(function.get("name", "")),
            canonicalize_tool_arguments(function.get("arguments")),
        )


def _tool_results(message: dict[Any, Any]) -> Iterator[tuple[str, str]]:
    if message.get("type") == "function_call_output":
        yield _first_truthy(message, "call_id", "id"), _payload(message.get("output"))
    elif message.get("role") == "tool":
        yield _first_truthy(message, "tool_call_id"), _payload(message.get("content"))
    for block in _blocks(message, "tool_result"):
        yield _first_truthy(block, "tool_use_id", "id"), _payload(block.get("content"))


def _blocks(message: dict[Any, Any], kind: str) -> Iterator[dict[Any, Any]]:
    for element in _content_elements(message):
        if isinstance(element, dict) and element.get("type") == kind:
            yield element


def _object_or_empty(value: Any, what: str) -> dict[Any, Any]:
    if not value:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {type(value).__name__}, not an object")
    return value


def _payload(value: Any) -> str:
    return value if isinstance(value, str) else canonical_json(value).decode()
