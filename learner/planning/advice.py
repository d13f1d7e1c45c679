"""Describes the suggested layout: the choice, its memory and traffic, why nothing smaller, or what would fit.

`learner.planning.layouts` decides; this module only formats.
"""

from __future__ import annotations

from collections.abc import Iterator

from streamrl.config import schema
from streamrl.finding import Finding, error, ok, warning
from streamrl.learner.planning.layouts import Asked, Machine, Option, WayOut, options, planned, smaller, ways_out
from streamrl.learner.planning.traffic import FARTHER
from streamrl.terminal import plural, size

NAME = "layout"


def tell(asked: Asked, machine: Machine, *, has: schema.Layout | None = None) -> Iterator[Finding]:
    """Yield findings about the best layout. `has`: the configured layout, compared with the choice."""
    found = options(asked, machine)
    chosen = found[0]
    if not chosen.fits:
        yield _nothing_fits(chosen, asked, machine)
        return
    told = (
        f"{words(chosen.layout)} on {plural(machine.gpus, 'GPU')}: {_needs(chosen, machine)}; {_sends(chosen, machine)}"
    )
    if has == chosen.layout:
        yield ok(NAME, f"as configured, {told}")
    else:
        yield Finding(name=NAME, level="ok", evidence=told, remedy="\n".join(_lines(chosen, asked, machine)))
    if chosen.idle:
        told = f"no number that divides the heads fits, so {chosen.idle:.0%} of those in attention are empty"
        yield ok(f"{NAME}, context {chosen.layout.context}", told)
    if (tensor := chosen.layout.tensor) > 1:
        yield ok(f"{NAME}, tensor {tensor}", _shared(chosen, asked, machine))
    for other in smaller(found):
        yield ok(f"{NAME}, why not", f"{words(other.layout)}: {_against(other, chosen, machine)}")


def words(layout: schema.Layout) -> str:
    told = [f"{name} {value}" for name, value in layout.model_dump().items() if value > 1]
    return ", ".join(told) or "nothing shared but weights"


def _needs(option: Option, machine: Machine) -> str:
    return f"{size(option.planned.needed)} peak per rank (calculated), of {size(machine.memory)} available"


def _sends(option: Option, machine: Machine) -> str:
    if machine.hosts == 1:
        return f"a rank sends {size(option.sent)} for a token"
    near, far = size(option.links.near), size(option.links.far)
    counted = f"{size(option.sent)} where bytes between hosts count {FARTHER}-fold"
    return f"a rank sends for a token {near} within its host and {far} to others, {counted}"


def _shared(option: Option, asked: Asked, machine: Machine) -> str:
    """Why ranks should share layers: what a rank would need for whole ones."""
    whole = planned(option.layout.model_copy(update={"tensor": 1}), asked, machine)
    ranks = plural(option.layout.tensor, "rank")
    told = f"{size(option.planned.in_layer)} of weights, gradients and activations are at work in a layer that {ranks}"
    return f"{told} of one host share, and {size(whole.in_layer)} in a whole one"


def _against(other: Option, chosen: Option, machine: Machine) -> str:
    if not other.fits:
        return f"it takes {size(other.planned.needed)} of {size(machine.memory)} available"
    if other.idle > chosen.idle:
        return f"of its heads in attention {other.idle:.0%} are empty"
    return f"it sends {size(other.sent)} for a token, and {size(chosen.sent)} as chosen"


def _lines(option: Option, asked: Asked, machine: Machine) -> Iterator[str]:
    """The layout's lines of YAML."""
    layout = ", ".join(f"{name}: {value}" for name, value in option.layout.model_dump().items() if value > 1)
    ranks = machine.gpus // machine.hosts
    each = f"  # on each of {machine.hosts} hosts" if machine.hosts > 1 else ""
    yield f"learner: {{processes: {ranks}, layout: {{{layout}}}}}{each}"
    if asked.tokens != asked.config.training.micro_batch_tokens:
        yield f"training: {{micro_batch_tokens: {asked.tokens}}}  # at least the longest sample"


def _nothing_fits(least: Option, asked: Asked, machine: Machine) -> Finding:
    told = (
        f"none of {plural(machine.gpus, 'GPU')} fits: the least, {words(least.layout)}, takes "
        f"{size(least.planned.needed)} of {size(machine.memory)} available"
    )
    found = [_way_out(way) for way in ways_out(asked, machine)]
    remedy = "\n".join(found) or "no single change would do: take more GPUs, shorter samples and adapters together"
    tell_as = error if least.planned.peak > machine.memory else warning
    return tell_as(NAME, told, remedy)


def _way_out(way: WayOut) -> str:
    return f"with {way.words}: {size(way.option.planned.needed)}, {words(way.option.layout)}"
