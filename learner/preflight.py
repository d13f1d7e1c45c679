"""Checks that the learner can read its inputs: `python -m streamrl.learner.preflight`, configuration on stdin.

    own loss and advantages ─► tokenizer ─► prompts, by the run's own reader ─► the model on `meta`, its LoRA targets
                                                         ─► a teacher's tokenizer
                                                         ─► GPU memory of a rank; `--elsewhere`: without workers,
                                                            `--hosts FEWEST MOST`: on so many hosts like this one
                                                         ─► the best layout for those GPUs

    python -m streamrl.learner.preflight --gpus 8 --memory BYTES --per-host 8     only the layout, for GPUs elsewhere

Stops at the first mistake, with the error that the learner would raise some minutes later. Loads no weights and
downloads nothing: a model that is only on a hub is left to the learner. Blocks on the disk.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.config import schema
from streamrl.config.load import config_from_json
from streamrl.config.of_model import longest_sequence, refuse_unseen_stops
from streamrl.config.placement import LEARNER, Part, Share, place
from streamrl.config.routers import find_routers
from streamrl.errors import DataError, ResourceError, UserError
from streamrl.finding import Finding, error, ok, take_stdout, warning
from streamrl.gpus import gpus_here
from streamrl.terminal import plural, size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from streamrl.learner.loading.tokenizer import TokenizerInfo
    from streamrl.learner.planning.memory import Plan

_READ_S = 10.0  # time limit for tokenising a dataset's prompts; the learner reads the rest


def main() -> int:
    write = take_stdout()
    try:
        arguments, config = _parse_arguments(), config_from_json(sys.stdin.read())
        part: Part = "learner" if arguments.elsewhere else "all"
        hosts = None if arguments.hosts is None else range(arguments.hosts[0], arguments.hosts[1] + 1)
        for finding in examine(config, part, hosts) if arguments.gpus is None else plan_for(config, arguments):
            write(finding)
    except UserError as mistake:
        write(error("learner", str(mistake), ""))
    return 0


def _parse_arguments() -> Namespace:
    parser = ArgumentParser()
    parser.add_argument("--elsewhere", action="store_true")
    parser.add_argument("--hosts", type=int, nargs=2)
    for name in ("--gpus", "--memory", "--per-host"):
        parser.add_argument(name, type=int)
    return parser.parse_args()


def plan_for(config: schema.Config, arguments: Namespace) -> Iterator[Finding]:
    """Suggest a layout for the given GPUs; needs only the model's configuration files on this machine."""
    from streamrl.learner.loading.load import outline, teacher_sizes
    from streamrl.learner.planning.advice import suggest_layout
    from streamrl.learner.planning.layouts import Machine, Task
    from streamrl.learner.planning.sizes import Sizes

    for path in (config.model.path, None if config.teacher is None else config.teacher.path):
        if path is not None and not _is_here(path):
            problem = f"{path!r} is not on this machine: planning a layout needs its config.json"
            yield error("layout", problem, f"`hf download {path} --include '*.json'`, or name a folder that has it")
            return
    learner = config.learner.model_copy(update={"layout": schema.Layout()})  # ignore the layout that is set now
    config = config.model_copy(update={"learner": learner})
    machine = Machine(gpus=arguments.gpus, memory=arguments.memory, per_host=arguments.per_host)
    yield from suggest_layout(Task.of(Sizes.of(outline(config)), config, teacher=teacher_sizes(config)), machine)


def examine(config: schema.Config, part: Part = "all", hosts: range | None = None) -> Iterator[Finding]:
    """Yield findings; raises UserError for what would stop any learner. `hosts`: the learner's; None: not known."""
    from streamrl.learner.objective.trial import try_out  # imports only torch: half the import time of transformers

    try_out(config)
    yield ok("algorithm", f"{config.algorithm.name} runs on synthetic groups")
    if not _is_here(config.model.path):
        yield warning(
            "model",
            f"model.path = {config.model.path!r} is not on this machine yet: neither it nor the prompts were checked",
            "the learner checks both once it is downloaded",
        )
        return
    from streamrl.learner.loading.load import outline
    from streamrl.learner.loading.tokenizer import read_tokenizer_info
    from streamrl.learner.parallel.context import refuse_heads

    info = read_tokenizer_info(config.model.path)
    refuse_unseen_stops(config, info.tokenizer, info.end_ids)
    yield from _prompts(config, info)
    model = outline(config)
    refuse_heads(model, config.learner.layout.context)
    longest_sequence(
        config, config.model.path, getattr(model.config.get_text_config(), "max_position_embeddings", None)
    )
    yield ok("model structure", "it is a causal language model with room for the longest sequence")
    if config.algorithm.routing_replay != "none":
        find_routers(model, config)
        yield ok("routers", "their choice of experts can be replayed")
    yield from _teacher(config, info)
    yield from _memory(config, model, part, range(1, 2) if part == "all" else hosts)


def _teacher(config: schema.Config, info: TokenizerInfo) -> Iterator[Finding]:
    from streamrl.learner.objective.teacher import check_teacher

    path = None if config.teacher is None else config.teacher.path
    if path is None:
        return
    if not _is_here(path):
        yield warning("teacher", f"teacher.path = {path!r} is not on this machine yet", "the learner downloads it")
        return
    check_teacher(config, info)
    yield ok("teacher", "its tokens match the policy's")


