"""Which layout a learner's GPUs are to have: of those in which a rank fits its GPU, the one that sends the least.

    each layout that model and GPUs allow ─┬─► what a rank takes at its peak (`memory.plan`) ─► does it fit?
                                           └─► what it sends for a token ─► those that fit, the least first

Bytes that a rank sends for each of its own tokens, links between hosts counting as often as they are slower:

    weights     2 each, gathered for both passes, and 4 for the gradient of each that is trained; by micro-batch, so the
                fewer tokens a rank has of one, the more for each of them. Of divided experts, those of this rank alone
    copies      8 for each trained weight of a shard: gradients of a copy of the model go to the others and come back,
                counted as if a pass had one micro-batch
    context     queries, keys, values and what attention made of them, in each pass through a layer
    experts     hidden states, there and back, for each expert of a token, in each pass through a layer

Ranks that share layers (`layout.tensor`) are not among these: they send more for a token than those that share
samples. Whether the links of a machine make up for that is to be measured there.

A pass that is made again, to keep inputs of layers alone, counts again. It is arithmetic, and no time was ever measured
on GPUs: that a layout that sends less is faster is an assumption.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from streamrl.config import schema
from streamrl.config.layout import refuse_layout
from streamrl.config.routers import check_routing
from streamrl.errors import ConfigError
from streamrl.learner.parallel.context import KEY as CONTEXT
from streamrl.learner.parallel.context import repeats
from streamrl.learner.planning.memory import Plan, computes_again, keeps_reference, plan
from streamrl.learner.planning.sizes import Sizes

_STEP = 1024  # tokens, in which shorter samples are looked for
_ADAPTED = 100  # adapters have about so much less weights than a model
FARTHER = 9  # of 450 GB/s to each GPU within a host, 50 GB/s between hosts: those of H100, as makers state them


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    gpus: int  # of the learner, on all its hosts
    memory: int  # bytes of each that a rank may take
    per_host: int

    @property
    def hosts(self) -> int:
        return -(-self.gpus // self.per_host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a learner is to do, whatever the layout."""

    sizes: Sizes
    config: schema.Config
    tokens: int  # of a micro-batch
    longest: int  # of a sample
    teacher: Sizes | None = None

    @classmethod
    def of(cls, sizes: Sizes, config: schema.Config, *, teacher: Sizes | None = None) -> Asked:
        """A sample longer than a micro-batch is one by itself."""
        longest = config.data.max_prompt_tokens + config.max_response_tokens
        tokens = max(longest, config.training.micro_batch_tokens)
        return cls(sizes=sizes, config=config, tokens=tokens, longest=longest, teacher=teacher)

    def under(self, **settings: object) -> Asked:
        """With other settings of its model."""
        model = self.config.model.model_copy(update=settings)
        return replace(self, config=self.config.model_copy(update={"model": model}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    layout: schema.Layout
    planned: Plan
    fits: bool
    sent: float  # bytes a rank, for a token of its own


def options(asked: Asked, machine: Machine) -> Sequence[Option]:
    """All that model and GPUs allow: those that fit, the one that sends the least first; then the others, the one that
    takes the least first."""
    found = [_option(layout, asked, machine) for layout in _allowed(asked, machine)]
    return sorted(found, key=lambda option: _rank(option))


def smaller(found: Sequence[Option]) -> Iterator[Option]:
    """Of a choice, what would be had with less of one setting: fewer ranks to a sample or to a layer's experts, more
    copies of the model. They do not fit, or send more."""
    chosen = found[0].layout
    for name, rank in (("context", 1), ("experts", 1), ("replicas", -1)):
        others = [
            option
            for option in found
            if option.layout.model_copy(update={name: getattr(chosen, name)}) == chosen
            and rank * getattr(option.layout, name) < rank * getattr(chosen, name)
        ]
        yield from sorted(others, key=lambda option: -rank * getattr(option.layout, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class WayOut:
    """A change by which it would fit."""

    words: str
    option: Option


def ways_out(asked: Asked, machine: Machine) -> Iterator[WayOut]:
    """One change each; nothing, where no single one helps."""
    for words, changed in _changes(asked):
        if (option := options(changed, machine)[0]).fits:
            yield WayOut(words=words, option=option)
    for times in (2**n for n in range(1, 11)):
        gpus = machine.gpus * times
        if gpus > machine.per_host and gpus % machine.per_host:
            continue
        if (option := options(asked, replace(machine, gpus=gpus))[0]).fits:
            yield WayOut(words=f"{gpus} GPUs", option=option)
            break
    steps = bisect_left(range(1, asked.longest // _STEP + 1), True, key=lambda n: not _shorter(asked, n, machine).fits)
    if steps:
        longest = steps * _STEP
        told = f"samples of at most {longest} tokens, prompts included, and training.micro_batch_tokens={longest}"
        yield WayOut(words=told, option=_shorter(asked, steps, machine))


def _shorter(asked: Asked, steps: int, machine: Machine) -> Option:
    return options(replace(asked, longest=steps * _STEP, tokens=steps * _STEP), machine)[0]


def _changes(asked: Asked) -> Iterator[tuple[str, Asked]]:
    model = asked.config.model
    if asked.tokens > asked.longest:
        yield f"training.micro_batch_tokens={asked.longest}", replace(asked, tokens=asked.longest)
    if not computes_again(asked.config):
        yield "model.gradient_checkpointing=auto", asked.under(gradient_checkpointing="auto")
    elif model.activations == "device":
        yield "model.activations=cpu", asked.under(activations="cpu")
    if keeps_reference(asked.config):
        yield "model.reference=cpu", asked.under(reference="cpu")
    if model.masters == "device":
        yield "model.masters=cpu", asked.under(masters="cpu")
    if model.lora is None:
        total = asked.sizes.trained + asked.sizes.frozen
        few = replace(asked.sizes, trained=total // _ADAPTED, frozen=total)
        yield "adapters alone (model.lora)", replace(asked.under(lora=schema.Lora()), sizes=few)


def _rank(option: Option) -> tuple[float, ...]:
    layout = option.layout
    simpler = layout.context, layout.experts, layout.replicas
    return (0, option.sent, *simpler) if option.fits else (1, option.planned.needed, *simpler)


def _allowed(asked: Asked, machine: Machine) -> Iterator[schema.Layout]:
    sizes = asked.sizes
    for replicas in _divisors(machine.hosts):
        for context in _divisors(sizes.heads if sizes.may_share else 1):
            for experts in _divisors(1 if sizes.experts is None else sizes.experts.num):
                layout = schema.Layout(replicas=replicas, context=context, experts=experts)
                with suppress(ConfigError):
                    refuse_layout(layout, machine.gpus)
                    if all(problem.key != CONTEXT for problem in check_routing(_under(layout, asked.config))):
                        yield layout


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _under(layout: schema.Layout, config: schema.Config) -> schema.Config:
    return config.model_copy(update={"learner": config.learner.model_copy(update={"layout": layout})})


def _option(layout: schema.Layout, asked: Asked, machine: Machine) -> Option:
    planned = plan(
        asked.sizes,
        _under(layout, asked.config),
        ranks=machine.gpus,
        teacher=asked.teacher,
        tokens=asked.tokens,
        longest=asked.longest,
    )
    sent = _sent(layout, asked, machine)
    return Option(layout=layout, planned=planned, fits=planned.needed <= machine.memory, sent=sent)


def _sent(layout: schema.Layout, asked: Asked, machine: Machine) -> float:
    sizes = asked.sizes
    shards, passes = machine.gpus // layout.replicas, 3 if computes_again(asked.config) else 2
    experts = sizes.experts
    total, trained = (0, 0) if experts is None else (experts.total, experts.trained)
    weights = (4 * (sizes.trained + sizes.frozen - total) + 4 * (sizes.trained - trained)) * _over(shards, 1, machine)
    weights += 4 * (total + trained) / layout.experts * _over(shards // layout.experts, layout.experts, machine)
    weights += 8 * sizes.trained / shards * _over(layout.replicas, shards, machine)
    heads = 4 * sizes.queries + 4 * sizes.keys * repeats(sizes.heads, sizes.kv_heads, layout.context)
    tokens = passes * sizes.layers * heads * _over(layout.context, 1, machine)
    if experts is not None:
        tokens += passes * sizes.layers * 4 * experts.chosen * sizes.width * _over(layout.experts, 1, machine)
    return weights * layout.context / asked.tokens + tokens


def _over(size: int, apart: int, machine: Machine) -> float:
    """The share of something that a rank gets from others of a group, what comes from other hosts counting more.
    `apart`: by how many ranks those of the group are."""
    if size == 1:
        return 0.0
    here = min(size, max(1, machine.per_host // apart))
    return ((here - 1) + FARTHER * (size - here)) / size
