"""Decides which GPUs of a machine each process of a run gets: a pure function of the configuration and the GPUs.

    GPU   0      1     2          3          4
          rank 0 rank 1 worker/0  worker/1   reward/0       one each, in this order, while there are enough

If there are too few, with `auto`:

    ranks      never share with each other, since NCCL refuses that: too few for them is an error
    workers    share what the learner leaves, in turn; if it leaves nothing, the learner's own
    reward     shares with the last worker

Processes that share a GPU get a fraction of its memory each; the fractions leave a tenth for the driver's contexts. A
number in `learner.gpus` or `worker.gpus` is a demand: exactly as many, not shared, or an error; 0 means none. The order
is that of CUDA_VISIBLE_DEVICES, which is how to choose. Without GPUs nothing is set. One GPU has run
this, shared by a learner and a worker; several have not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from streamrl.config.engine_args import ranks_in
from streamrl.config.schema import Config, Worker
from streamrl.errors import ResourceError
from streamrl.gpus import Gpu, visible_to
from streamrl.terminal import plural

StartedPart = Literal["all", "learner", "worker"]  # the part of the run on this machine; all is what `up` starts
LEARNER, REWARD = "learner", "reward/0"
USABLE = 0.9  # share of a GPU's memory
_LEARNER_SHARE, _REWARD_SHARE, _LEAST = 0.5, 0.1, 0.05
_UTILISATION = "gpu_memory_utilization"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShare:
    """The GPUs of one process and its children."""

    gpus: tuple[Gpu, ...]
    fraction: float | None = None  # of each GPU's memory; None: not shared

    @property
    def environment(self) -> Mapping[str, str]:
        return visible_to(tuple(gpu.name for gpu in self.gpus))

    @property
    def memory(self) -> int:
        """Bytes that it should use on each GPU; 0: unknown."""
        return int(self._whole * (self.fraction or USABLE))

    @property
    def limit(self) -> int:
        """Bytes that it is allowed on each GPU."""
        return int(self._whole * (self.fraction or 1.0))

    @property
    def _whole(self) -> int:
        return min((gpu.memory for gpu in self.gpus), default=0)

    @property
    def words(self) -> str:
        names = ", ".join(gpu.name for gpu in self.gpus)
        text = f"GPU {names}" if self.gpus else "no GPU"
        return text if self.fraction is None else f"{text}, {self.fraction:.2f} of its memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    shares: Mapping[str, GpuShare]  # by part: learner, worker/0, reward/0; empty without GPUs
    idle: tuple[Gpu, ...] = ()

    def environment(self, part: str) -> Mapping[str, str]:
        return self.shares[part].environment if part in self.shares else {}

    def fraction(self, part: str) -> float | None:
        return self.shares[part].fraction if part in self.shares else None


def num_workers(config: Config, part: StartedPart) -> int:
    """Return the number of workers on this machine."""
    return {"all": config.worker.count, "learner": 0, "worker": 1}[part]


def num_ranks(config: Config, part: StartedPart) -> int:
    return 0 if part == "worker" else config.learner.processes


def parallel_in(worker: Worker) -> int:
    """Return the number of GPUs that `worker.engine_args` require, on all hosts of a worker's engine."""
    return ranks_in(worker.engine_args)


