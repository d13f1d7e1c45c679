"""One of several ranks loads a model and exports it again. Run by `tests.warm`.

python -m tests.integration.loading_rank MODEL OUT    OUT/loaded.safetensors: what all hold together; OUT/export
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import safetensors.torch
import torch

from streamrl.config import schema
from streamrl.learner.checkpoints.export import export
from streamrl.learner.loading.build import begin_model
from streamrl.learner.loading.load import load_policy
from streamrl.learner.parallel.dtensors import whole
from streamrl.learner.process.ranks import join_world
from tests.learner_cases import learner_config
from tests.leaving import leave
from tests.tiny_models import make_tokenizer

if __name__ == "__main__":
    model, out = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    with join_world(os.environ, timeout_s=240) as world:
        assert world.local_size == world.size
        _, sources = begin_model(str(model), attention="sdpa", world=world)
        assert sources, "it is not loaded whole"
        config = learner_config(model, dir=out, weights=schema.Weights(dtype="bfloat16"))
        policy = load_policy(config, world, (1,))
        held = {name: whole(parameter).clone() for name, parameter in policy.model.named_parameters()}
        export(policy, make_tokenizer(), config, world)
        if world.is_main:
            safetensors.torch.save_file(held, out / "loaded.safetensors")
        world.barrier()  # they leave together
    leave()
