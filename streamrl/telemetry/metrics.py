"""The names of all metrics, in one place: those that users of NeMo-Aligner know, and the asynchronous ones it lacks.

A step's record is a flat map from these names to finite numbers. `train_rollouts/` tells of the groups that were
trained, `all_rollouts/` also of those that were dropped meanwhile, `val_rollouts/` of the prompts that are held out.
Rewards of a source are told of trained and held-out groups only: the headers of the others have but the sum.
`loss/weight` of the losses that come with us is what they made of the ratio.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

Explained: TypeAlias = tuple[str, str]  # (unit, what it means); docs/metrics.md shows both

METRICS: Mapping[str, Explained] = {
    "train_rollouts/rollout_size": ("samples", "samples in the step"),
    "train_rollouts/response_lengths": ("tokens", "mean response tokens"),
    "train_rollouts/prompt_lengths": ("tokens", "mean prompt tokens"),
    "train_rollouts/generation_length": ("tokens", "mean of prompt plus response tokens"),
    "train_rollouts/turns": ("turns", "mean turns of the model in a rollout; 1 without an environment"),
    "train_rollouts/tool_calls": ("calls", "mean calls of tools in a rollout"),
    "train_rollouts/branches": (
        "branches",
        "mean turns of a rollout that did not go on behind the tokens so far, and so began a row of their own",
    ),
    "train_rollouts/context_tokens": (
        "tokens",
        "mean tokens that a rollout's rows have beside those sampled in them: prompt, what was given, what is repeated",
    ),
    "train_rollouts/rewards": (
        "reward",
        "mean weighted reward of the trained groups: those whose rewards differ, as a rule",
    ),
    "train_rollouts/rewards_std": ("reward", "standard deviation of the weighted reward"),
    "train_rollouts/fraction_of_samples_properly_ended": ("share", "share of samples that ended by themselves"),
    "train_rollouts/init_policy_kl": ("nats", "mean over tokens of log pi - log pi_ref"),
    "train_rollouts/rewards_with_kl": ("reward", "mean reward after the KL penalty"),
    "train_rollouts/baseline": ("reward", "mean of what was taken off the rewards: the leave-one-out baseline"),
    "train_rollouts/zero_variance_groups": ("share", "share of groups whose rewards are all equal"),
    "train_rollouts/consumed_samples": ("samples", "samples trained since the start of the run"),
    "train_rollouts/epoch": ("passes", "passes over the dataset"),
    "all_rollouts/rewards": (
        "reward",
        "mean weighted reward of all groups that ended while the step was made, dropped ones too",
    ),
    "val_rollouts/rewards": ("reward", "mean weighted reward on the validation prompts"),
    "val_rollouts/response_lengths": ("tokens", "mean response tokens on the validation prompts"),
    "val_rollouts/fraction_of_samples_properly_ended": ("share", "share that ended by themselves"),
    "val_rollouts/majority": ("share", "share of validation prompts whose most frequent answer passes"),
    "val_rollouts/num_prompts": ("prompts", "validation prompts answered"),
    "val_rollouts/min_version_step": ("steps", "oldest step that answered"),
    "val_rollouts/max_version_step": ("steps", "newest step that answered"),
    "train_optim/loss": ("", "loss of the step (actor_loss)"),
    "train_optim/grad_norm": ("", "norm of the gradient before clipping"),
    "train_optim/lr": ("", "learning rate"),
    "train_optim/optim_step": ("steps", "optimizer steps since the start of the run"),
    "train_optim/skipped_steps": ("steps", "steps skipped for a non-finite loss or gradient"),
    "policy/entropy": ("nats", "mean entropy of the next-token distribution"),
    "policy/ratio_mean": ("", "mean importance ratio pi / mu"),
    "policy/ratio_max": ("", "largest importance ratio"),
    "policy/clipped_fraction": ("share", "share of tokens of which a bound on a ratio changed what they teach"),
    "policy/masked_fraction": ("share", "share of tokens that a bound on a ratio took out"),
    "policy/ess": ("share", "effective sample size of the ratios, as a share of tokens"),
    "policy/mismatch_kl": ("nats", "mean of log mu - log pi over sampled tokens"),
    "policy/token_mult_prob_error": ("", "mean of exp |log mu - log pi|: 1 where engine and learner agree"),
    "policy/fresh_tokens": ("tokens", "tokens of samples that the very weights of the step made, wholly"),
    "policy/fresh_mismatch": ("nats", "mean over them of |log mu - log pi|, where engine and learner should agree"),
    "policy/fresh_mismatch_kl": ("nats", "mean over them of pi / mu - 1 - log(pi / mu), an estimate of KL(mu, pi)"),
    "router/routes_differ": (
        "share",
        "share of tokens and layers whose experts the learner would choose otherwise than the engine, or, with "
        "algorithm.routing_replay=first_pass, than in its first pass",
    ),
    "router/routes_missing": (
        "share",
        "share of tokens that no route was told of, which the learner routes by itself",
    ),
    "router/load_max_over_mean": (
        "",
        "of a mixture: trained tokens of a layer's busiest expert over the mean of its experts; mean over layers",
    ),
    "router/unused_experts": ("share", "of a mixture: experts to which no trained token went"),
    "router/entropy": (
        "nats",
        "of a mixture: mean entropy of a router's probabilities, over layers and trained tokens",
    ),
    "router/z": ("", "of a mixture: mean of logsumexp^2 of a router's logits, over layers and trained tokens"),
    "lag/min": ("steps", "steps between the version that made a token and the step that trains it: smallest"),
    "lag/mean": ("steps", "steps between the version that made a token and the step that trains it: mean over tokens"),
    "lag/max": ("steps", "steps between the version that made a token and the step that trains it: largest"),
    "lag/in_flight": ("steps", "mean steps that passed while a sample was generated"),
    "lag/in_queue": ("steps", "mean steps that passed between the last token and training"),
    "lag/masked_tokens": ("tokens", "tokens that were too old to get a loss"),
    "lag/dead_lineage_tokens": ("tokens", "tokens made by versions of an abandoned lineage"),
    "stream/issued": ("tickets", "tickets issued since the start of the run"),
    "stream/outstanding": ("tickets", "tickets issued and not yet resolved"),
    "stream/groups_trained": ("groups", "groups trained since the start of the run"),
    "stream/groups_dropped": ("groups", "groups dropped for any reason since the start of the run"),
    "stream/dead": ("tickets", "tickets given up after too many failures"),
    "stream/dead_letters": ("tickets", "dead tickets that nobody has repeated or purged"),
    "stream/retries": ("tickets", "tickets issued to repeat a dead one"),
    "stream/backlog_bytes": ("bytes", "bytes of groups in Redis, and about to be there for the tickets under way"),
    "stream/straggler_wait_s": ("s", "seconds that full batches waited for old tickets, since the learner began"),
    "curriculum/passes": ("passes", "passes over the data that candidates were taken from, those at rest included"),
    "curriculum/refused": (
        "times",
        "times in a row that the disk refused the log of draws: no ticket goes out meanwhile",
    ),
    "timers/rollout": ("s", "seconds the learner waited for groups"),
    "timers/generate": ("s", "mean seconds a group took to generate"),
    "timers/in_model": ("s", "mean seconds that a rollout waited for the engine, in all its turns together"),
    "timers/in_environment": ("s", "mean seconds that a rollout waited for its environment"),
    "timers/reward": ("s", "mean seconds a group waited for rewards"),
    "timers/logprobs": ("s", "seconds of forward passes for the policy and the loss"),
    "timers/init_logprobs": ("s", "seconds of forward passes of the reference"),
    "timers/train": ("s", "seconds of the optimizer step, forward and backward included"),
    "timers/publish": ("s", "seconds to encode, store and announce a version"),
    "timers/checkpoint": ("s", "seconds the loop waited at a checkpoint, mostly for a copy of its state"),
    "timers/checkpoint_wait": ("s", "of these, seconds for the one before, which was still being written"),
    "timers/checkpoint_write": ("s", "seconds the slowest rank took to write a checkpoint, beside training"),
    "timers/checkpoint_commit": ("s", "seconds the loop took to agree on what was written, and to tell Redis"),
    "timers/step": ("s", "seconds of the whole step"),
    "throughput/tokens": ("tokens", "tokens of the samples trained in the step, prompts included, of every pass"),
    "throughput/tokens_per_s": (
        "tokens/s",
        "tokens of trained samples, prompts included, per second of the whole step",
    ),
    "throughput/tflop": ("TFLOP", "useful 10^12 floating-point operations of the step's forward and backward passes"),
    "throughput/tflop_per_s": ("TFLOP/s", "the same per second in timers/train, of all ranks together"),
    "throughput/mfu": ("share", "the same as a share of what the GPUs could do, where that is known"),
    "throughput/samples_per_s": ("samples/s", "trained samples per second of the whole step"),
    "gpu/use": (
        "share",
        "share of the time in which rank 0's GPU was at work, of the second before the step was recorded",
    ),
    "gpu/memory": ("share", "share of the memory of rank 0's GPU that is in use, whoever uses it"),
    "gpu/peak_memory": ("share", "largest share of it that the tensors of rank 0 took during the step"),
    "weights/version": ("", "number of the newest version that was out when the step was recorded"),
    "weights/num_bytes": ("bytes", "bytes of that version, as a worker that follows fetches them"),
    "weights/changed_fraction": ("share", "share of elements that changed with it"),
}

OF_LOSS = "loss/"  # what the run's loss tells of itself

# Names that begin so, and go on with whatever there is in a run.
FAMILIES: Mapping[str, Explained] = {
    "train_rollouts/rewards/": ("reward", "mean reward of this source in trained groups, before weights"),
    "train_rollouts/rewards_std_by_source/": (
        "reward",
        "standard deviation of this source's reward in trained groups, before weights",
    ),
    "train_rollouts/rewards_by_dataset/": ("reward", "mean weighted reward of this dataset's trained groups"),
    "all_rollouts/rewards_by_dataset/": (
        "reward",
        "mean weighted reward of this dataset's groups, the dropped ones included",
    ),
    "val_rollouts/rewards/": ("reward", "mean reward of this source on the validation prompts, before weights"),
    "val_rollouts/rewards_by_dataset/": ("reward", "mean weighted reward on the validation prompts of this dataset"),
    "val_rollouts/pass_at/": (
        "share",
        "pass@k by validation.pass_by, unbiased: the chance that one of k samples of a prompt passes",
    ),
    "val_rollouts/pass_at_by_dataset/": ("share", "pass@k on the prompts of this dataset: its name, then k"),
    "val_rollouts/majority_by_dataset/": ("share", "share of this dataset's prompts whose most frequent answer passes"),
    "policy/ratio_histogram/": (
        "share",
        "share of tokens whose ratio pi / mu is at most this, and above the next smaller one",
    ),
    OF_LOSS: ("", "told by the loss: a mean over trained tokens, unless it counts something else"),
    "idle/": ("share", "share of the step that rank 0 spent in this wait"),
    "stream/dropped/": ("groups", "groups dropped for this reason since the start of the run"),
    "stream/dropped_by_length/": (
        "groups",
        "groups dropped whose longest response has at most so many tokens, more than the next smaller number",
    ),
    "stream/drop_rate_by_length/": ("share", "their share of the groups of that length that ended"),
    "stream/trained_by_dataset/": ("groups", "groups of this dataset trained since the start of the run"),
    "stream/dropped_by_dataset/": ("groups", "groups of this dataset dropped since the start of the run"),
    "curriculum/prompts/": (
        "prompts",
        "prompts that are new, fitting (samples differ), solved or hopeless, by what the curriculum knows of them",
    ),
    "stream/ignored/": ("messages", "messages that decided no ticket, for this reason"),
}


def is_metric(name: str) -> bool:
    return bool(meaning(name))


def meaning(name: str) -> str:
    """In a few words; empty where it is no metric."""
    return explained(name)[1]


def explained(name: str) -> Explained:
    return METRICS.get(name) or next((each for begin, each in FAMILIES.items() if name.startswith(begin)), ("", ""))
