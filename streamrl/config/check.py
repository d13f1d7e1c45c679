"""Checks for contradictions between settings. All problems are collected before one error is raised.

Related rules have files of their own: training in `algorithm`, addresses in `places`, files in `files`. These checks
need nothing but the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import reduce
from operator import getitem
from typing import Any

from streamrl.config import algorithm, engine_args, files, places, routers, trained
from streamrl.config.explain import DURATION, Problem, show
from streamrl.config.load import Where
from streamrl.config.logged import OF_SOURCE
from streamrl.config.placement import parallel_in
from streamrl.config.schema import Config, FunctionReward, JudgeReward, Sampling
from streamrl.errors import ConfigError
from streamrl.protocol.wire.ticket import MAX_REWARD_SOURCES, MAX_SAMPLES, MAX_TOKENS, max_group_tokens
from streamrl.recipe.advantages import ADVANTAGES
from streamrl.recipe.held_out import numbers_of_samples
from streamrl.recipe.own import is_own

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_LOWEST_TEMPERATURE = 0.01  # vLLM raises lower values to this; only its log mentions it
_HIGHEST_TEMPERATURE = 2.0  # vLLM refuses higher values with each sample
_OF_ALL = "val_rollouts/rewards"
_OF_DATASET = "val_rollouts/rewards_by_dataset/"
_MAX_TIME = re.compile(r"(\d+):([01]\d|2[0-3]):([0-5]\d):([0-5]\d)\Z")


def check_config(config: Config, where: Where = lambda _key: None) -> None:
    """Refuse contradictory settings; `where` is `Loaded.origin`, so that errors name the line."""
    problems = [problem for rule in _RULES for problem in rule(config)]
    if problems:
        settings = config.model_dump(mode="json")
        raise ConfigError("\n".join(_line(problem, settings, where) for problem in problems))


def max_time_s(text: str) -> int:
    """Convert DD:HH:MM:SS to seconds; ValueError on anything else."""
    match = _MAX_TIME.match(text)
    if match is None:
        raise ValueError(f"not a duration: {text!r} (expected DD:HH:MM:SS)")
    days, hours, minutes, seconds = map(int, match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _line(problem: Problem, settings: Any, where: Where) -> str:
    origin = where(problem.key)
    value = reduce(getitem, problem.key.split("."), settings) if problem.value is None else problem.value
    return f"{origin + ': ' if origin else ''}{problem.key} = {show(value)}: {problem.remedy}"


def _samplings(config: Config) -> tuple[tuple[str, Sampling], ...]:
    return ("sampling", config.sampling), ("validation.sampling", config.validation.sampling)


def _sampling(config: Config) -> Iterator[Problem]:
    for section, sampling in _samplings(config):
        if sampling.min_tokens > sampling.max_tokens:
            remedy = f"must not exceed {section}.max_tokens = {sampling.max_tokens}"
            yield Problem(key=f"{section}.min_tokens", remedy=remedy)
    if config.sampling.greedy:
        remedy = "greedy samples of a prompt are identical and teach nothing; use it in validation.sampling only"
        yield Problem(key="sampling.greedy", remedy=remedy)
    if (held_out := config.validation.sampling).greedy and held_out.num_samples > 1 and config.environment is None:
        remedy = "greedy samples of a prompt are identical; set validation.sampling.greedy=false, or this to 1"
        yield Problem(key="validation.sampling.num_samples", remedy=remedy)
    if config.algorithm.name == "reinforce" and not config.sampling.accept_mismatch:
        # Settings that change the distribution in a way that the learner's logprobs do not reproduce.
        for name, off in (("top_k", 0), ("top_p", 1.0), ("repetition_penalty", 1.0)):
            if getattr(config.sampling, name) != off:
                yield Problem(
                    key=f"sampling.{name}",
                    remedy="the learner cannot reproduce this distribution, so its importance ratios would be wrong; "
                    f"set it to {off}, or set sampling.accept_mismatch=true to train anyway",
                )


def _sampled(config: Config) -> Iterator[Problem]:
    """Refuse settings with which no engine, or not this one, can sample."""
    for section, sampling in _samplings(config):
        if sampling.temperature < _LOWEST_TEMPERATURE:
            remedy = f"must be at least {_LOWEST_TEMPERATURE}, the lowest that vLLM samples at"
            yield Problem(key=f"{section}.temperature", remedy=remedy)
        if sampling.temperature > _HIGHEST_TEMPERATURE and config.worker.engine == "vllm":
            remedy = f"must be at most {_HIGHEST_TEMPERATURE}, the highest that vLLM samples at; "
            yield Problem(key=f"{section}.temperature", remedy=remedy + "or set worker.engine=transformers")
        if "" in sampling.stop:
            remedy = "remove the empty text, which every response contains"
            yield Problem(key=f"{section}.stop", remedy=remedy)


def _greedy(config: Config) -> Iterator[Problem]:
    """Refuse settings of held-out sampling that greedy sampling ignores."""
    held_out = config.validation.sampling
    for name, off in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0)) if held_out.greedy else ():
        if getattr(held_out, name) != off:
            remedy = f"greedy sampling ignores it: set validation.sampling.greedy=false, or this to {off}"
            yield Problem(key=f"validation.sampling.{name}", remedy=remedy)


def _messages(config: Config) -> Iterator[Problem]:
    """Refuse sizes that no ticket or group can carry: workers would reject the ticket, or their work would be lost."""
    num_prompt_tokens = config.data.max_prompt_tokens
    yield from _at_most("data.max_prompt_tokens", num_prompt_tokens, MAX_TOKENS)
    has_token_rewards = any(
        isinstance(source, FunctionReward) and source.per_token for source in config.rewards.values()
    )
    has_teacher = config.teacher is not None and bool(config.teacher.urls)  # which only training samples are shown to
    for section, sampling in _samplings(config):
        yield from _at_most(f"{section}.num_samples", sampling.num_samples, MAX_SAMPLES)
        items = has_token_rewards + (has_teacher and sampling is config.sampling)
        left = max_group_tokens(items=items) - min(num_prompt_tokens, MAX_TOKENS)
        limit = min(MAX_TOKENS, left // min(sampling.num_samples, MAX_SAMPLES))
        yield from _at_most(f"{section}.max_tokens", sampling.max_tokens, limit)
        if config.environment is not None:
            yield from _at_most("environment.max_tokens", config.environment.max_tokens, limit)
    yield from _at_most("rewards", len(config.rewards), MAX_REWARD_SOURCES)


def _at_most(key: str, value: int, limit: int) -> Iterator[Problem]:
    if value > limit:
        remedy = f"must be at most {limit}: a prompt, its samples and their rewards must fit into one message"
        yield Problem(key=key, value=value, remedy=remedy)


def _groups(config: Config) -> Iterator[Problem]:
    num_samples, survivors, algorithm = config.sampling.num_samples, config.worker.min_survivors, config.algorithm
    baseline = "the leave-one-out baseline of reinforce compares samples of one prompt; must be at least 2"
    limit = f"must not exceed sampling.num_samples = {num_samples}"
    advantages = algorithm.advantages if algorithm.name == "reinforce" else "none"
    numbers = {"sampling.num_samples": num_samples, "worker.min_survivors": survivors}
    lone = next((key for key, number in numbers.items() if number < 2), None)
    if lone is not None and advantages in ADVANTAGES and advantages != "none":
        yield Problem(key=lone, remedy=baseline)
    elif survivors > num_samples:
        yield Problem(key="worker.min_survivors", remedy=f"{limit}: no group could ever be delivered")
    if lone is not None and is_own(advantages) and algorithm.drop_zero_variance:
        remedy = f"{lone} = 1 allows groups of one sample, which would be dropped; set false, or {lone} to at least 2"
        yield Problem(key="algorithm.drop_zero_variance", remedy=remedy)
    if algorithm.name == "rejection_sampling" and algorithm.top_n > num_samples:
        yield Problem(key="algorithm.top_n", remedy=limit)


def _pace(config: Config) -> Iterator[Problem]:
    """Check learning rate, duration, lag and validation."""
    optimizer, max_time, lag = config.optimizer, config.training.max_time, config.lag
    if optimizer.schedule == "cosine" and optimizer.min_lr > optimizer.lr:
        remedy = f"must not exceed optimizer.lr = {optimizer.lr}, from which the schedule decays to it"
        yield Problem(key="optimizer.min_lr", remedy=remedy)
    if max(optimizer.betas) >= 1:
        yield Problem(key="optimizer.betas", remedy="both must be less than 1")
    if config.training.max_steps == 0:
        remedy = "nothing would be trained: must be at least 1, or -1 to train until training.max_epochs"
        yield Problem(key="training.max_steps", remedy=remedy)
    if max_time is not None and not (_MAX_TIME.match(max_time) and max_time_s(max_time)):
        yield Problem(key="training.max_time", remedy=DURATION)
    if lag.max_steps > lag.hard_limit_steps:
        yield Problem(key="lag.max_steps", remedy=f"must not exceed lag.hard_limit_steps = {lag.hard_limit_steps}")
    if config.weights.publish_every > lag.max_steps + 1:
        yield Problem(
            key="weights.publish_every",
            remedy=f"must be at most {lag.max_steps + 1}: weights published less often would be older than "
            f"lag.max_steps = {lag.max_steps} allows",
        )
    yield from _check_passing(config)
    if config.validation.every_steps and config.data.validation is None:
        remedy = "there are no prompts to validate on; set data.validation, or set this to 0"
        yield Problem(key="validation.every_steps", remedy=remedy)


def _check_passing(config: Config) -> Iterator[Problem]:
    """Check what decides whether a sample passes, and which checkpoint is best."""
    validation, environment = config.validation, config.environment
    if validation.pass_by is not None and not config.may_have_reward(validation.pass_by):
        of_agent = () if environment is None or environment.target is None else ("environment.NAME of an agent's",)
        remedy = f"must be one of the reward sources: {', '.join((*config.reward_sources, *of_agent))}"
        yield Problem(key="validation.pass_by", value=validation.pass_by, remedy=remedy)
    if validation.answer is not None:
        if validation.pass_by is None:
            remedy = "set validation.pass_by to the reward source that decides whether the majority's answer passes"
            yield Problem(key="validation.answer", remedy=remedy)
        import regex  # lazy: slow to import. What searches answers with it is `recipe.held_out`

        try:
            regex.compile(validation.answer)
        except regex.error as error:
            yield Problem(key="validation.answer", value=validation.answer, remedy=f"not a regular expression: {error}")
    metric = config.checkpoint.best_by
    known = set(_validation_metrics(config))
    of_source = metric.removeprefix(OF_SOURCE)
    is_known = metric in known or (of_source != metric and config.may_have_reward(of_source))
    if config.checkpoint.keep_best and not is_known:
        near = get_close_matches(metric, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"must be one of {', '.join(sorted(known))}"
        remedy = f"not a metric of this run's validation; {hint}"
        yield Problem(key="checkpoint.best_by", value=metric, remedy=remedy)


def _ranking(config: Config) -> Iterator[Problem]:
    """Refuse to rank checkpoints by comparisons within a group: whatever one sample wins, another loses."""
    metric = config.checkpoint.best_by
    if not (config.checkpoint.keep_best and config.validation.every_steps):
        return
    if metric == _OF_ALL or metric.startswith(_OF_DATASET):
        ranking = {name for name, weight in config.reward_weights.items() if weight}
    else:
        ranking = {metric.removeprefix(OF_SOURCE)}
    if ranking and ranking <= {name for name, source in _judged(config) if source.of_group}:
        remedy = f"{', '.join(sorted(ranking))} compares answers within a group, and the mean over a group is 0.5 "
        remedy += "whatever the model: set `against` to a field with another answer, or best_by to another metric"
        yield Problem(key="checkpoint.best_by", remedy=remedy)


def _validation_metrics(config: Config) -> Iterator[str]:
    """Yield the validation metrics for which more is better."""
    validation = config.validation
    names = [dataset.name for dataset in config.data.validation_sets() if dataset.name]
    yield from (_OF_ALL, "val_rollouts/fraction_of_samples_properly_ended")
    yield from (OF_SOURCE + source for source in config.reward_sources)
    yield from (_OF_DATASET + name for name in names)
    if validation.pass_by is None:
        return
    count = validation.sampling.num_samples
    for suffix in ("", *(f"_by_dataset/{name}" for name in names)):
        yield from (f"val_rollouts/pass_at{suffix}/{k}" for k in numbers_of_samples(count))
        if validation.answer is not None:
            yield f"val_rollouts/majority{suffix}"


def _gpus(config: Config) -> Iterator[Problem]:
    learner, worker = config.learner, config.worker
    if learner.gpus not in ("auto", 0, learner.processes):
        remedy = f"each rank uses one GPU: must be auto, 0 or learner.processes = {learner.processes}"
        yield Problem(key="learner.gpus", remedy=remedy)
    parallel = parallel_in(worker)
    if worker.gpus == "auto" or not worker.gpus:
        return
    num = worker.gpus * worker.hosts
    if num != parallel and ("tensor_parallel_size" in worker.engine_args or num % parallel):
        on_hosts = f", on worker.hosts = {worker.hosts}" if worker.hosts > 1 else ""
        remedy = f"worker.engine_args spread each worker over {parallel} GPUs{on_hosts}; remove one of the two settings"
        yield Problem(key="worker.gpus", remedy=remedy)


def _names(config: Config) -> Iterator[Problem]:
    datasets = config.data.train if isinstance(config.data.train, dict) else ()
    held_out = config.data.validation if isinstance(config.data.validation, dict) else ()
    for what, key, names in (
        ("datasets", "data.train", datasets),
        ("datasets", "data.validation", held_out),
        ("sources", "rewards", config.rewards),
        *(("judges", f"rewards.{source}.judges", of.judges) for source, of in _judged(config)),
    ):
        for name in names:
            if not _NAME.match(name):
                remedy = f"names of {what} are letters, digits, - and _ (they are part of settings or metric names)"
                yield Problem(key=key, value=name, remedy=remedy)


def _judged(config: Config) -> Iterator[tuple[str, JudgeReward]]:
    return ((name, source) for name, source in config.rewards.items() if isinstance(source, JudgeReward))


_RULES: tuple[Callable[[Config], Iterator[Problem]], ...] = (
    _sampling,
    _sampled,
    _greedy,
    _messages,
    _groups,
    algorithm.check_algorithm,
    algorithm.check_teaching,
    algorithm.check_masked,
    _pace,
    _ranking,
    _gpus,
    trained.check_activations,
    trained.check_compile,
    trained.check_adapters,
    trained.check_routers,
    _names,
    routers.check_routing,
    engine_args.check_engine_args,
    files.check_datasets,
    places.check_rewards,
    places.check_teacher,
    places.check_dir,
    places.check_redis,
    places.check_store,
)
