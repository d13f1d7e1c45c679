"""The commands of `streamrl`, by name; each is imported only when it is called, so that `--help` answers at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Entry(NamedTuple):
    target: str  # module:attribute of a click command
    help: str  # its line in `streamrl --help`


COMMANDS: Mapping[str, Entry] = {
    "quickstart": Entry("streamrl.ops.cli.up:quickstart", "Watch a small model learn on this machine."),
    "game": Entry("streamrl.ops.cli.up:game", "Watch a small model learn a game of several turns."),
    "demo": Entry("streamrl.ops.cli.up:demo", "Watch a pretrained model learn on this machine."),
    "up": Entry("streamrl.ops.cli.up:up", "Run everything on this machine: Redis, rewards, workers, learner."),
    "sft": Entry("streamrl.ops.cli.sft:sft", "Train a model on prompts with their answers, before a run."),
    "learn": Entry("streamrl.ops.cli.learn:learn", "Run the learner alone, under torchrun, on one machine or several."),
    "worker": Entry("streamrl.workers.main:main", "Work for a run: generate and score, from any machine."),
    "pause": Entry("streamrl.ops.cli.operate:pause", "Hold a run: no more steps, no more tickets."),
    "resume": Entry("streamrl.ops.cli.operate:resume", "Go on after a pause."),
    "drain": Entry("streamrl.ops.cli.operate:drain", "Train what is under way, write a checkpoint, and stop."),
    "stop": Entry("streamrl.ops.cli.operate:stop", "Write a checkpoint and stop; what is under way waits."),
    "dead": Entry("streamrl.ops.cli.operate:dead", "Look at tickets that failed too often, repeat or purge them."),
    "eval": Entry("streamrl.ops.cli.eval:evaluate", "Score a checkpoint, or any model, on a file of prompts."),
    "chat": Entry("streamrl.ops.cli.chat:chat", "Talk to a model: a run's, a checkpoint's, or any other."),
    "serve": Entry("streamrl.ops.cli.serve:serve", "Serve a model by OpenAI's protocol, with vLLM."),
    "top": Entry("streamrl.ops.cli.monitor:top", "Watch a run live in this terminal."),
    "status": Entry("streamrl.ops.cli.monitor:status", "How a run is, on one screen; the exit code says it too."),
    "why": Entry("streamrl.ops.cli.monitor:why", "What holds a run back now, and the remedy."),
    "dashboard": Entry("streamrl.ops.cli.monitor:dashboard", "A run in the browser, read-only."),
    "export": Entry("streamrl.ops.cli.monitor:export", "A run for Prometheus and Grafana."),
    "doctor": Entry("streamrl.ops.cli.config:doctor", "Whether a configuration can run here, before it does."),
    "runs": Entry("streamrl.ops.cli.server:runs", "List runs, of a Redis and of a folder; compare, remove."),
    "plot": Entry("streamrl.ops.cli.monitor:plot", "The curves of a run as a PNG, or of several."),
    "weights": Entry("streamrl.ops.cli.weights:weights", "List, show, verify or pull the versions of a run's weights."),
    "audit": Entry("streamrl.ops.cli.audit:audit", "Account for every ticket of a run: none lost, none twice."),
    "groups": Entry("streamrl.ops.cli.groups:groups", "Read rollouts of a run or a recording, as people read."),
    "record": Entry("streamrl.ops.cli.record:record", "Save the groups of a live run; export what was saved."),
    "config": Entry("streamrl.ops.cli.config:config", "Begin, show or check a configuration."),
    "redis": Entry("streamrl.ops.cli.server:redis", "Users and rights in Redis."),
    "reward": Entry("streamrl.ops.cli.reward:reward", "Try a reward function; serve a reward model, or train one."),
    "environment": Entry("streamrl.ops.cli.environment:environment", "Serve an environment to the workers of a run."),
}
