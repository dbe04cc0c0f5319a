"""Record the calls of an engine of your own, and turn them into training rows.

The engine here is make-believe: it samples from a random table. Put vLLM, JetStream or a JAX
sampler in its place; `record_call` stays as it is.

    python examples/record_calls.py [NEW_DIRECTORY]
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time

import numpy as np

from evsys_jax import collect, pack, ragged_rows
from evsys_jax.capture import TokenCaptureStore, TokenEntry, cumulative_tokens, stamp_lineage

TASKS, ROLLOUTS, STOP = 4, 8, 0


class Engine:
    """Samples from a table, one token at a time; some calls are lost."""

    def __init__(self, vocabulary: int = 32) -> None:
        self.table = np.random.default_rng(7).normal(size=(vocabulary, vocabulary))
        self.written = 0

    async def generate(self, prompt: list[int], seed: int) -> tuple[list[int], list[float]]:
        """Return the sampled tokens and the logprob of each."""
        rng = np.random.default_rng(seed)
        await asyncio.sleep(0.001 * rng.random())
        if rng.random() < 0.05:
            raise ConnectionError("the engine is gone")
        tokens, logprobs = [], []
        while STOP not in tokens and len(tokens) < 12:
            logits = self.table[[*prompt, *tokens][-1]]
            scores = logits - np.log(np.exp(logits).sum())
            tokens.append(int(rng.choice(len(scores), p=np.exp(scores))))
            logprobs.append(float(scores[tokens[-1]]))
        self.written += len(tokens)
        return tokens, logprobs


async def record_call(store, engine, rollout_id, call_id, prompt, seed, parent=None) -> TokenEntry:
    """Let the engine sample, and store what it saw and wrote before anybody uses it."""
    await store.begin_call(rollout_id, call_id)  # from here on, silence is a lost call
    try:
        tokens, logprobs = await engine.generate(prompt, seed)
        entry = TokenEntry(
            rollout_id=rollout_id,
            model_call_id=call_id,
            prompt_token_ids=prompt,
            generation_token_ids=tokens,
            generation_log_probs=logprobs,
            response_id=f"resp-{rollout_id}-{call_id}",
            created_at=time.time(),
        )
        # The prompt of a call with a parent begins with all that the parent saw and wrote.
        stamp_lineage(entry, parent, parent_resolution="resolved" if parent else "root")
        await store.put(entry)  # the line is on the disk when this returns
    except BaseException:
        await store.mark_incomplete(rollout_id, call_id)
        raise
    return entry


async def play(store, engine, number: int) -> dict:
    """Play two turns, and return the record: whose rollout, what reward, which response."""
    task, index = divmod(number, ROLLOUTS)
    record = {"_ng_task_index": task, "_ng_rollout_index": index, "reward": 0.0}
    name = f"{task}-{index}"  # the rollout id that `collect` looks for
    try:
        first = await record_call(store, engine, name, "first", [1 + task, 2], 2 * number)
        prompt = [*cumulative_tokens(first).tolist(), 3, 4]  # 3, 4: what the environment answers
        last = await record_call(store, engine, name, "last", prompt, 2 * number + 1, "first")
    except ConnectionError:
        return record
    reward = float(STOP in last.generation_token_ids)
    return {**record, "reward": reward, "response": {"id": last.response_id}}


async def main(directory: str) -> None:
    """Play all rollouts at once, and check that the rows train what the engine wrote."""
    store, engine = TokenCaptureStore(directory), Engine()
    records = await asyncio.gather(*(play(store, engine, n) for n in range(TASKS * ROLLOUTS)))
    groups, report = collect(records, captures=directory)
    account = report.account_of(ragged_rows(groups))
    trained = int(np.asarray(pack(groups).mask).sum())
    assert account.captured == engine.written and account.trained == trained, account
    print(f"{len(records)} rollouts, masked: {dict(report.masked)}")
    print(f"{trained} of {engine.written} sampled tokens train")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else scratch))
