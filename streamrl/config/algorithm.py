"""Checks for contradictions among the settings of training: the algorithm, its functions' arguments, a teacher."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from streamrl.config.explain import Problem
from streamrl.config.schema import Algorithm, Config, Kl, Teacher
from streamrl.recipe.advantages import ADVANTAGES
from streamrl.recipe.losses import LOSSES
from streamrl.recipe.own import FORMS, is_own

_AT_ONE = "1 is the ratio of a sample that is not stale"
_LIMITS: Mapping[str, tuple[Callable[[float], bool], str]] = {  # arguments of losses and advantages
    "clamp": (lambda clamp: clamp > 0, "above 0"),
    "low": (lambda low: 0 <= low <= 1, f"from 0 to 1: {_AT_ONE}"),
    "high": (lambda high: high >= 1, f"of at least 1: {_AT_ONE}"),
    "clip_low": (lambda low: 0 <= low <= 1, f"from 0 to 1: {_AT_ONE}"),
    "clip_high": (lambda high: high >= 1, f"of at least 1: {_AT_ONE}"),
    "discount": (lambda discount: 0 <= discount <= 1, "from 0 to 1"),
}
_OF_REINFORCE = (
    *("loss", "loss_args", "advantages", "advantages_args"),
    *("discount_factor", "normalize_sources", "scale_by_std", "normalize_batch", "entropy_bonus"),
)


def check_algorithm(config: Config) -> Iterator[Problem]:
    settings, kl = config.algorithm, config.algorithm.kl
    if settings.name == "rejection_sampling":
        yield from _of_reinforce_only(settings)
        return
    allowed = {"reward": ("k1",), "loss": ("k2", "k3")}.get(kl.placement)
    if allowed is not None and kl.estimator not in allowed:
        remedy = f"with algorithm.kl.placement={kl.placement} it must be {' or '.join(allowed)}"
        yield Problem(key="algorithm.kl.estimator", remedy=remedy)
    yield from _function(settings, "loss", LOSSES)
    yield from _function(settings, "advantages", ADVANTAGES)
    if settings.loss in LOSSES:
        yield from _limits(settings, "loss")
    if settings.advantages in ADVANTAGES:
        yield from _limits(settings, "advantages")
    if settings.reinforce_epochs > 1 and settings.loss == "none":
        yield Problem(
            key="algorithm.reinforce_epochs",
            remedy="after the first pass the samples are off-policy, which algorithm.loss=none ignores; "
            "choose another loss, or set this to 1",
        )
    if settings.discount_factor < 1 and settings.loss == "gspo":
        yield Problem(
            key="algorithm.discount_factor",
            remedy="must be 1: gspo weights a response as a whole, so its tokens cannot have advantages of their own",
        )
    yield from _of_parts(settings)
    yield from _of_equal_rewards(settings)
    if config.model.lora is not None and config.model.lora.dropout and settings.loss in ("gspo", "sequence_mask"):
        remedy = f"must be 0: it moves the ratios of learner to generator, whose bounds in {settings.loss} are narrow"
        yield Problem(key="model.lora.dropout", remedy=remedy)


def _of_equal_rewards(settings: Algorithm) -> Iterator[Problem]:
    """Check that nothing but rewards is divided by their standard deviation, which is 0 where all are equal."""
    others = []
    if settings.normalize_sources:  # groups are dropped by their plain sums
        others.append("algorithm.normalize_sources=false")
    if not settings.drop_zero_variance:
        others.append("algorithm.drop_zero_variance=true")
    if not settings.scale_by_std or not others:
        return
    if is_own(settings.advantages):
        divided = f"the advantages of {settings.advantages}"
    elif settings.kl_in == "reward":
        divided = "the KL penalty (algorithm.kl.placement=reward)"
    else:
        return
    equal = "whose normalised sources cancel out" if settings.normalize_sources else "of equal rewards"
    yield Problem(
        key="algorithm.scale_by_std",
        remedy=f"set false, or {' and '.join(others)}: in a group {equal} {divided} would be divided by a standard "
        "deviation near 0",
    )


def check_masked(config: Config) -> Iterator[Problem]:
    """Check that the penalties of a group's samples are comparable where old tokens are masked."""
    algorithm = config.algorithm
    if config.lag.stale == "mask" and algorithm.kl_in == "reward" and algorithm.kl.reduction == "sum":
        remedy = (
            "the KL penalty (algorithm.kl.placement=reward) sums over the tokens that are left, so the baseline would "
            "favour samples with masked ones; set keep, wait or drop, or algorithm.kl.reduction=mean"
        )
        yield Problem(key="lag.stale", value="mask", remedy=remedy)


def _of_parts(settings: Algorithm) -> Iterator[Problem]:
    """Check advantages per turn or per token."""
    parts, by_parts = settings.advantages, f"with algorithm.advantages={settings.advantages}"
    if parts not in ("turns", "tokens"):
        return
    if settings.normalize_sources:
        remedy = f"must be false: {by_parts} rewards are summed over sources, so no source can be normalised alone"
        yield Problem(key="algorithm.normalize_sources", remedy=remedy)
    if settings.scale_by_std:
        remedy = f"must be false: {by_parts} samples may earn equal sums in different places, whose std is 0"
        yield Problem(key="algorithm.scale_by_std", remedy=f"{remedy} (algorithm.normalize_batch may be true)")
    if settings.loss == "gspo":
        yield Problem(
            key="algorithm.advantages",
            remedy=f"algorithm.loss=gspo weights a response as a whole, so its {parts} cannot have advantages of their "
            "own; choose another loss, or leave_one_out",
        )


