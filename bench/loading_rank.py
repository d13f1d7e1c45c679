"""Loads one rank's shard from real files: `python -m bench.loading_rank FOLDER RANKS`.

The other ranks do not exist; loading needs no communication. Prints one JSON line: shard bytes, and the process's peak
growth.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.loading import config_for
from streamrl.learner.loading.build import begin_model
from streamrl.learner.loading.load import fill, make_policy
from streamrl.learner.parallel.dtensors import held_rows
from streamrl.learner.parallel.fsdp import shard
from streamrl.learner.process.ranks import World


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def main(folder: Path, ranks: int) -> dict[str, int]:
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=1, world_size=ranks, store=FakeStore())
    world = World(rank=1, size=ranks, device=torch.device("cpu"))
    model, sources = begin_model(str(folder), attention="eager", world=world)
    policy = shard(make_policy(model, config_for(folder), (1,), world), world)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current size
    before = status("VmRSS")
    fill(policy, sources, world.device)
    shard_bytes = sum(held_rows(parameter)[1].nbytes for parameter in policy.parameters())
    return {"shard": shard_bytes, "grew": status("VmHWM") - before}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
