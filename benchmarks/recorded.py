"""Recorded rollouts of any size on disk: captured calls, or records that carry their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson

from evsys_jax.capture import TokenEntry, stamp_lineage

VOCABULARY = 150_000
TEMPLATES = 8
"""Different rollouts in a large input; the others repeat them under ids of their own."""


class Shape(NamedTuple):
    """The size of one rollout.

    Args:
      turns: calls.
      first: tokens of the first prompt.
      between: tokens that the environment adds before each later call.
      generated: tokens that the policy writes in each call.
    """

    turns: int
    first: int = 500
    between: int = 50
    generated: int = 150

    @property
    def tokens(self) -> int:
        """Tokens of the whole conversation."""
        return self.first + (self.turns - 1) * self.between + self.turns * self.generated


class Call(NamedTuple):
    """One call: what the policy saw beyond the last call, the whole prompt, what it wrote."""

    new: np.ndarray
    prompt: np.ndarray
    generation: np.ndarray
    logprobs: np.ndarray


def make_calls(random: np.random.Generator, shape: Shape) -> Iterator[Call]:
    """Yield the calls of one conversation, each prompt extending all that came before it."""
    chain = random.integers(0, VOCABULARY, shape.tokens, dtype=np.int32)
    behind = 0
    for turn in range(shape.turns):
        start = behind + (shape.between if turn else shape.first)
        end = start + shape.generated
        logprobs = -random.exponential(0.5, shape.generated)
        yield Call(chain[behind:start], chain[:start], chain[start:end], logprobs)
        behind = end


def captured_entries(
    random: np.random.Generator, rollout_id: str, shape: Shape, *, delta: bool
) -> Iterator[TokenEntry]:
    """Yield the records that a model server would make of one rollout, stamped."""
    parent = None
    for turn, call in enumerate(make_calls(random, shape)):
        entry = TokenEntry(
            rollout_id=rollout_id,
            model_call_id=f"call-{turn}",
            model="policy",
            prompt_token_ids=call.new if delta and turn else call.prompt,
            generation_token_ids=call.generation,
            generation_log_probs=call.logprobs,
            output_items=[_message(turn)],
            token_item_index=0,
            response_id=f"resp-{turn}",
            created_at=float(turn),
            parent_call_id=parent,
            parent_resolution="resolved" if parent else "root",
            prompt_is_delta=delta and turn > 0,
        )
        cumulative = np.concatenate([call.prompt, call.generation])
        yield stamp_lineage(
            entry, parent, parent_resolution=entry.parent_resolution, cumulative=cumulative
        )
        parent = entry.model_call_id


def write_captures(
    directory: Path, rollouts: int, shape: Shape, *, delta: bool = False, seed: int = 0
) -> Path:
    """Write one file of captured calls per rollout, and the records that go with them.

    Returns:
      The records, text only.
    """
    random = np.random.default_rng(seed)
    templates = [
        b"".join(
            entry.to_json() + b"\n"
            for entry in captured_entries(random, "template", shape, delta=delta)
        )
        for _ in range(min(TEMPLATES, rollouts))
    ]
    directory.mkdir()
    for n in range(rollouts):
        text = templates[n % TEMPLATES]
        named = text.replace(b'"rollout_id":"template"', b'"rollout_id":"%s"' % _name(n).encode())
        (directory / f"{_name(n)}.tokens.jsonl").write_bytes(named)
    last = shape.turns - 1
    response = {"id": f"resp-{last}", "model": "policy", "output": [_message(last)]}
    records = directory.with_suffix(".jsonl")
    records.write_bytes(
        b"".join(_record(n, orjson.dumps(response, option=_NUMPY)) for n in range(rollouts))
    )
    return records


def write_records(path: Path, rollouts: int, shape: Shape, *, seed: int = 0) -> int:
    """Write rollout records that carry their tokens, every prompt whole.

    Returns:
      The bytes of the longest record.
    """
    random = np.random.default_rng(seed)
    templates = []
    for _ in range(min(TEMPLATES, rollouts)):
        items = [
            {
                **_message(turn),
                "prompt_token_ids": call.prompt,
                "generation_token_ids": call.generation,
                "generation_log_probs": call.logprobs,
            }
            for turn, call in enumerate(make_calls(random, shape))
        ]
        templates.append(orjson.dumps({"id": "resp", "output": items}, option=_NUMPY))
    longest = 0
    with path.open("wb") as file:
        for n in range(rollouts):
            longest = max(longest, file.write(_record(n, templates[n % TEMPLATES])))
    return longest


_NUMPY = orjson.OPT_SERIALIZE_NUMPY


def _name(n: int) -> str:
    return f"{n // 8}-{n % 8}"


def _record(n: int, response: bytes) -> bytes:
    head = b'{"_ng_task_index":%d,"_ng_rollout_index":%d,"reward":%d,"response":'
    return head % (n // 8, n % 8, n % 2) + response + b"}\n"


def _message(turn: int) -> dict[str, object]:
    text = f"answer {turn} " * 20
    return {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": text}],
    }
