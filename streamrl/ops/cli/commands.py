"""The commands of `streamrl`, by name; each is imported only when called, so that `--help` answers at once."""

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
    "sft": Entry("streamrl.ops.cli.sft:sft", "Fine-tune a model on prompts with answers, before a run."),
    "learn": Entry("streamrl.ops.cli.learn:learn", "Run the learner alone, under torchrun, on one machine or several."),
    "worker": Entry("streamrl.workers.main:main", "Join a run as a worker: generate and score, from any machine."),
    "pause": Entry("streamrl.ops.cli.operate:pause", "Pause a run: no more steps, no more tickets."),
    "resume": Entry("streamrl.ops.cli.operate:resume", "Continue a paused run."),
    "drain": Entry("streamrl.ops.cli.operate:drain", "Train what was requested, write a checkpoint, and stop."),
    "stop": Entry("streamrl.ops.cli.operate:stop", "Write a checkpoint and stop; samples in flight wait in Redis."),
    "dead": Entry("streamrl.ops.cli.operate:dead", "List, retry or purge tickets that failed too often."),
    "eval": Entry("streamrl.ops.cli.eval:evaluate", "Score a checkpoint, or any model, on a file of prompts."),
    "chat": Entry("streamrl.ops.cli.chat:chat", "Chat with a run's model, a checkpoint, or any model."),
    "serve": Entry("streamrl.ops.cli.serve:serve", "Serve a model with vLLM, over OpenAI's protocol."),
    "top": Entry("streamrl.ops.cli.monitor:top", "Watch a run live in this terminal."),
    "status": Entry("streamrl.ops.cli.monitor:status", "Show a run's state on one screen, and as an exit code."),
    "why": Entry("streamrl.ops.cli.monitor:why", "Say what holds a run back now, and what to do."),
    "dashboard": Entry("streamrl.ops.cli.monitor:dashboard", "Show a run in the browser, read-only."),
    "export": Entry("streamrl.ops.cli.monitor:export", "Export a run to Prometheus and Grafana."),
    "doctor": Entry("streamrl.ops.cli.config:doctor", "Check that a configuration can run here, before it does."),
    "runs": Entry("streamrl.ops.cli.server:runs", "List, compare or remove runs."),
    "plot": Entry("streamrl.ops.cli.monitor:plot", "Plot the curves of one or several runs as a PNG."),
    "weights": Entry(
        "streamrl.ops.cli.weights:weights", "Export a run's weights; list, check or pull published versions."
    ),
    "audit": Entry("streamrl.ops.cli.audit:audit", "Account for every ticket of a run: none lost, none trained twice."),
    "groups": Entry("streamrl.ops.cli.groups:groups", "Read the rollouts of a run or a recording."),
    "record": Entry("streamrl.ops.cli.record:record", "Record the groups of a live run; export recordings."),
    "config": Entry("streamrl.ops.cli.config:config", "Create, show or check a configuration."),
    "redis": Entry("streamrl.ops.cli.server:redis", "Print users and rights for Redis."),
    "reward": Entry("streamrl.ops.cli.reward:reward", "Try a reward function; serve or train a reward model."),
    "environment": Entry("streamrl.ops.cli.environment:environment", "Serve an environment to the workers of a run."),
}
