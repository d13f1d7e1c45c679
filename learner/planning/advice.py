"""Describes the suggested layout: the choice, its memory and traffic, why nothing smaller, or what would fit.

`learner.planning.layouts` decides; this module only formats.
"""

from __future__ import annotations

from collections.abc import Iterator

from streamrl.config import schema
from streamrl.finding import Finding, error, ok, warning
from streamrl.learner.planning.layouts import Machine, Option, Task, WayOut, options, planned, smaller, ways_out
from streamrl.learner.planning.traffic import FARTHER
from streamrl.terminal import plural, size

NAME = "layout"


def suggest_layout(task: Task, machine: Machine, *, configured: schema.Layout | None = None) -> Iterator[Finding]:
    """Yield findings about the best layout. `configured`: the configured layout, compared with the choice."""
    found = options(task, machine)
    chosen = found[0]
    if not chosen.fits:
        yield _nothing_fits(chosen, task, machine)
        return
    summary = f"{describe(chosen.layout)} on {plural(machine.gpus, 'GPU')}"
    evidence = f"{summary}: {_needs(chosen, machine)}; {_sends(chosen, machine)}"
    if configured == chosen.layout:
        yield ok(NAME, f"as configured, {evidence}")
    else:
        yield Finding(name=NAME, level="ok", evidence=evidence, remedy="\n".join(_lines(chosen, task, machine)))
    if chosen.idle:
        evidence = f"no number that divides the attention heads fits, so {chosen.idle:.0%} of them are padding"
        yield ok(f"{NAME}, context {chosen.layout.context}", evidence)
    if (tensor := chosen.layout.tensor) > 1:
        yield ok(f"{NAME}, tensor {tensor}", _shared(chosen, task, machine))
    for other in smaller(found):
        yield ok(f"{NAME}, why not", f"{describe(other.layout)}: {_against(other, chosen, machine)}")


def describe(layout: schema.Layout) -> str:
    sizes = [f"{name} {value}" for name, value in layout.model_dump().items() if value > 1]
    return ", ".join(sizes) or "nothing shared but weights"


def _needs(option: Option, machine: Machine) -> str:
    return f"{size(option.planned.needed)} peak per rank (calculated), of {size(machine.memory)} available"


def _sends(option: Option, machine: Machine) -> str:
    if machine.hosts == 1:
        return f"a rank sends {size(option.sent)} per token"
    near, far = size(option.links.near), size(option.links.far)
    counted = f"{size(option.sent)} if bytes between hosts count {FARTHER}-fold"
    return f"a rank sends per token {near} within its host and {far} to others, {counted}"


def _shared(option: Option, task: Task, machine: Machine) -> str:
    """Why ranks should share layers: what a rank would need for whole ones."""
    whole = planned(option.layout.model_copy(update={"tensor": 1}), task, machine)
    ranks = plural(option.layout.tensor, "rank")
    in_layer = (
        f"{size(option.planned.in_layer)} of weights, gradients and activations are at work in a layer that {ranks}"
    )
    return f"{in_layer} of one host share, and {size(whole.in_layer)} in a whole one"


def _against(other: Option, chosen: Option, machine: Machine) -> str:
    if not other.fits:
        return f"it needs {size(other.planned.needed)} of {size(machine.memory)} available"
    if other.idle > chosen.idle:
        return f"{other.idle:.0%} of its attention heads are padding"
    return f"it sends {size(other.sent)} per token, the choice {size(chosen.sent)}"


def _lines(option: Option, task: Task, machine: Machine) -> Iterator[str]:
    """The layout's lines of YAML."""
    layout = ", ".join(f"{name}: {value}" for name, value in option.layout.model_dump().items() if value > 1)
    ranks = machine.gpus // machine.hosts
    each = f"  # on each of {machine.hosts} hosts" if machine.hosts > 1 else ""
    yield f"learner: {{processes: {ranks}, layout: {{{layout}}}}}{each}"
    if task.tokens != task.config.training.micro_batch_tokens:
        yield f"training: {{micro_batch_tokens: {task.tokens}}}  # at least the longest sample"


def _nothing_fits(least: Option, task: Task, machine: Machine) -> Finding:
    evidence = (
        f"none of {plural(machine.gpus, 'GPU')} fits: the smallest, {describe(least.layout)}, needs "
        f"{size(least.planned.needed)} of {size(machine.memory)} available"
    )
    found = [_way_out(way) for way in ways_out(task, machine)]
    remedy = "\n".join(found) or "no single change is enough: take more GPUs, shorter samples and adapters together"
    finding = error if least.planned.peak > machine.memory else warning
    return finding(NAME, evidence, remedy)


def _way_out(way: WayOut) -> str:
    return f"with {way.change}: {size(way.option.planned.needed)}, {describe(way.option.layout)}"
