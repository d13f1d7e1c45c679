"""The names of all metrics: those that users of NeMo-Aligner know, and those of asynchronous training, which it lacks.

A step's record is a flat map from these names to finite numbers. `train_rollouts/` covers the groups that were trained,
`all_rollouts/` also those dropped meanwhile, `val_rollouts/` the held-out prompts. Rewards by source exist only for
trained and held-out groups: the headers of the others have only the sum. `loss/weight` of the built-in losses is their
weight after bounding the ratio.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

Explained: TypeAlias = tuple[str, str]  # (unit, what it means); docs/metrics.md shows both

METRICS: Mapping[str, Explained] = {
    "train_rollouts/rollout_size": ("samples", "samples trained in the step"),
    "train_rollouts/response_lengths": ("tokens", "mean response tokens"),
    "train_rollouts/prompt_lengths": ("tokens", "mean prompt tokens"),
    "train_rollouts/generation_length": ("tokens", "mean of prompt plus response tokens"),
    "train_rollouts/turns": ("turns", "mean model turns per rollout; 1 without an environment"),
    "train_rollouts/tool_calls": ("calls", "mean tool calls per rollout"),
    "train_rollouts/branches": (
        "branches",
        "mean branches per rollout: turns that did not continue the tokens so far and started a row of their own",
    ),
    "train_rollouts/context_tokens": (
        "tokens",
        "mean tokens in a rollout's rows that were not sampled there: prompt, given text, repeated prefixes",
    ),
    "train_rollouts/rewards": (
        "reward",
        "mean weighted reward of the trained groups, normally those whose rewards differ",
    ),
    "train_rollouts/rewards_std": ("reward", "standard deviation of the weighted reward"),
    "train_rollouts/fraction_of_samples_properly_ended": (
        "share",
        "share of samples that ended by themselves, not cut off",
    ),
    "train_rollouts/init_policy_kl": ("nats", "mean over tokens of log mu - log pi_ref, as sampled"),
    "train_rollouts/rewards_with_kl": (
        "reward",
        "mean reward after the KL penalty, which samples without a loss do not have",
    ),
    "train_rollouts/baseline": ("reward", "mean of what was subtracted from the rewards: the leave-one-out baseline"),
    "train_rollouts/zero_variance_groups": ("share", "share of groups with equal rewards"),
    "train_rollouts/consumed_samples": ("samples", "samples trained since the start of the run"),
    "train_rollouts/epoch": ("passes", "epochs over the dataset"),
    "all_rollouts/rewards": (
        "reward",
        "mean weighted reward of all groups that ended during the step, including dropped ones",
    ),
    "val_rollouts/rewards": ("reward", "mean weighted reward on the validation prompts"),
    "val_rollouts/response_lengths": ("tokens", "mean response tokens on the validation prompts"),
    "val_rollouts/fraction_of_samples_properly_ended": (
        "share",
        "share of samples that ended by themselves, not cut off",
    ),
    "val_rollouts/majority": ("share", "share of validation prompts whose most frequent answer passes"),
    "val_rollouts/num_prompts": ("prompts", "validation prompts that were answered"),
    "val_rollouts/num_unanswered": ("prompts", "validation prompts given up after failures, or out of time"),
    "val_rollouts/num_incomplete": ("prompts", "answered prompts some of whose samples failed"),
    "val_rollouts/ranks": ("", "1: it decides which checkpoint is the best; 0: too few prompts or samples for that"),
    "val_rollouts/min_version_step": ("steps", "oldest step whose weights answered"),
    "val_rollouts/max_version_step": ("steps", "newest step whose weights answered"),
    "train_optim/loss": ("", "loss of the step (actor_loss in NeMo-Aligner)"),
    "train_optim/grad_norm": ("", "gradient norm before clipping"),
    "train_optim/lr": ("", "learning rate"),
    "train_optim/optim_step": ("steps", "optimizer steps since the start of the run"),
    "train_optim/skipped_steps": ("steps", "steps skipped because loss or gradient was not finite"),
    "policy/entropy": ("nats", "mean entropy of the next-token distribution"),
    "policy/ratio_mean": ("", "mean importance ratio pi / mu"),
    "policy/ratio_max": ("", "largest importance ratio"),
    "policy/clipped_fraction": ("share", "share of tokens whose gradient was changed by a bound on the ratio"),
    "policy/masked_fraction": ("share", "share of tokens masked by a bound on the ratio"),
    "policy/ess": ("share", "effective sample size of the ratios, as a share of tokens"),
    "policy/mismatch_kl": ("nats", "mean of log mu - log pi over sampled tokens"),
    "policy/token_mult_prob_error": ("", "mean of exp |log mu - log pi|: 1 if engine and learner agree"),
    "policy/fresh_tokens": ("tokens", "tokens of samples generated entirely by the weights that the step started from"),
    "policy/fresh_mismatch": (
        "nats",
        "mean of |log mu - log pi| over fresh tokens, where engine and learner should agree",
    ),
    "policy/fresh_mismatch_kl": (
        "nats",
        "mean of pi / mu - 1 - log(pi / mu) over fresh tokens, an estimate of KL(mu, pi)",
    ),
    "router/routes_differ": (
        "share",
        "share of tokens and layers for which the learner would choose other experts than the engine, or, with "
        "algorithm.routing_replay=first_pass, than in its first pass",
    ),
    "router/routes_missing": (
        "share",
        "share of tokens without a recorded route, which the learner routes by itself",
    ),
    "router/load_max_over_mean": (
        "",
        "mixtures: trained tokens of a layer's busiest expert over the mean of its experts; mean over layers",
    ),
    "router/unused_experts": ("share", "mixtures: share of experts that no trained token was sent to"),
    "router/entropy": (
        "nats",
        "mixtures: mean entropy of a router's probabilities, over layers and trained tokens",
    ),
    "router/z": ("", "mixtures: mean of logsumexp^2 of a router's logits, over layers and trained tokens"),
    "lag/min": ("steps", "steps between the version that generated a token and the step that trains it: smallest"),
    "lag/mean": (
        "steps",
        "steps between the version that generated a token and the step that trains it: mean over tokens",
    ),
    "lag/max": ("steps", "steps between the version that generated a token and the step that trains it: largest"),
    "lag/in_flight": ("steps", "mean steps that passed while a sample was generated"),
    "lag/in_queue": ("steps", "mean steps that a finished sample waited for training"),
    "lag/masked_tokens": ("tokens", "tokens masked because they were too old"),
    "lag/dead_lineage_tokens": ("tokens", "tokens generated by versions that a rollback has abandoned"),
    "stream/issued": ("tickets", "tickets issued since the start of the run"),
    "stream/outstanding": ("tickets", "tickets issued and not yet ended"),
    "stream/groups_trained": ("groups", "groups trained since the start of the run"),
    "stream/groups_dropped": ("groups", "groups dropped for any reason since the start of the run"),
    "stream/dead": ("tickets", "tickets that failed too often and became dead letters"),
    "stream/dead_letters": ("tickets", "dead letters that nobody has retried or purged"),
    "stream/retries": ("tickets", "tickets issued to retry a dead letter"),
    "stream/backlog_bytes": ("bytes", "bytes of groups in Redis, including those expected from open tickets"),
    "stream/straggler_wait_s": ("s", "seconds that full batches waited for old tickets since the learner started"),
    "curriculum/passes": ("passes", "epochs over the data from which prompts were considered, including resting ones"),
    "curriculum/refused": (
        "times",
        "times in a row that the curriculum's log could not be written; no tickets are issued meanwhile",
    ),
    "checkpoint/refused": ("times", "checkpoints in a row that could not be written to the disk of the run's folder"),
    "timers/rollout": ("s", "seconds the learner waited for groups"),
    "timers/generate": ("s", "mean seconds a group took to generate"),
    "timers/in_model": ("s", "mean seconds that a rollout waited for the engine, over all its turns"),
    "timers/in_environment": ("s", "mean seconds that a rollout waited for its environment"),
    "timers/reward": ("s", "mean seconds a group waited for rewards"),
    "timers/logprobs": ("s", "seconds of the policy's forward and backward passes"),
    "timers/init_logprobs": (
        "s",
        "seconds to pack a batch and compute its advantages, with the forward passes of reference and teacher",
    ),
    "timers/train": ("s", "seconds of the whole update: the two above, and the optimizer"),
    "timers/publish": (
        "s",
        "seconds that training waited to publish: for a copy of the weights, and for versions in flight",
    ),
    "timers/checkpoint": ("s", "seconds that training waited at a checkpoint, mostly for a copy of the state"),
    "timers/checkpoint_wait": ("s", "seconds of these spent on the previous checkpoint, which was still being written"),
    "timers/checkpoint_write": ("s", "seconds that the slowest rank took to write a checkpoint, beside training"),
    "timers/checkpoint_commit": ("s", "seconds to agree on what was written and to update Redis"),
    "timers/step": ("s", "seconds of the whole step"),
    "throughput/tokens": ("tokens", "tokens of the samples trained in the step, including prompts, over all passes"),
    "throughput/tokens_per_s": (
        "tokens/s",
        "tokens of trained samples, including prompts, per second of the whole step",
    ),
    "throughput/tflop": ("TFLOP", "useful 10^12 floating-point operations of the step's forward and backward passes"),
    "throughput/tflop_per_s": ("TFLOP/s", "the same per second of timers/train, over all ranks"),
    "throughput/mfu": ("share", "the same as a share of the GPUs' peak, if that is known"),
    "throughput/samples_per_s": ("samples/s", "trained samples per second of the whole step"),
    "gpu/use": (
        "share",
        "share of time that rank 0's GPU was busy, in the second before the step was recorded",
    ),
    "gpu/memory": ("share", "share of the memory of rank 0's GPU in use, by any process"),
    "gpu/peak_memory": ("share", "largest share of it taken by rank 0's tensors during the step"),
    "weights/version": ("", "number of the newest published version when the step was recorded"),
    "weights/num_bytes": ("bytes", "bytes of that version that an up-to-date worker fetches"),
    "weights/changed_fraction": ("share", "share of elements that changed with that version"),
}

OF_LOSS = "loss/"  # the metrics of the run's loss

# Prefixes of names whose rest depends on the run.
FAMILIES: Mapping[str, Explained] = {
    "train_rollouts/rewards/": ("reward", "mean reward of this source in trained groups, before weights"),
    "train_rollouts/rewards_std_by_source/": (
        "reward",
        "standard deviation of this source's reward in trained groups, before weights",
    ),
    "train_rollouts/rewards_by_dataset/": ("reward", "mean weighted reward of this dataset's trained groups"),
    "all_rollouts/rewards_by_dataset/": (
        "reward",
        "mean weighted reward of this dataset's groups, including dropped ones",
    ),
    "val_rollouts/rewards/": ("reward", "mean reward of this source on the validation prompts, before weights"),
    "val_rollouts/rewards_by_dataset/": ("reward", "mean weighted reward on the validation prompts of this dataset"),
    "val_rollouts/pass_at/": (
        "share",
        "unbiased pass@k by validation.pass_by: the chance that one of k samples of a prompt passes",
    ),
    "val_rollouts/pass_at_by_dataset/": ("share", "pass@k on this dataset's prompts; the name ends with dataset and k"),
    "val_rollouts/majority_by_dataset/": ("share", "share of this dataset's prompts whose most frequent answer passes"),
    "policy/ratio_histogram/": (
        "share",
        "share of tokens whose ratio pi / mu is at most this bound and above the next smaller one",
    ),
    OF_LOSS: ("", "returned by the loss: a mean over trained tokens, unless it counts something else"),
    "idle/": ("share", "share of the step that rank 0 spent in this wait"),
    "stream/dropped/": ("groups", "groups dropped for this reason since the start of the run"),
    "stream/dropped_by_length/": (
        "groups",
        "groups dropped whose longest response has at most this many tokens, and more than the next smaller bound",
    ),
    "stream/drop_rate_by_length/": ("share", "share of the ended groups of that length that were dropped"),
    "stream/trained_by_dataset/": ("groups", "groups of this dataset trained since the start of the run"),
    "stream/dropped_by_dataset/": ("groups", "groups of this dataset dropped since the start of the run"),
    "curriculum/prompts/": (
        "prompts",
        "prompts that are new, fitting (samples differ), solved or hopeless, as far as the curriculum knows",
    ),
    "stream/ignored/": ("messages", "messages ignored for this reason; they ended no ticket"),
}


def is_metric(name: str) -> bool:
    return bool(meaning(name))


def meaning(name: str) -> str:
    """The metric's description; empty if it is no metric."""
    return explained(name)[1]


def explained(name: str) -> Explained:
    return METRICS.get(name) or next((each for begin, each in FAMILIES.items() if name.startswith(begin)), ("", ""))
