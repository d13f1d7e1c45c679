"""The checkpoints and models that `streamrl eval` scores, each with its own settings, which are checked here.

    a configuration (the run's, or --config) ─► KEY.SUB=VALUE ─► the model that the weights belong to

Imports neither torch nor transformers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.config import schema
from streamrl.config.changes import changes
from streamrl.config.check import check_config
from streamrl.config.files import check_files
from streamrl.config.load import as_overrides, load_config
from streamrl.config.places import LOCAL_REWARD_SERVER
from streamrl.errors import ConfigError, DataError
from streamrl.ops.cli.models.subject import Subject, checkpoints_of, find_subject, of_whole_model, settings_of
from streamrl.ops.monitor.doctor.requirements import check_packages

if TYPE_CHECKING:
    from streamrl.learner.checkpoints.checkpoint import Checkpoint

_OVERRIDE = re.compile(r"[A-Za-z_][\w.-]*=")
# What each result depends on besides the weights; of the second, what a resume refuses to change, unlike addresses.
_SCORED_BY: tuple[str, ...] = ("data.validation", "data.max_prompt_tokens", "data.overlong", "data.malformed")
_SCORED_BY += ("validation.sampling", "validation.max_prompts", "validation.pass_by", "validation.pass_score")
_SCORED_BY += ("validation.answer",)
_REWARDS = ("rewards.", "environment")
_OF_WEIGHTS = re.compile(r"(model|weights)[.=]")
_OTHER_WEIGHTS = re.compile(r"model(\.path|\.lora[.\w]*)?=")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSubject:
    """A model to score, with its settings."""

    name: str
    config: schema.Config
    checkpoint: Checkpoint | None  # None: the model at model.path

    @property
    def is_gone(self) -> bool:
        """Whether its run has removed the checkpoint since it was found (`checkpoint.keep_last`)."""
        return self.checkpoint is not None and not self.checkpoint.folder.exists()

    @property
    def run(self) -> Path | None:
        """The folder of the checkpoint's run, whatever configuration it is scored by."""
        return self.checkpoint.folder.resolve().parents[1] if self.checkpoint else None


def find_subjects(
    words: Sequence[str], file: Path | None, option_settings: Sequence[str], *, local_reward_url: str | None
) -> list[EvalSubject]:
    """Find the subjects; `option_settings` are settings from options, which override those among the words."""
    overrides = [word for word in words if _OVERRIDE.match(word)]
    checkpoints = [each for word in words if word not in overrides for each in checkpoints_of(word)]
    if not checkpoints:
        raise ConfigError("name at least one checkpoint: a run, RUN@STEP, RUN@best, RUN@all, or a model")
    subjects = [_find(checkpoint, file, [*overrides, *option_settings]) for checkpoint in checkpoints]
    for other in subjects[1:]:
        refuse_other_scoring(subjects[0], other, local_reward_url=local_reward_url)
    return subjects


def refuse_other_scoring(one: EvalSubject, other: EvalSubject, *, local_reward_url: str | None = None) -> None:
    """Raise ConfigError if their results say nothing about each other: each run has its own prompts and rewards. One
    server at `local_reward_url` scores all of them."""
    found = changes(one.config, other.config)
    rewards = _REWARDS if local_reward_url is not None else (*_REWARDS, "reward_server.")
    different = [change.key for change in found if change.key.startswith(_SCORED_BY)]
    different += [change.key for change in found if change.key.startswith(rewards) and change.refusal]
    if different:
        raise ConfigError(
            f"{one.name} and {other.name} cannot be compared: their runs differ in {', '.join(different)}; score "
            "both by one configuration with --config FILE, or set the same with --prompts FILE and KEY.SUB=VALUE"
        )


def _find(text: str, file: Path | None, overrides: Sequence[str]) -> EvalSubject:
    """Find one subject, with the configuration of its run, or the given one."""
    found = find_subject(text)
    path = file or found.config_file
    if file is None and not path.is_file():
        raise ConfigError(
            f"{text} belongs to no run: name a configuration with sampling and rewards, with --config FILE"
        )
    explicit = [word for word in overrides if _OF_WEIGHTS.match(word)]
    config = load_config(path, [*overrides, *_settings_of_weights(found, file, explicit)]).config
    return EvalSubject(name=found.name, config=config, checkpoint=found.checkpoint)


def _settings_of_weights(found: Subject, file: Path | None, explicit: Sequence[str]) -> list[str]:
    """Return the settings that the weights belong to, as overrides, whatever model the configuration names.

    `explicit` ones, from the command line, hold for a checkpoint (its base model may have moved). A model has none that
    they could change.
    """
    if found.checkpoint is not None:
        # A run never changes its model, and what a fork begins with has no settings but its run's.
        made_with = load_config(found.config_file).config if file is None else _settings_of(found)
        model = made_with.model.model_dump(mode="json")
        return [*as_overrides({"model": model, "weights.dtype": made_with.weights.dtype}), *explicit]
    if refused := [word for word in explicit if _OTHER_WEIGHTS.match(word)]:
        raise of_whole_model(found.name, refused[0])
    return as_overrides({"model.path": found.name, "model.lora": None})


def _settings_of(found: Subject) -> schema.Config:
    """The checkpoint's settings, or its run's where it has none that can be read."""
    try:
        return settings_of(found)
    except DataError as error:
        try:
            return load_config(found.config_file).config
        except ConfigError:  # there is none, or it is of another version, too
            raise error from None


def check_subject(subject: EvalSubject, local_reward_url: str | None) -> schema.Config:
    """Check its configuration; return it without what is not used, and with its reward server only if it must be
    started here.

    Raises UserError for anything that would fail later.
    """
    config = _without_unused(subject.config)
    if not config.data.validation_sets():
        raise ConfigError("no prompts to score it on: name a file with --prompts FILE, or set data.validation")
    check_config(config)
    urls = [url for one in config.rewards.values() if isinstance(one, schema.SERVICES) for url in one.urls]
    if local_reward_url is not None or LOCAL_REWARD_SERVER not in urls:
        config = config.model_copy(update={"reward_server": None})
    config = config.model_copy(update={"teacher": None})  # the only one to teach where there are no rewards
    check_packages(config)
    check_files(config, trains=False)
    return config


def _without_unused(config: schema.Config) -> schema.Config:
    """Neutralise the settings that no evaluation uses, so that none of them contradicts what it does use: other
    prompts, sampling, engine or model than the run's."""
    worker: dict[str, object] = {"count": 1}
    if config.worker.engine != "vllm":  # which spreads its model by them
        worker |= {"hosts": 1, "gpus": "auto"}
    unused = {
        "sampling": config.sampling.model_copy(update={"min_tokens": 0, "max_tokens": 1}),  # validation's is used
        "algorithm": config.algorithm.model_copy(update={"routing_replay": "none"}),
        "checkpoint": schema.Checkpoint(keep_best=0),  # best_by names a metric of the run's own validations
        "metrics": schema.Metrics(),  # whose packages may be missing
        "worker": config.worker.model_copy(update=worker),
        "learner": schema.Learner(),  # its ranks and layout: the weights are read by one process
    }
    return config.model_copy(update=unused)
