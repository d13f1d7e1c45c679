"""Chooses a layout for the learner's GPUs: of those in which a rank fits its GPU, the one with the least traffic.

    each layout that model and GPUs allow ─┬─► a rank's peak memory (`memory.plan`) ─► does it fit?
                                           └─► its traffic per token ─► those that fit, the least first

`traffic` computes bytes sent; bytes between hosts are weighted by how much slower those links are. Ranks of one host
may share layers (`tensor`): they send more per token than ranks that share samples, and hold less of a layer's weights.
Context sizes that do not divide the attention heads, and so have empty ones, are taken only if nothing else fits.
Layouts that the learner would refuse are left out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

from streamrl.config import schema
from streamrl.config.layout import refuse_layout
from streamrl.errors import ConfigError
from streamrl.learner.parallel.context import idle
from streamrl.learner.planning.memory import MemoryEstimate, computes_again, keeps_reference, plan
from streamrl.learner.planning.sizes import Sizes
from streamrl.learner.planning.traffic import Links, sent

_STEP = 1024  # tokens; step of the search for shorter samples
_ADAPTED = 100  # approximate ratio of a model's weights to its adapters'


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    gpus: int  # the learner's, on all its hosts
    memory: int  # bytes of each that a rank may use
    per_host: int

    @property
    def hosts(self) -> int:
        return -(-self.gpus // self.per_host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The learner's task, independent of the layout."""

    sizes: Sizes
    config: schema.Config
    tokens: int  # per micro-batch
    longest: int  # of the longest sample
    teacher: Sizes | None = None

    @classmethod
    def of(cls, sizes: Sizes, config: schema.Config, *, teacher: Sizes | None = None) -> Task:
        """The task of this configuration; a sample longer than a micro-batch makes one of its own."""
        longest = config.data.max_prompt_tokens + config.max_response_tokens
        tokens = max(longest, config.training.micro_batch_tokens)
        return cls(sizes=sizes, config=config, tokens=tokens, longest=longest, teacher=teacher)

    def under(self, **settings: object) -> Task:
        """The task with other model settings."""
        model = self.config.model.model_copy(update=settings)
        return replace(self, config=self.config.model_copy(update={"model": model}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    layout: schema.Layout
    planned: MemoryEstimate
    fits: bool
    links: Links  # bytes that a rank sends per token of its own
    idle: float  # fraction of empty attention heads

    @property
    def sent(self) -> float:
        return self.links.weighed


def options(task: Task, machine: Machine) -> Sequence[Option]:
    """All layouts that model and GPUs allow, the best first.

    First those that fit, by traffic, with empty heads last; then those that do not fit, by memory.
    """
    found = [_option(layout, task, machine) for layout in _allowed(task, machine)]
    return sorted(found, key=lambda option: _rank(option))


def smaller(found: Sequence[Option]) -> Iterator[Option]:
    """The alternatives to the choice with less of one setting, which do not fit or send more.

    Fewer ranks to a layer, to a sample or to a layer's experts, or more replicas.
    """
    chosen = found[0].layout
    for name, rank in (("tensor", 1), ("context", 1), ("experts", 1), ("replicas", -1)):
        others = [
            option
            for option in found
            if option.layout.model_copy(update={name: getattr(chosen, name)}) == chosen
            and rank * getattr(option.layout, name) < rank * getattr(chosen, name)
        ]
        yield from sorted(others, key=lambda option: -rank * getattr(option.layout, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class WayOut:
    """A change that would make it fit."""

    change: str
    option: Option


def ways_out(task: Task, machine: Machine) -> Iterator[WayOut]:
    """Single changes that would make it fit; none if no single one helps."""
    for change, changed in _changes(task):
        if (option := options(changed, machine)[0]).fits:
            yield WayOut(change=change, option=option)
    for times in (2**n for n in range(1, 11)):
        gpus = machine.gpus * times
        if gpus > machine.per_host and gpus % machine.per_host:
            continue
        if (option := options(task, replace(machine, gpus=gpus))[0]).fits:
            yield WayOut(change=f"{gpus} GPUs", option=option)
            break
    steps = bisect_left(range(1, task.longest // _STEP + 1), True, key=lambda n: not _shorter(task, n, machine).fits)
    if steps:
        longest = steps * _STEP
        change = f"samples of at most {longest} tokens, prompts included, and training.micro_batch_tokens={longest}"
        yield WayOut(change=change, option=_shorter(task, steps, machine))


def _shorter(task: Task, steps: int, machine: Machine) -> Option:
    return options(replace(task, longest=steps * _STEP, tokens=steps * _STEP), machine)[0]


def _changes(task: Task) -> Iterator[tuple[str, Task]]:
    model = task.config.model
    if task.tokens > task.longest:
        yield f"training.micro_batch_tokens={task.longest}", replace(task, tokens=task.longest)
    if not computes_again(task.config):
        yield "model.gradient_checkpointing=auto", task.under(gradient_checkpointing="auto")
    elif model.activations == "device":
        yield "model.activations=cpu", task.under(activations="cpu")
    if keeps_reference(task.config):
        yield "model.reference=cpu", task.under(reference="cpu")
    if model.masters == "device":
        yield "model.masters=cpu", task.under(masters="cpu")
    if model.lora is None:
        total = task.sizes.trained + task.sizes.frozen
        few = replace(task.sizes, trained=total // _ADAPTED, frozen=total)
        yield "adapters alone (model.lora)", replace(task.under(lora=schema.Lora()), sizes=few)


def _rank(option: Option) -> tuple[float, ...]:
    layout = option.layout
    simpler = layout.tensor, layout.context, layout.experts, layout.replicas
    return (0, option.idle, option.sent, *simpler) if option.fits else (1, option.planned.needed, *simpler)


def _allowed(task: Task, machine: Machine) -> Iterator[schema.Layout]:
    sizes = task.sizes
    gpus_per_host = min(machine.per_host, machine.gpus)
    of_each = {
        "replicas": _divisors(machine.hosts),
        "tensor": [n for n in _divisors(sizes.shared.max_ranks) if gpus_per_host % n == 0],  # within a host
        "context": _divisors(machine.gpus if sizes.may_share else 1),
        "experts": _divisors(1 if sizes.experts is None else sizes.experts.num),
    }
    for numbers in product(*of_each.values()):
        layout = schema.Layout(**dict(zip(of_each, numbers, strict=True)))
        if layout.context <= sizes.heads // layout.tensor and _is_taken(layout, machine):
            yield layout


def _is_taken(layout: schema.Layout, machine: Machine) -> bool:
    with suppress(ConfigError):
        refuse_layout(layout, machine.gpus)
        return True
    return False


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _under(layout: schema.Layout, config: schema.Config) -> schema.Config:
    return config.model_copy(update={"learner": config.learner.model_copy(update={"layout": layout})})


def _option(layout: schema.Layout, task: Task, machine: Machine) -> Option:
    sizes, config, found = task.sizes, task.config, planned(layout, task, machine)
    links = sent(layout, sizes, config, ranks=machine.gpus, per_host=machine.per_host, tokens=task.tokens)
    empty = idle(sizes.heads // layout.tensor, layout.context)
    return Option(layout=layout, planned=found, fits=found.needed <= machine.memory, links=links, idle=empty)


def planned(layout: schema.Layout, task: Task, machine: Machine) -> MemoryEstimate:
    return plan(
        task.sizes,
        _under(layout, task.config),
        ranks=machine.gpus,
        teacher=task.teacher,
        tokens=task.tokens,
        longest=task.longest,
    )
