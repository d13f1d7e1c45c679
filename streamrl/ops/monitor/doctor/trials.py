"""Trials that run before anything of a run starts, so that a mistake costs seconds: `up`, `learn` and `config check`
stop at the first that fails, `doctor` reports all.

    python -m streamrl.workers.preflight   rewards score made-up completions of each file's first row, the environment
                                           answers one
    python -m streamrl.learner.preflight   own losses, tokenizer, prompts, and the model without its weights

Both are processes that get the configuration and write findings; so nothing here imports torch or user code, and their
memory ends with them. Cheap trials come first. Nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from streamrl.config.load import Loaded
from streamrl.config.placement import USABLE
from streamrl.config.schema import SERVICES, Environment, Reward
from streamrl.errors import ConfigError, DataError
from streamrl.extras import install, is_installed
from streamrl.finding import Finding, warning
from streamrl.ops.monitor.doctor.machine import check_models
from streamrl.process import dying_with_us

_LOAD_S = 150.0  # a worker's child may take two minutes to load a function
_LEARNER_S = 120.0

Trial = Callable[[Loaded], Iterable[Finding]]


def try_rewards(loaded: Loaded, *, ask_services: bool = False) -> Iterator[Finding]:
    """Try the reward sources and the environment. `ask_services`: also ask those that are services, which may cost
    money."""
    config, tried = loaded.config, list[Reward | Environment]()
    tried += [source for source in config.rewards.values() if ask_services or not isinstance(source, SERVICES)]
    if config.environment is not None and (ask_services or config.environment.target is not None):
        tried.append(config.environment)
    if not tried:
        return iter(())
    if not is_installed("httpx"):
        remedy = f"the workers will report errors in them; to try them here, too: `{install('rewards')}`"
        return iter([warning("rewards", "httpx is not installed: rewards were not tried", remedy)])
    num_asked = 2 * len(config.data.datasets())  # of each two completions, or two calls of an environment
    limit_s = 2 * (_LOAD_S + num_asked * max(one.timeout_s for one in tried))  # sources of groups come after the others
    options = ["--ask-services"] if ask_services else []
    return _run("rewards", "streamrl.workers.preflight", *options, loaded=loaded, limit_s=limit_s)


def try_learner(loaded: Loaded, *, workers_are_here: bool = True, hosts: range | None = None) -> Iterator[Finding]:
    """Try model and prompts. `hosts`: numbers of hosts that the learner may have; None: not known."""
    options = [] if workers_are_here else ["--elsewhere"]
    options += [] if hosts is None else ["--hosts", str(hosts[0]), str(hosts[-1])]
    return _ask_learner(*options, loaded=loaded, what="model and prompts were not tried")


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """GPUs for a learner, possibly elsewhere."""

    gpus: int
    memory: int  # bytes of each
    per_host: int


def plan_layout(loaded: Loaded, planned: Planned) -> Iterator[Finding]:
    """Propose layouts for a learner on these GPUs, from the model's configuration alone; checks nothing else."""
    if planned.gpus > planned.per_host and planned.gpus % planned.per_host:
        seen = f"--gpus {planned.gpus} is not a multiple of --gpus-per-host {planned.per_host}"
        raise ConfigError(f"{seen}: set --gpus-per-host to the number of GPUs of each host")
    options = {"gpus": planned.gpus, "memory": int(USABLE * planned.memory), "per-host": planned.per_host}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return _ask_learner(*words, loaded=loaded, what="no layout was planned")


def _ask_learner(*words: str, loaded: Loaded, what: str) -> Iterator[Finding]:
    if not is_installed("torch", "transformers"):
        remedy = f"run this again where the learner runs, or `{install('learner')}`"
        return iter([warning("learner", f"torch and transformers are not installed: {what}", remedy)])
    return _run("learner", "streamrl.learner.preflight", *words, loaded=loaded, limit_s=_LEARNER_S)


# By the names shown while they run.
REWARD_TRIALS: Mapping[str, Trial] = {"rewards": try_rewards}
LIGHT_TRIALS: Mapping[str, Trial] = {"vocabulary": check_models, **REWARD_TRIALS}
LEARNER_TRIALS: Mapping[str, Trial] = {"prompts and model": try_learner}  # imports torch, which takes seconds
TRIALS: Mapping[str, Trial] = {**LIGHT_TRIALS, **LEARNER_TRIALS}


def run_trials(
    loaded: Loaded,
    *,
    report: Callable[[str], None],
    warn: Callable[[str], None],
    workers_are_here: bool = True,
    hosts: range | None = None,
    trials: Mapping[str, Trial] = TRIALS,
) -> None:
    """Run the trials; UserError with the findings of the first that fails. If workers are elsewhere, findings about
    rewards here are only warnings. `hosts`: see `try_learner`."""
    for name, trial in trials.items():
        report(f"trying {name} ...")
        bound = partial(try_learner, workers_are_here=workers_are_here, hosts=hosts) if trial is try_learner else trial
        findings = list(bound(loaded))
        lines = [one_line(finding) for finding in findings if finding.level == "error"]
        if lines and (workers_are_here or trial is not try_rewards):
            raise DataError("\n".join(lines))
        for line in lines:
            warn(f"{line} (here; workers may be elsewhere)")
        if trial is not check_models:  # its warnings say only that something was not checked here
            for finding in findings:
                if finding.level == "warning":
                    warn(one_line(finding))


def one_line(finding: Finding) -> str:
    """Format a finding on one line."""
    return f"{finding.evidence}; {finding.remedy}" if finding.remedy else finding.evidence


def _run(name: str, module: str, *words: str, loaded: Loaded, limit_s: float) -> Iterator[Finding]:
    """Run a trial process. If it fails by itself or takes too long, that says nothing about the run: a warning."""
    command = dying_with_us([sys.executable, "-m", module, *words], by=signal.SIGKILL)
    remedy = "the run itself will report any error"
    try:
        done = subprocess.run(
            command,
            input=loaded.config.model_dump_json(),
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
    except subprocess.TimeoutExpired:
        yield warning(name, f"check not finished: it took more than {limit_s:g} s", remedy)
        return
    yield from (Finding(**json.loads(line)) for line in done.stdout.splitlines())
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
        yield warning(name, f"check not finished: {last}", remedy)