def _memory(config: schema.Config, model: PreTrainedModel, part: Part, hosts: range | None) -> Iterator[Finding]:
    """Compare a rank's memory need with its GPU, on the fewest hosts that may be all there are."""
    import torch

    from streamrl.learner.loading.load import teacher_sizes
    from streamrl.learner.model.compiled import compiles, with_layers
    from streamrl.learner.planning.advice import suggest_layout
    from streamrl.learner.planning.layouts import Machine, Task
    from streamrl.learner.planning.recomputing import expected
    from streamrl.learner.planning.sizes import Sizes
    from streamrl.learner.process.ranks import World

    try:
        share = place(config, gpus_here(), part).shares.get(LEARNER)
    except ResourceError:  # the placement check reports this
        return
    if share is None or not share.memory or config.model.dtype != "bfloat16":
        return
    is_here = config.teacher is None or config.teacher.path is None or _is_here(config.teacher.path)
    sizes, teacher = Sizes.of(model), teacher_sizes(config) if is_here else None
    gpu = World(rank=0, size=1, device=torch.device("cuda", 0))
    decided = with_layers(config, compiled=compiles(config, model, gpu))
    ranks, room = config.learner.processes, share.limit

    def on(num_hosts: int) -> Plan:
        return expected(sizes, decided, ranks=num_hosts * ranks, room=room, teacher=teacher)

    yield _fits(on, share, hosts)
    if part == "all":
        machine = Machine(gpus=ranks, memory=share.memory, per_host=ranks)
        yield from suggest_layout(Task.of(sizes, config, teacher=teacher), machine, configured=config.learner.layout)


def _fits(on: Callable[[int], Plan], share: Share, hosts: range | None) -> Finding:
    """Compare a rank's plan, by the number of hosts, with its share of a GPU. No restart can fix a refusal, so the
    fewest hosts that a learner may be left with must do."""
    from streamrl.learner.planning.memory import REMEDY

    name, planned = "learner on GPU", on(hosts[0] if hosts else 1)
    evidence = f"{size(planned.needed)} peak per rank (calculated), {size(share.memory)} available on {share.words}"
    if planned.needed <= share.memory:
        return ok(name, evidence)
    if hosts is None:
        return warning(name, f"{evidence}, if this host is the only one", REMEDY)
    if planned.peak <= share.limit:
        return warning(name, evidence, REMEDY)
    enough = next((num for num in hosts if on(num).peak <= share.limit), None)
    if enough is None:
        return error(name, f"{evidence}; {REMEDY}", "")
    nodes = f"{enough}" if enough == hosts[-1] else f"{enough}:{hosts[-1]}"
    problem = f"--nodes {hosts[0]}:{hosts[-1]}: with {plural(hosts[0], 'host')} {evidence}"
    return error(name, f"{problem}; start with --nodes {nodes}", "")


def _is_here(path: str) -> bool:
    """Whether the model is a local folder or in the hub's cache."""
    if Path(path).is_dir():
        return True
    from transformers.utils.hub import cached_file

    with suppress(OSError):
        return cached_file(path, "config.json", local_files_only=True) is not None
    return False


def _prompts(config: schema.Config, info: TokenizerInfo, *, at_most_s: float = _READ_S) -> Iterator[Finding]:
    from streamrl.learner.groups.prompts import PromptSet, ReadLimit, num_shared, tokenise

    data, training, limit = config.data, config.training, ReadLimit(at_most_s=at_most_s)
    prompts = PromptSet.load(tokenizer=info.tokenizer, data=data, seed=config.seed, limit=limit)
    is_number_known = limit.num_read == limit.num_rows
    held_out = [row for named in data.validation_sets() for row in tokenise(named, info.tokenizer, data, limit=limit)]
    rows = [*prompts.rows, *held_out]
    longest = max(rows, key=lambda row: len(row.token_ids))
    highest = max(int(row.token_ids.max()) for row in rows)
    if highest >= info.vocabulary:
        problem = f"a prompt has token id {highest}, but the model has {info.vocabulary} outputs"
        raise DataError(f"model.path = {config.model.path!r}: {problem}: model and tokenizer do not match")
    told = f"{len(rows)} tokenised"
    if limit.num_read < limit.num_rows:
        told = f"{limit.num_read} of {limit.num_rows} tokenised ({at_most_s:g} s per dataset; the learner reads all)"
    yield ok("prompts", f"{told}, {len(longest.token_ids)} tokens at most")
    if shared := num_shared(held_out, prompts.rows):
        problem = f"{shared} of {len(held_out)} prompts of data.validation are in data.train, too"
        yield warning("held-out prompts", problem, "validate on rows of their own: another file, or another `split`")
    num_places, wanted = prompts.num_places(training.max_epochs), training.groups_per_step
    if is_number_known and num_places < wanted:
        problem = f"data.train gives {num_places} prompts in training.max_epochs = {training.max_epochs}"
        problem += f", fewer than training.groups_per_step = {wanted}: the run is a single, smaller step"
        yield warning("number of prompts", problem, "lower training.groups_per_step, or raise training.max_epochs")


if __name__ == "__main__":
    sys.exit(main())
