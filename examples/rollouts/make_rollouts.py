"""Make rollouts.jsonl: 8 arithmetic tasks x 8 rollouts of a make-believe policy with a calculator.

Every record has the form in which NeMo Gym writes rollouts whose token ids were captured. Run it
again and the same bytes come out. Some rollouts are spoiled on purpose, as in real life: one is
masked by its recorder, one was never scored, one has a history that was tokenised again, and one
task is so easy that all its rewards are equal.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

TASKS, ROLLOUTS = 8, 8
EASY_TASK = 5
SPOILED = {"1-3": "masked", "2-6": "unscored", "6-2": "broken"}


def tokenize(text: str) -> list[int]:
    """Map each word or sign to an id: no tokenizer, but as stable as one."""
    pieces = re.findall(r"<\|\w+\|>|\w+|[^\w\s]|\n", text)
    return [crc32(piece.encode()) % 32_000 for piece in pieces]


@dataclass
class Call:
    """One model call: what was asked, what the engine saw, sampled, and answered."""

    prompt: list[int]
    generation: list[int]
    logprobs: list[float]
    item: dict
    request: list[dict]


@dataclass
class Rollout:
    """One rollout while it is being played."""

    task: int
    index: int
    rng: random.Random
    history: list[int] = field(default_factory=list)
    asked: list[dict] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    output: list[dict] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.task}-{self.index}"

    def show(self, role: str, text: str) -> None:
        """Put a message of somebody else's before the policy."""
        if role != "tool":
            self.asked.append({"role": role, "content": text})
        self.history += tokenize(f"<|start|>{role}\n{text}<|end|>\n")

    def sample(self, text: str, item: dict) -> None:
        """Let the policy write: `text` is all that it writes in this call."""
        prompt = self.history + tokenize("<|start|>assistant\n")
        generation = tokenize(text + "<|end|>")
        logprobs = [round(-self.rng.expovariate(3.0), 6) for _ in generation]
        request = [*self.asked, *self.output]
        self.calls.append(Call(prompt, generation, logprobs, item, request))
        self.output.append(item)
        self.history = prompt + generation


def play(task: int, index: int) -> tuple[Rollout, float]:
    """Play one rollout; return it and its reward."""
    rng = random.Random(f"{task}/{index}")
    numbers = random.Random(f"task {task}")
    rollout = Rollout(task, index, rng)
    terms = [numbers.randint(2, 99) for _ in range(2 if task == EASY_TASK else 3 + task % 3)]
    rollout.show("system", "You are careful with numbers. Use the calculator, then answer.")
    rollout.show("user", "What is " + " + ".join(map(str, terms)) + " ?")
    total = terms[0]
    for k, term in enumerate(terms[1:], start=1):
        call_id = f"call-{rollout.name}-{k}"
        arguments = json.dumps({"a": total, "b": term})
        call = {
            "type": "function_call",
            "name": "add",
            "arguments": arguments,
            "call_id": call_id,
            "id": f"fc-{rollout.name}-{k}",
            "status": "completed",
        }
        thought = f"I need {total} plus {term} . " * rng.randint(0, 3)
        rollout.sample(f"{thought}add {arguments}", call)
        total += term
        slip = task != EASY_TASK and rng.random() < 0.15
        total += rng.choice([-10, 1, 9]) if slip else 0
        result = {"type": "function_call_output", "call_id": call_id, "output": str(total)}
        rollout.output.append(result)
        rollout.show("tool", str(total))
        if rng.random() < 0.1:
            break
    answer = f"The answer is {total} ."
    rollout.sample(
        answer,
        {
            "type": "message",
            "role": "assistant",
            "id": f"msg-{rollout.name}",
            "status": "completed",
            "content": [{"type": "output_text", "text": answer, "annotations": []}],
        },
    )
    return rollout, float(total == sum(terms))


def record_of(rollout: Rollout, reward: float) -> dict:
    """Lay one rollout out as a record, its tokens inline."""
    for call in rollout.calls:
        call.item["prompt_token_ids"] = call.prompt
        call.item["generation_token_ids"] = call.generation
        call.item["generation_log_probs"] = call.logprobs
    record = {
        "_ng_task_index": rollout.task,
        "_ng_rollout_index": rollout.index,
        "reward": reward,
        "response": {
            "id": f"resp-{rollout.name}",
            "object": "response",
            "model": "make-believe",
            "output": rollout.output,
        },
    }
    spoiled = SPOILED.get(rollout.name)
    if spoiled == "masked":
        record["mask_sample"] = True
        record["_ng_token_capture"] = {"n_calls": len(rollout.calls), "capture_incomplete": True}
    elif spoiled == "unscored":
        del record["reward"]
    elif spoiled == "broken":
        rollout.calls[-1].item["prompt_token_ids"] = tokenize_again(rollout)
    return record


def tokenize_again(rollout: Rollout) -> list[int]:
    """Return the last prompt with a word of the generation before it as two other tokens."""
    before, last = rollout.calls[-2:]
    at = len(before.prompt) + 2
    return [*last.prompt[:at], 393, 9, *last.prompt[at + 1 :]]


def main() -> None:
    """Write the file beside this script."""
    path = Path(__file__).with_name("rollouts.jsonl")
    with path.open("w", encoding="utf-8") as file:
        for task in range(TASKS):
            for index in range(ROLLOUTS):
                record = record_of(*play(task, index))
                file.write(json.dumps(record, separators=(",", ":")) + "\n")
    print(f"{path.name}: {TASKS * ROLLOUTS} rollouts, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