def gpus_of_worker(worker: Worker) -> int:
    """On each host of its engine."""
    return max(1, parallel_in(worker) // worker.hosts) if worker.gpus == "auto" else worker.gpus


def place(config: Config, gpus: Sequence[Gpu], part: StartedPart = "all") -> Placement:
    """Place all parts. ResourceError, with what exists and what is required, if that is impossible."""
    if not gpus:
        _refuse_without(config, part)
        return Placement(shares={})
    learner = _ranks(config, gpus, part)
    left = gpus[len(learner) :]
    workers = _workers(config, gpus, left, num_workers(config, part))
    placed = {LEARNER: learner} if num_ranks(config, part) else {}
    placed |= {f"worker/{number}": taken for number, taken in enumerate(workers)}
    if part == "all" and config.reward_server is not None:
        taken = {gpu.name for each in placed.values() for gpu in each}
        own = [gpu for gpu in left if gpu.name not in taken]
        beside = next((each for each in reversed(workers) if each), gpus)
        placed[REWARD] = (own or beside[-1:])[:1]
    used = {gpu.name for each in placed.values() for gpu in each}
    return Placement(
        shares=_shares(config, placed, gpus),
        idle=tuple(gpu for gpu in gpus if gpu.name not in used) if part == "all" else (),
    )


def _refuse_without(config: Config, part: StartedPart) -> None:
    learner, worker = config.learner.gpus, config.worker.gpus
    if learner != "auto" and learner and num_ranks(config, part):
        raise ResourceError(f"learner.gpus = {learner}: torch finds no usable GPU here; set it to auto or 0")
    if worker != "auto" and worker and num_workers(config, part):
        raise ResourceError(f"worker.gpus = {worker}: torch finds no usable GPU here; set it to auto or 0")


def _ranks(config: Config, gpus: Sequence[Gpu], part: StartedPart) -> Sequence[Gpu]:
    wanted = num_ranks(config, part)
    if not wanted or config.learner.gpus == 0:
        return ()
    if wanted > len(gpus):
        problem = f"learner.processes = {wanted}: each rank needs a GPU of its own, and {_available(gpus)}"
        raise ResourceError(f"{problem}; set it to {len(gpus)}, or start the learner where there are more")
    _refuse_slices(gpus[:wanted], f"learner.processes = {wanted}")
    return gpus[:wanted]


def _workers(config: Config, gpus: Sequence[Gpu], left: Sequence[Gpu], count: int) -> Sequence[Sequence[Gpu]]:
    each, is_demand = gpus_of_worker(config.worker), config.worker.gpus != "auto"
    if not each:
        return [()] * count
    may_share = not is_demand and config.learner.gpus in ("auto", 0)
    pool = left if left or not may_share else gpus
    if count and (len(pool) < each or (is_demand and len(pool) < count * each)):
        wanted = f"worker.count = {count}: {plural(count, 'worker')} of {plural(each, 'GPU')} each"
        problem = f"{wanted} need {count * each}, {_available(gpus)}, and the learner leaves {len(left)}"
        fit = len(left) // each
        remedy = f"set worker.count to {fit}" if fit else "use fewer per worker (worker.gpus, tensor_parallel_size)"
        raise ResourceError(f"{problem}; {remedy}, or start workers on other machines")
    if count:
        _refuse_slices(pool[:each], f"worker.gpus = {each}")
    chunks = len(pool) // each
    return [pool[each * (number % chunks) :][:each] for number in range(count)]


def _available(gpus: Sequence[Gpu]) -> str:
    return f"there {'is' if len(gpus) == 1 else 'are'} {plural(len(gpus), 'GPU')}"


def _refuse_slices(gpus: Sequence[Gpu], wanted: str) -> None:
    if len(gpus) > 1 and any(gpu.is_slice for gpu in gpus):
        raise ResourceError(f"{wanted}: a process sees only one slice of a GPU (MIG); set it to 1, or use whole GPUs")


def _shares(config: Config, placed: Mapping[str, Sequence[Gpu]], gpus: Sequence[Gpu]) -> Mapping[str, GpuShare]:
    """Return each part's share; a part on several GPUs gets the smallest of its fractions."""
    found: dict[str, list[float]] = {part: [] for part in placed}
    for gpu in gpus:
        on_it = [part for part, own in placed.items() if gpu in own]
        if len(on_it) > 1:
            for part, fraction in _fractions(config, on_it, gpu).items():
                found[part].append(fraction)
    return {part: GpuShare(gpus=tuple(own), fraction=min(found[part], default=None)) for part, own in placed.items()}


def _fractions(config: Config, parts: Sequence[str], gpu: Gpu) -> Mapping[str, float]:
    """Divide this GPU's memory. The user's `gpu_memory_utilization` is kept, and the learner gets the rest."""
    kinds = Counter(part.partition("/")[0] for part in parts)
    workers, requested = kinds["worker"], config.worker.engine_args.get(_UTILISATION)
    room = USABLE - _REWARD_SHARE * kinds["reward"]
    requested = requested if isinstance(requested, int | float) else None
    if requested is not None and workers:
        worker, learner = requested, room - workers * requested
    else:
        learner = (_LEARNER_SHARE if workers else room) * kinds["learner"]
        worker = (room - learner) / max(1, workers)
    if (kinds["learner"] and learner < _LEAST) or (workers and worker < _LEAST) or learner < 0:
        most = (room - _LEARNER_SHARE * kinds["learner"]) / max(1, workers)
        users = f"worker.engine_args.{_UTILISATION} = {requested:g} each" if requested else f"{workers} workers"
        raise ResourceError(
            f"{' and '.join(parts)} share GPU {gpu.name}, and {users} leave too little of its memory; "
            f"use at most {max(most, _LEAST):.2f} each, or fewer workers"
        )
    of_kind = {LEARNER: learner, "worker": worker, "reward": _REWARD_SHARE}
    return {part: of_kind[part.partition("/")[0]] for part in parts}
