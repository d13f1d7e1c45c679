"""The commands of `streamrl`, by name; each is imported only when it is called, so that `--help` answers at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Entry(NamedTuple):
    target: str  # module:attribute of a click command
    help: str  # its line in `streamrl --help`


COMMANDS: Mapping[str, Entry] = {
    "quickstart": Entry("streamrl.cli.quickstart:quickstart", "Watch a small model learn on this machine."),
    "demo": Entry("streamrl.cli.demo:demo", "Watch a pretrained model learn on this machine."),
    "up": Entry("streamrl.cli.up:up", "Run everything on this machine: Redis, rewards, workers, learner."),
    "learn": Entry("streamrl.cli.learn:learn", "Run the learner alone, under torchrun, on one machine or several."),
    "pause": Entry("streamrl.cli.control:pause", "Hold a run: no more steps, no more tickets."),
    "resume": Entry("streamrl.cli.control:resume", "Go on after a pause."),
    "drain": Entry("streamrl.cli.control:drain", "Train what is under way, write a checkpoint, and stop."),
    "stop": Entry("streamrl.cli.control:stop", "Write a checkpoint and stop; what is under way waits."),
    "dead": Entry("streamrl.cli.dead:dead", "Look at tickets that failed too often, repeat or purge them."),
    "eval": Entry("streamrl.cli.eval:evaluate", "Score a checkpoint, or any model, on a file of prompts."),
    "top": Entry("streamrl.cli.top:top", "Watch a run live in this terminal."),
    "status": Entry("streamrl.cli.status:status", "How a run is, on one screen; the exit code says it too."),
    "why": Entry("streamrl.cli.status:why", "What holds a run back now, and the remedy."),
    "dashboard": Entry("streamrl.cli.dashboard:dashboard", "A run in the browser, read-only."),
    "export": Entry("streamrl.cli.export:export", "A run for Prometheus and Grafana."),
    "doctor": Entry("streamrl.cli.doctor:doctor", "Whether a configuration can run here, before it does."),
    "runs": Entry("streamrl.cli.runs:runs", "List the runs of a Redis, or remove one."),
    "plot": Entry("streamrl.cli.plot:plot", "The curves of a run as a PNG."),
    "weights": Entry("streamrl.cli.weights:weights", "List, show, verify or pull the versions of a run's weights."),
    "audit": Entry("streamrl.cli.audit:audit", "Account for every ticket of a run: none lost, none twice."),
    "groups": Entry("streamrl.cli.groups:groups", "Read rollouts of a live run or a recording, as people read."),
    "record": Entry("streamrl.cli.record:record", "Save the groups of a live run; export what was saved."),
    "config": Entry("streamrl.cli.config:config", "Show or check a configuration."),
    "redis": Entry("streamrl.cli.redis:redis", "Users and rights in Redis."),
    "reward": Entry("streamrl.cli.reward:reward", "Serve a reward model over HTTP, or train one."),
}
