"""The cost of a version of the weights: the learner's loop until it is copied, and an engine until it is loaded."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import transformers

from bench.gpu_check.rows import Row, Scale
from bench.learner_gpu import SIZES
from bench.long_tailed import Size, make_config
from bench.measure import Say, seconds
from bench.serving import bench_serving
from bench.stepping import Stepping
from streamrl.held_folders import scratch_folder
from streamrl.learner.process.background import BackgroundThread, BackgroundThreadDouble
from streamrl.learner.process.ranks import World
from streamrl.learner.publishing.publish import Publisher
from streamrl.protocol.transport.types import Announcement
from streamrl.protocol.weights.file_store import FileStore

_TINY = Size(vocabulary=128, hidden=128, intermediate=256, layers=2, heads=2, kv_heads=2)
_ROUNDS = 3
_PAUSE_S = 0.3  # of an engine with a 1.5B model


class _Heard:
    def announce(self, announcement: Announcement, *, keep: list[int]) -> None:
        """Do nothing: there are no subscribers."""

    amend = announce


def publish(scale: Scale) -> Iterator[Row]:
    name, size = _size(scale)
    stepping = Stepping(size, make_config(micro_batch_tokens=64, dtype="bfloat16"), max_length=64, device=scale.device)
    background = BackgroundThread("publisher")
    with scratch_folder() as folder, background.working(join_s=60):
        publisher = Publisher(
            policy=stepping.policy,
            config=make_config(micro_batch_tokens=64, dtype="bfloat16"),
            world=World(rank=0, size=1, device=scale.device),
            run_uid="gpu-check",
            term=1,
            store=FileStore(folder),
            announcer=_Heard(),
            canary_ids=(3, 4, 5),
            background=background,
            sweeping=BackgroundThreadDouble(),
        )
        waits, ways = [], []
        for step in range(_ROUNDS):
            waits.append(seconds(lambda step=step: publisher.begin(step)))
            ways.append(seconds(lambda: _settle(publisher)))
    yield Row(what=f"{name}: the loop waits", value=min(waits[1:]), unit="s", note=f"{waits[0]:.3g} s the first time")
    yield Row(what=f"{name}: then on its way", value=ways[-1], unit="s", note="nothing changed; no goal")


def _settle(publisher: Publisher) -> None:
    while publisher.busy:
        publisher.settle(wait_s=1.0)


def reload(scale: Scale) -> Iterator[Row]:
    """Load versions into vLLM with samples in flight."""
    name, size = _size(scale)

    def make() -> transformers.PreTrainedModel:
        torch.set_num_threads(1)
        return size.model(max_length=2048, device=torch.device("cpu"))

    with scratch_folder(in_memory=True) as shared:
        lines = bench_serving(shared=shared, num_rounds=1, say=Say("reload"), make=make)
    found = {line.name: line.value for line in lines}
    goal = None if scale.is_reduced else _PAUSE_S
    yield Row(what=f"{name}: generation paused", value=found["generation paused"], unit="s", goal=goal, better="lower")
    yield Row(what=f"{name}: vLLM's own reload", value=found["vLLM's own reload from memory"], unit="s")
    yield Row(
        what=f"{name}: publish to serving", value=found["publish to serving"], unit="s", note="learner on the host"
    )


def _size(scale: Scale) -> tuple[str, Size]:
    return ("tiny", _TINY) if scale.is_reduced else ("1.5B", SIZES["1.5B"])
