"""The commands of `streamrl`, by name; each is imported only when called, so that `--help` answers at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class CommandEntry(NamedTuple):
    target: str  # module:attribute of a click command
    help: str  # its line in `streamrl --help`


COMMANDS: Mapping[str, CommandEntry] = {
    "quickstart": CommandEntry("streamrl.ops.cli.training.up:quickstart", "Watch a small model learn on this machine."),
    "game": CommandEntry("streamrl.ops.cli.training.up:game", "Watch a small model learn a game of several turns."),
    "demo": CommandEntry("streamrl.ops.cli.training.up:demo", "Watch a pretrained model learn on this machine."),
    "up": CommandEntry(
        "streamrl.ops.cli.training.up:up", "Run everything on this machine: Redis, rewards, workers, learner."
    ),
    "sft": CommandEntry(
        "streamrl.ops.cli.training.sft:sft", "Fine-tune a model on prompts with answers, before a run."
    ),
    "learn": CommandEntry(
        "streamrl.ops.cli.training.learn:learn", "Run the learner alone, under torchrun, on one machine or several."
    ),
    "worker": CommandEntry(
        "streamrl.workers.main:main", "Join a run as a worker: generate and score, from any machine."
    ),
    "pause": CommandEntry("streamrl.ops.cli.operating.operate:pause", "Pause a run: no more steps, no more tickets."),
    "resume": CommandEntry("streamrl.ops.cli.operating.operate:resume", "Continue a paused run."),
    "drain": CommandEntry(
        "streamrl.ops.cli.operating.operate:drain", "Train what was requested, write a checkpoint, and stop."
    ),
    "stop": CommandEntry(
        "streamrl.ops.cli.operating.operate:stop", "Write a checkpoint and stop; samples in flight wait in Redis."
    ),
    "dead": CommandEntry(
        "streamrl.ops.cli.operating.operate:dead", "List, retry or purge tickets that failed too often."
    ),
    "eval": CommandEntry(
        "streamrl.ops.cli.models.eval:evaluate", "Score a checkpoint, or any model, on a file of prompts."
    ),
    "chat": CommandEntry("streamrl.ops.cli.models.chat:chat", "Chat with a run's model, a checkpoint, or any model."),
    "serve": CommandEntry("streamrl.ops.cli.models.serve:serve", "Serve a model with vLLM, over OpenAI's protocol."),
    "top": CommandEntry("streamrl.ops.cli.watching.status:top", "Watch a run live in this terminal."),
    "status": CommandEntry(
        "streamrl.ops.cli.watching.status:status", "Show a run's state on one screen, and as an exit code."
    ),
    "why": CommandEntry("streamrl.ops.cli.watching.status:why", "Say what holds a run back now, and what to do."),
    "dashboard": CommandEntry("streamrl.ops.cli.watching.dashboard:dashboard", "Show a run in the browser, read-only."),
    "export": CommandEntry("streamrl.ops.cli.watching.export:export", "Export a run to Prometheus and Grafana."),
    "doctor": CommandEntry(
        "streamrl.ops.cli.configs.doctor:doctor", "Check that a configuration can run here, before it does."
    ),
    "runs": CommandEntry("streamrl.ops.cli.operating.runs:runs", "List, compare or remove runs."),
    "plot": CommandEntry("streamrl.ops.cli.watching.plot:plot", "Plot the curves of one or several runs as a PNG."),
    "weights": CommandEntry(
        "streamrl.ops.cli.models.weights:weights", "Export a run's weights; list, check or pull published versions."
    ),
    "audit": CommandEntry(
        "streamrl.ops.cli.watching.audit:audit", "Account for every ticket of a run: none lost, none trained twice."
    ),
    "groups": CommandEntry("streamrl.ops.cli.watching.groups:groups", "Read the rollouts of a run or a recording."),
    "record": CommandEntry(
        "streamrl.ops.cli.watching.record:record", "Record the groups of a live run; export recordings."
    ),
    "config": CommandEntry("streamrl.ops.cli.configs.config:config", "Create, show or check a configuration."),
    "redis": CommandEntry("streamrl.ops.cli.operating.acl:redis", "Print users and rights for Redis."),
    "reward": CommandEntry(
        "streamrl.ops.cli.rewards.reward:reward", "Try a reward function; serve or train a reward model."
    ),
    "environment": CommandEntry(
        "streamrl.ops.cli.rewards.environment:environment", "Serve an environment to the workers of a run."
    ),
}
