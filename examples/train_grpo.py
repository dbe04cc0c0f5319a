"""A small transformer learns a two-turn game on a CPU: sample, pack, loss and gradient in JAX.

The first turn asks for the first two of three symbols. The environment answers with one more,
and the second turn asks for that one and the third. The reward is the share of the four written
symbols that are right: by chance one in eleven.

    python examples/train_grpo.py --out out/reward.png
"""

import argparse
import tempfile
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.progress import Progress

from evsys_jax import collect, pack
from evsys_jax.capture import TokenCaptureStore, TokenEntry, stamp_lineage
from evsys_jax.diagnostics import measure
from evsys_jax.losses import ppo, reduce_by

SYMBOLS, ASK, VOCAB, LENGTH = 10, 10, 11, 10
WRITES = ((4, 6), (8, 10))  # what the policy writes; the environment writes [a b c ASK .. d ASK ..]
GROUPS, MEMBERS, WIDTH = 8, 8, 64
ENOUGH = 60  # steps after which it must have learned


class Policy(eqx.Module):
    """A transformer; one row [T] at a time, with as many sequences as `segment_ids` say."""

    tokens: eqx.nn.Embedding
    places: eqx.nn.Embedding
    attention: list
    mlps: list
    head: eqx.nn.Linear

    def __init__(self, key, size=64, depth=2):
        keys = iter(jax.random.split(key, 3 + 2 * depth))
        self.tokens = eqx.nn.Embedding(VOCAB, size, key=next(keys))
        self.places = eqx.nn.Embedding(LENGTH, size, key=next(keys))
        self.head = eqx.nn.Linear(size, VOCAB, key=next(keys))
        attention, mlp = eqx.nn.MultiheadAttention, eqx.nn.MLP
        self.attention = [attention(4, size, key=next(keys)) for _ in range(depth)]
        self.mlps = [mlp(size, size, 2 * size, 1, key=next(keys)) for _ in range(depth)]

    def __call__(self, tokens, positions, segment_ids):
        x = jax.vmap(self.tokens)(tokens) + jax.vmap(self.places)(positions)
        order = jnp.arange(len(tokens))
        mask = (order[:, None] >= order) & (segment_ids[:, None] == segment_ids)
        for attend, mlp in zip(self.attention, self.mlps, strict=True):
            y = jax.nn.standardize(x)
            x = x + attend(y, y, y, mask)
            x = x + jax.vmap(mlp)(jax.nn.standardize(x))
        return jax.nn.log_softmax(jax.vmap(self.head)(jax.nn.standardize(x)))


@eqx.filter_jit
def write(policy, tokens, span, key):
    """Sample one turn of all rollouts; return the tokens [N, LENGTH] and logprobs [N, written]."""
    order, logprobs = jnp.arange(LENGTH), []
    for at, draw in zip(range(*span), jax.random.split(key, span[1] - span[0]), strict=True):
        logits = jax.vmap(lambda row: policy(row, order, jnp.ones_like(order)))(tokens)[:, at - 1]
        symbols = jax.random.categorical(draw, logits)
        tokens = tokens.at[:, at].set(symbols)
        logprobs.append(jnp.take_along_axis(logits, symbols[:, None], axis=1))
    return tokens, jnp.concatenate(logprobs, axis=1)


def play(policy, store, step, rng, key):
    """Play all rollouts of a step and record each call in the store; return rollout records."""
    shown = np.repeat(rng.integers(0, SYMBOLS, (GROUPS, 4)), MEMBERS, axis=0)
    tokens = np.full((len(shown), LENGTH), ASK, np.int32)
    tokens[:, [0, 1, 2, 6]] = shown  # [:, 6] is the reply, which the first turn cannot see
    names = [f"step{step}-{n}" for n in range(len(shown))]
    before = None
    for span, draw in zip(WRITES, jax.random.split(key), strict=True):
        tokens, logprobs = jax.device_get(write(policy, tokens, span, draw))
        call = f"call-{span[0]}"
        for name, row, scores in zip(names, tokens, logprobs, strict=True):
            entry = TokenEntry(
                rollout_id=name,
                model_call_id=call,
                prompt_token_ids=row[: span[0]],
                generation_token_ids=row[slice(*span)],
                generation_log_probs=scores,
            )
            origin = "resolved" if before else "root"
            store.append(stamp_lineage(entry, before, parent_resolution=origin))
        before = call
    rewards = np.mean(tokens[:, [4, 5, 8, 9]] == shown[:, [0, 1, 3, 2]], axis=1)
    return [
        {"_ng_task_index": n // MEMBERS, "_ng_rollout_index": n % MEMBERS, "_ng_rollout_id": name}
        | {"_ng_terminal_model_call_id": call, "reward": float(rewards[n])}
        for n, name in enumerate(names)
    ]


@eqx.filter_jit
def learn(policy, state, batch, optimizer):
    """Step down the gradient of PPO's loss, its mean over tokens."""

    def loss(policy):
        logits = jax.vmap(policy)(batch.input_tokens, batch.positions, batch.segment_ids)
        learner = jnp.take_along_axis(logits, batch.target_tokens[..., None], axis=-1)[..., 0]
        return ppo(learner, reduce_by(batch, "token"))[0], measure(learner, batch)

    (_, metrics), gradient = eqx.filter_value_and_grad(loss, has_aux=True)(policy)
    updates, state = optimizer.update(gradient, state)
    return eqx.apply_updates(policy, updates), state, metrics


def train(steps, seed, captures):
    """Train; return the mean reward of each step."""
    rng, key, curve = np.random.default_rng(seed), jax.random.key(seed), []
    policy, store = Policy(key), TokenCaptureStore(captures)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))
    state = optimizer.init(eqx.filter(policy, eqx.is_array))
    with Progress() as progress:
        task = progress.add_task("", total=steps)
        for step in range(steps):
            records = play(policy, store, step, rng, jax.random.fold_in(key, step))
            groups, _ = collect(records, captures=captures)
            batch = pack(groups, rows="merged", layout="packed", width=WIDTH)
            for _ in range(2):
                policy, state, metrics = learn(policy, state, batch, optimizer)
            curve.append(np.mean([record["reward"] for record in records]))
            text = f"reward {curve[-1]:.2f}  kl {float(metrics['kl_k3']):.4f}"
            progress.update(task, advance=1, description=text)
    return curve


def main():
    """Train, draw the curve, and check that the policy has learned."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="out/reward.png", help="the reward curve goes here")
    options = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as captures:
        curve = train(options.steps, options.seed, captures)
    figure = Figure()
    axes = figure.subplots()
    axes.plot(curve)
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.05))
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out)
    first, last = np.mean(curve[:3]), np.mean(curve[-10:])
    seconds = time.perf_counter() - began
    print(f"mean reward {first:.2f} -> {last:.2f} in {options.steps} steps, {seconds:.0f} s")
    if options.steps >= ENOUGH and not first < 0.3 < 0.8 < last:
        raise SystemExit("the policy has not learned: below 0.3 -> above 0.8 was expected")


if __name__ == "__main__":
    main()
