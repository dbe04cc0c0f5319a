"""Make text_rollouts.jsonl and ../captures: the rollouts of make_rollouts.py, seen from two sides.

The harness saw text: it writes responses and rewards. The model server saw tokens: it writes each
call into a capture directory, with what it decided about the call's parent. Run it again and the
same bytes come out. Some rollouts went less smoothly than others, see `STORIES`.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path

from make_rollouts import ROLLOUTS, SPOILED, TASKS, Call, Rollout, play, tokenize, tokenize_again

from evsys_jax.capture import TokenCaptureStore, TokenEntry, stamp_continuation, stamp_lineage

STORIES = {
    "0-2": "retried",  # an answer called no tool, so the harness asked again
    "1-3": "lost",  # the same in the end, but the first answer was never recorded
    "2-1": "empty",  # a call generated nothing, and was made again
    "3-4": "delta",  # the server stored only what each prompt has behind its parent
    "4-1": "named",  # a sub-agent checked a sum; the harness names the call that was scored
    "5-6": "nameless",  # the same, but nothing tells which call was scored
    "6-2": "tokenized again",  # the last prompt isn't what the policy had written
    "7-3": "sub-agent",  # as 4-1, and the response still has the id of its call
}


class Server:
    """The model server's side of one rollout.

    Args:
      rollout: whose calls they are.
      delta: store of each prompt only what it has behind its parent.
    """

    def __init__(self, rollout: Rollout, *, delta: bool = False) -> None:
        self.rollout = rollout
        self.delta = delta
        self.announced: list[str] = []
        self.entries: dict[str, TokenEntry] = {}
        self.sequences: dict[str, list[int]] = {}

    def announce(self) -> str:
        """Announce a call, as a server does before it asks the engine."""
        self.announced.append(f"mc-{self.rollout.name}-{len(self.announced) + 1}")
        return self.announced[-1]

    def record(self, call: Call, parent: str | None, lost_parent: str = "") -> str:
        """Record a call that was answered, and return its id.

        Args:
          call: the call.
          parent: the call that it continues.
          lost_parent: why `parent` is None although the call is no first one.
        """
        call_id = self.announce()
        is_delta = self.delta and parent is not None
        behind = len(self.sequences[parent]) if is_delta else 0
        decision = "resolved" if parent else "unresolved" if lost_parent else "root"
        items = [call.item] if call.generation else []
        minute = 10 * self.rollout.task + self.rollout.index
        entry = TokenEntry(
            rollout_id=self.rollout.name,
            model_call_id=call_id,
            model="make-believe",
            prompt_token_ids=call.prompt[behind:],
            generation_token_ids=call.generation,
            generation_log_probs=call.logprobs,
            output_items=items,
            token_item_index=0 if items else None,
            response_id=f"resp-{call_id}",
            created_at=1.75e9 + 60 * minute + len(self.announced),
            parent_call_id=parent,
            parent_resolution=decision,
            parent_resolution_reason=lost_parent,
            prompt_is_delta=is_delta,
        )
        sequence = call.prompt + call.generation
        stamp_lineage(entry, parent, parent_resolution=decision, cumulative=sequence)
        stamp_continuation(entry, call.request)
        self.entries[call_id] = entry
        self.sequences[call_id] = sequence
        return call_id

    async def write(self, store: TokenCaptureStore) -> None:
        """Put everything into the store, in order."""
        for call_id in self.announced:
            await store.begin_call(self.rollout.name, call_id)
            if call_id in self.entries:
                await store.put(self.entries[call_id])


def serve(rollout: Rollout) -> tuple[Server, str]:
    """Record the calls of a rollout, and what went wrong between them.

    Returns:
      The server's side, and the id of the last call.
    """
    story = STORIES.get(rollout.name)
    server = Server(rollout, delta=story == "delta")
    parent = server.record(rollout.calls[0], None)
    if story == "retried":
        server.record(answer_otherwise(rollout.calls[1], rollout.name, rollout.rng), parent)
    elif story == "empty":
        again = rollout.calls[1]
        parent = server.record(Call(again.prompt, [], [], {}, again.request), parent)
    elif story in ("named", "nameless", "sub-agent"):
        server.record(check_sum(rollout), None)
    for call in rollout.calls[1:-1]:
        parent = server.record(call, parent)
    last = rollout.calls[-1]
    if story == "lost":
        server.announce()
    elif story == "tokenized again":
        last.prompt = tokenize_again(rollout)
        return server, server.record(last, None, "the prompt does not begin with its parent")
    return server, server.record(last, parent)


def answer_otherwise(call: Call, name: str, rng: random.Random) -> Call:
    """Sample a call once more: this time the policy calls no tool."""
    text = "Let me think ."
    generation = tokenize(f"{text}<|end|>")
    logprobs = [round(-rng.expovariate(3.0), 6) for _ in generation]
    return Call(call.prompt, generation, logprobs, message(f"msg-{name}-2", text), call.request)


def check_sum(rollout: Rollout) -> Call:
    """Let the same policy, in a conversation of its own, check the first sum of a rollout."""
    checker = Rollout(rollout.task, rollout.index, random.Random(f"{rollout.name} checker"))
    asked, answered = rollout.output[:2]
    checker.show("system", "You check sums.")
    checker.show("user", f"Is {answered['output']} the sum of {asked['arguments']} ?")
    checker.sample("It is .", message(f"msg-{rollout.name}-check", "It is ."))
    return checker.calls[0]


def message(item_id: str, text: str) -> dict:
    """Make a response item that says something."""
    return {
        "type": "message",
        "role": "assistant",
        "id": item_id,
        "status": "completed",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }


def record_of(rollout: Rollout, reward: float, scored: str) -> dict:
    """Lay one rollout out as the verifier saw it: text, and ids as far as they were kept."""
    story = STORIES.get(rollout.name)
    response = {
        "id": f"resp-{scored}",
        "object": "response",
        "model": "make-believe",
        "output": rollout.output,
    }
    record = {"_ng_task_index": rollout.task, "_ng_rollout_index": rollout.index, "reward": reward}
    if story in ("named", "nameless"):
        # The harness answers for itself: its own id, and no word that the policy wrote.
        response["id"] = f"harness-{rollout.name}"
        response["output"] = [message(f"answer-{rollout.name}", rollout.output[-2]["output"])]
    if story == "named":
        record["_ng_terminal_model_call_id"] = scored
    if SPOILED.get(rollout.name) == "unscored":
        del record["reward"]
    return {**record, "response": response}


async def main(examples: Path) -> None:
    """Write captures/ and rollouts/text_rollouts.jsonl.

    Args:
      examples: the directory of both.
    """
    store = TokenCaptureStore(examples / "captures")
    for path in store.root.glob("*.tokens.*"):
        path.unlink()
    text = examples / "rollouts" / "text_rollouts.jsonl"
    with text.open("w", encoding="utf-8") as file:
        for number in range(TASKS * ROLLOUTS):
            rollout, reward = play(*divmod(number, ROLLOUTS))
            server, scored = serve(rollout)
            await server.write(store)
            record = record_of(rollout, reward, scored)
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
            # The next one who opens the rollout makes these anew. A state that is kept would hold
            # the moment of its freeze.
            store.state_path_for(rollout.name).unlink()
            store.lock_path_for(rollout.name).unlink()
    files = list(store.root.glob("*.tokens.*"))
    size = sum(path.stat().st_size for path in files)
    print(f"{text.name}: {text.stat().st_size:,} bytes; {len(files)} capture files: {size:,} bytes")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent)))
