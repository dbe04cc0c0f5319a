"""One training step with a tiny model: loss, gradient and metrics of a batch, wherever it lies."""

import jax
import jax.numpy as jnp
import numpy as np

from evsys_jax.diagnostics import diagnose
from evsys_jax.losses import dro, gspo, ppo
from evsys_jax.reductions import reduce_by

PARAMETERS = np.random.default_rng(0).normal(size=(20, 20)).astype(np.float32)


def logprobs_of(parameters, batch):
    """A bigram model: the logits of the target depend on the input token alone."""
    logits = jax.nn.log_softmax(parameters[batch.input_tokens])
    return jnp.take_along_axis(logits, batch.target_tokens[..., None], axis=-1)[..., 0]


def losses_of(parameters, batch):
    """Add up what runs over tokens, sequences, trajectories and groups."""
    learner = logprobs_of(parameters, batch)
    return (
        ppo(learner, batch)[0]
        + ppo(learner, reduce_by(batch, "token"))[0]
        + dro(learner, reduce_by(batch, "sequence"), beta=0.1)[0]
        + ppo(learner, reduce_by(batch, "trajectory"))[0]
        + gspo(learner, reduce_by(batch, "group"), clip_low_threshold=0.9, clip_high_threshold=1.1)[
            0
        ]
    )


def step(batch):
    """Return loss, gradient and metrics as plain numbers."""
    loss, gradient = jax.jit(jax.value_and_grad(losses_of))(PARAMETERS, batch)
    return {
        "loss": float(loss),
        "gradient": np.asarray(gradient).tolist(),
        "metrics": diagnose(jax.jit(logprobs_of)(PARAMETERS, batch), batch),
    }
