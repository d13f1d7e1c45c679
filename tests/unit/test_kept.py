"""What the files of a model hold that is not trained, biases of routers: published, and in whatever serves a version.

In transformers some families have them as buffers and some as parameters, of the router or of a module around it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from transformers.initialization import no_init_weights

from streamrl.config import schema
from streamrl.errors import WeightsError
from streamrl.learner.checkpoints.export import write_weights
from streamrl.learner.loading.load import cast, load_policy, load_reference
from streamrl.learner.process.ranks import World
from streamrl.protocol.weights.mirror import Mirror
from streamrl.workers.engines.hf_model import build_model, load_weights, published, token_logprobs
from streamrl.workers.engines.model import read_model
from streamrl.workers.proofs.reference import Reference
from tests.learner_cases import learner_config
from tests.publish_world import Scene, publish
from tests.tiny_families import make_family

BIASES = {
    "afmoe": "model.layers.1.mlp.expert_bias",  # a parameter
    "ernie4_5_moe": "model.layers.1.mlp.gate.moe_statics.e_score_correction_bias",  # a parameter, [1, E]
    "glm4_moe": "model.layers.1.mlp.gate.e_score_correction_bias",
    "hy_v3": "model.layers.1.mlp.e_score_correction_bias",
    "laguna": "model.layers.1.mlp.gate.e_score_correction_bias",  # a parameter
    "lfm2_moe": "model.layers.1.feed_forward.expert_bias",
    "minimax_m2": "model.layers.1.mlp.e_score_correction_bias",
}
IDS = list(range(3, 40))
ALONE = World(rank=0, size=1, device=torch.device("cpu"))

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of transformers' older families
    pytest.mark.usefixtures("quiet_transformers"),
]


@pytest.mark.parametrize("family", BIASES)
@pytest.mark.parametrize("lora", [None, schema.Lora(rank=2, targets=("q_proj",))], ids=["whole", "adapters"])
def test_each_version_has_them_in_full_precision(tmp_path: Path, family: str, lora: schema.Lora | None) -> None:
    scene = Scene(tmp_path, family=family, lora=lora, dtype="bfloat16", anchor_every=2)
    for step in range(3):
        publish(scene.publisher, step)
        scene.train()
    held = dict(scene.policy.model.named_buffers())
    [name] = [name for name in held if name.endswith(BIASES[family])]
    assert not torch.equal(held[name], held[name].bfloat16().float())
    for manifest in scene.stream.manifests:
        [bias] = [tensor for tensor in manifest.tensors if tensor.name == BIASES[family]]
        assert (bias.dtype, bias.shape) == ("float32", tuple(held[name].shape))
    if lora is None:
        assert torch.equal(scene.served(tmp_path / "mirror")[BIASES[family]], held[name])


@pytest.mark.parametrize("family", BIASES)
def test_a_policy_that_computes_in_bfloat16_has_them_as_the_files_do(tmp_path: Path, family: str) -> None:
    folder = make_family(tmp_path / "model", family)
    config = learner_config(folder, model=schema.Model(path=str(folder), dtype="bfloat16"))
    stored = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    policy = load_policy(config, ALONE, ())
    for model in (policy.model, load_reference(config, ALONE, (), like=policy).model):
        assert torch.equal(model.get_buffer(BIASES[family]), stored[BIASES[family]])


@pytest.mark.parametrize("family", BIASES)
def test_training_leaves_them_as_they_are(tmp_path: Path, family: str) -> None:
    """Whatever a pass computes, forward and backward."""
    scene = Scene(tmp_path, family=family)
    before = {name: buffer.clone() for name, buffer in scene.policy.model.named_buffers()}
    ids = torch.tensor([IDS])
    scene.policy.model.train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert all(torch.equal(buffer, before[name]) for name, buffer in scene.policy.model.named_buffers())


@pytest.mark.parametrize("family", BIASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_transformers_engine_and_the_reference_compute_with_them(tmp_path: Path, family: str, dtype: str) -> None:
    bias = BIASES[family]
    scene = Scene(tmp_path, family=family, dtype=dtype)
    publish(scene.publisher, 0)
    mirror = Mirror(tmp_path / "mirror")
    mirror.apply(scene.stream.manifests[-1], scene.store)
    facts = read_model(str(tmp_path / "model"), trust_remote_code=False)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=getattr(torch, dtype))
    # Some families keep more than that, and some less.
    cast(plain, getattr(torch, dtype))
    plain.state_dict(keep_vars=True)[bias].data = scene.policy.model.get_buffer(bias)

    model = build_model(facts, dtype=getattr(torch, dtype), within=no_init_weights())
    tensors = safetensors.torch.load_file(mirror.path)
    load_weights(model, tensors)
    assert published(model)[bias].dtype == torch.float32
    found, expected = (np.asarray(token_logprobs(one, IDS)) for one in (model, plain.eval()))
    assert np.abs(found - expected).max() < 1e-6
    judged = Reference(facts, dtype=dtype).judge(mirror.path, IDS)
    assert np.abs(judged.truth - expected).mean() <= judged.rounding + 1e-5

    without = {name: tensor for name, tensor in tensors.items() if name != bias}
    with pytest.raises(WeightsError, match=bias):
        load_weights(model, without)


def test_a_checkpoint_that_is_asked_by_itself_has_them(tmp_path: Path) -> None:
    folder = make_family(tmp_path / "model", "glm4_moe")
    scene = Scene(tmp_path / "run", family="glm4_moe")
    config = scene.config.model_copy(update={"model": schema.Model(path=str(folder))})
    write_weights(config, tmp_path / "weights.safetensors", checkpoint=None)
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    bias = BIASES["glm4_moe"]
    assert torch.equal(safetensors.torch.load_file(tmp_path / "weights.safetensors")[bias], stored[bias])