def _function(settings: Algorithm, key: str, known: Mapping[str, Callable[..., Any]]) -> Iterator[Problem]:
    """Check what is visible without the user's code, which only the learner has and runs."""
    target, arguments = getattr(settings, key), getattr(settings, f"{key}_args")
    if target not in known:
        if not is_own(target):
            remedy = f"must be one of {', '.join(known)}, or your own code as {FORMS}"
            yield Problem(key=f"algorithm.{key}", remedy=remedy)
        return
    taken = _arguments_of(known[target])
    for name in (name for name in arguments if name not in taken):
        having = ", ".join(other for other in known if name in _arguments_of(known[other]))
        yield Problem(
            key=f"algorithm.{key}_args.{name}",
            value=arguments[name],
            remedy=f"algorithm.{key}={target} takes {_listed(taken) or 'no arguments'}; remove it"
            + (f" (used by {having})" if having else ""),
        )


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _arguments_of(function: Callable[..., Any]) -> list[str]:
    _, *named = inspect.signature(function).parameters
    return named


def _limits(settings: Algorithm, key: str) -> Iterator[Problem]:
    for name, value in getattr(settings, f"{key}_args").items():
        allows, words = _LIMITS.get(name, (lambda _: True, ""))
        if isinstance(value, str | bool) or not allows(value):
            yield Problem(key=f"algorithm.{key}_args.{name}", value=value, remedy=f"must be a number {words}".strip())


def _of_reinforce_only(settings: Algorithm) -> Iterator[Problem]:
    """Report settings that the user has set and rejection sampling would ignore."""
    silent = Algorithm() if settings.loss != "none" else Algorithm(loss="none")
    for name in (name for name in _OF_REINFORCE if getattr(settings, name) != getattr(silent, name)):
        yield Problem(
            key=f"algorithm.{name}",
            remedy="rejection_sampling trains on its best samples by cross-entropy, without ratios or advantages; "
            "remove it, or set algorithm.name=reinforce",
        )
    if settings.kl.placement != "none" and settings.kl.coefficient > 0 and settings.kl != Kl():
        remedy = "rejection_sampling has no reference and no KL; set none, or set algorithm.name=reinforce"
        yield Problem(key="algorithm.kl.placement", remedy=remedy)


def check_teaching(config: Config) -> Iterator[Problem]:
    """Check that something teaches, and that prompts are not drawn by what teaches nothing."""
    algorithm = config.algorithm
    equal_sums_teach = algorithm.advantages in ("turns", "tokens") or algorithm.normalize_sources
    if config.data.curriculum and equal_sums_teach and not algorithm.drop_zero_variance:
        remedy = "it draws prompts whose samples earn different sums, but here equal sums teach, too; set false"
        yield Problem(key="data.curriculum", remedy=remedy)
    if config.teacher is not None:
        yield from _with_teacher(config, config.teacher)
    elif algorithm.advantages == "none" and algorithm.kl_in != "loss":
        remedy = "nothing would be trained: set teacher, or algorithm.kl in the loss, or choose leave_one_out"
        yield Problem(key="algorithm.advantages", remedy=remedy)


def _with_teacher(config: Config, teacher: Teacher) -> Iterator[Problem]:
    """Check that nothing else is expected to teach where only the teacher does, and that its logprobs are
    comparable."""
    algorithm, kl, sampling = config.algorithm, config.algorithm.kl, config.sampling
    if algorithm.name == "rejection_sampling":
        remedy = "trains on its best samples by cross-entropy, which takes no teacher; set it to reinforce"
        yield Problem(key="algorithm.name", remedy=remedy)
    elif algorithm.advantages == "none" and kl.placement == "reward" and kl.coefficient > 0 and kl != Kl():
        remedy = (
            "with algorithm.advantages=none no reward is trained on, nor a KL in it; set none, or loss with "
            "algorithm.kl.estimator k2 or k3"
        )
        yield Problem(key="algorithm.kl.placement", remedy=remedy)
    only_teacher = algorithm.advantages == "none" or not config.reward_sources
    if only_teacher and algorithm.drop_zero_variance:
        remedy = "the teacher also teaches on groups whose rewards are all equal, and there may be no others; set false"
        yield Problem(key="algorithm.drop_zero_variance", remedy=remedy)
    if only_teacher and config.data.curriculum:
        remedy = "it draws prompts whose rewards differ within a group, but only the teacher teaches here; set false"
        yield Problem(key="data.curriculum", remedy=remedy)
    if teacher.urls and sampling.temperature != 1:
        remedy = "the teacher's servers return log-probs at temperature 1, which must match; set 1, or use teacher.path"
        yield Problem(key="sampling.temperature", remedy=remedy)
    if teacher.urls and sampling.min_tokens > 1:
        remedy = (
            "while the policy may not end, the teacher's servers return log-probs as if it could, which must match; "
            "set 1, or use teacher.path"
        )
        yield Problem(key="sampling.min_tokens", remedy=remedy)
