"""GPU memory: whether a rank fits on its GPU, and the best layout, by calculation alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from streamrl.config import schema
from streamrl.config.placement import LEARNER, GpuShare, StartedPart, place
from streamrl.errors import ResourceError
from streamrl.finding import Finding, error, ok, warning
from streamrl.gpus import gpus_here
from streamrl.learner.preflight.here import is_downloaded
from streamrl.terminal import plural, size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from streamrl.learner.planning.memory import MemoryEstimate


def check_memory(
    config: schema.Config, model: PreTrainedModel, part: StartedPart, hosts: range | None
) -> Iterator[Finding]:
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
    teacher_is_here = config.teacher is None or config.teacher.path is None or is_downloaded(config.teacher.path)
    sizes, teacher = Sizes.of(model), teacher_sizes(config) if teacher_is_here else None
    gpu = World(rank=0, size=1, device=torch.device("cuda", 0))
    decided = with_layers(config, compiled=compiles(config, model, gpu))
    ranks, room = config.learner.processes, share.limit

    def on(num_hosts: int) -> MemoryEstimate:
        return expected(sizes, decided, ranks=num_hosts * ranks, room=room, teacher=teacher)

    yield _fits(on, share, hosts)
    if part == "all":
        machine = Machine(gpus=ranks, memory=share.memory, per_host=ranks)
        yield from suggest_layout(Task.of(sizes, config, teacher=teacher), machine, configured=config.learner.layout)


def _fits(on: Callable[[int], MemoryEstimate], share: GpuShare, hosts: range | None) -> Finding:
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


def plan_layout(config: schema.Config, *, gpus: int, memory: int, per_host: int) -> Iterator[Finding]:
    """Suggest a layout for the given GPUs; needs only the model's configuration files on this machine."""
    from streamrl.learner.loading.load import outline, teacher_sizes
    from streamrl.learner.planning.advice import suggest_layout
    from streamrl.learner.planning.layouts import Machine, Task
    from streamrl.learner.planning.sizes import Sizes

    for path in (config.model.path, None if config.teacher is None else config.teacher.path):
        if path is not None and not is_downloaded(path):
            problem = f"{path!r} is not on this machine: planning a layout needs its config.json"
            yield error("layout", problem, f"`hf download {path} --include '*.json'`, or name a folder that has it")
            return
    learner = config.learner.model_copy(update={"layout": schema.Layout()})  # ignore the layout that is set now
    config = config.model_copy(update={"learner": learner})
    machine = Machine(gpus=gpus, memory=memory, per_host=per_host)
    yield from suggest_layout(Task.of(Sizes.of(outline(config)), config, teacher=teacher_sizes(config)), machine)
