"""The settings of the recipe: a configuration's section `algorithm`. `streamrl.config.schema` has all others."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from streamrl.settings import Arguments, NonNegativeFloat, Positive, Section


class Kl(Section):
    placement: Literal["reward", "loss", "none"] = "reward"
    coefficient: NonNegativeFloat = 0.01  # [initial_policy_kl_penalty]
    estimator: Literal["k1", "k2", "k3"] = "k1"  # reward: k1; loss: k2 or k3
    absolute: bool = True  # |k1| in the reward [use_absolute_kl]
    reduction: Literal["mean", "sum"] = "mean"  # over a sample's tokens, in the reward
    weighted: bool = True  # in the loss: by the loss's weight for the token; false: as in GRPO's paper


class Algorithm(Section):
    name: Literal["reinforce", "rejection_sampling"] = "reinforce"
    # How a token of a stale sample counts: one of streamrl/recipe/losses.py, or your own function, as
    # `package.module:function` or `path/to/file.py:function`
    loss: str = "truncated"
    # Over its defaults: clamp of truncated, tis, sequence_mask, decoupled; low and high of the others that have bounds
    loss_args: Arguments = Field(default_factory=dict)
    advantages: str = "leave_one_out"  # one of streamrl/recipe/advantages.py, or your own function
    advantages_args: Arguments = Field(default_factory=dict)
    reinforce_epochs: Positive = 1  # optimizer passes over a batch [reinforce_epochs]
    discount_factor: Annotated[float, Field(gt=0, le=1)] = 1.0  # per token, from the end of the response backwards
    normalize_sources: bool = False  # each source's rewards to mean 0 and deviation 1 in their group, before weights
    scale_by_std: bool = False  # divide advantages by the group's standard deviation
    normalize_batch: bool = False  # advantages of the batch to mean 0 and standard deviation 1
    drop_zero_variance: bool = True  # groups with equal rewards teach nothing; they are dropped and counted
    mask_unfinished: bool = True  # samples truncated by max_tokens get no loss and are in no baseline
    # Mean over each sequence's tokens, then over sequences | over all tokens of the batch | over sequences, of the sum
    # of their tokens | the same, divided by sampling.max_tokens
    loss_mean: Literal["sequence", "token", "sum", "max_tokens"] = "sequence"
    entropy_bonus: NonNegativeFloat = 0.0  # times each token's entropy, with its gradient, is subtracted from the loss
    # How the learner routes tokens in a mixture of experts: by itself | also, and compares with the engine's routes |
    # in later passes over a batch as in the first (R2) | as the engine did (R3)
    routing_replay: Literal["none", "compare", "first_pass", "rollout"] = "none"
    kl: Kl = Kl()
    top_n: Positive = 1  # rejection sampling: winners per group [top_n_rollouts]

    @property
    def kl_in(self) -> Literal["reward", "loss", "none"]:
        """Return where a KL has an effect: not in a reward that is not trained on."""
        if self.name != "reinforce" or self.kl.coefficient == 0:
            return "none"
        is_ignored = self.kl.placement == "reward" and self.advantages == "none"
        return "none" if is_ignored else self.kl.placement
