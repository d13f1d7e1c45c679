"""What is said of kernels that only GPUs have, on vLLM's own classes, without their weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

# Imports of vLLM are in the tests: torch's own modules warn as it imports them.
pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries; ours are watched by every other test


def bare(kind: type, **attributes: Any) -> Any:
    """An object of a class, abstract or not, without its constructor."""
    concrete: Any = type(kind.__name__, (kind,), {})
    concrete.__abstractmethods__ = frozenset()
    made = object.__new__(concrete)
    vars(made).update(attributes)
    return made


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_kernels_of_quantised_experts_outlive_a_reload_where_graphs_point_into_them(device: str) -> None:
    from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase

    from streamrl.workers.engines.vllm.loading.experts import keeping_kernels

    method = bare(OnlineMoEMethodBase, moe_kernel="captured", moe_quant_config="of the parameters")
    experts = nn.Module()
    experts.quant_method = method  # type: ignore[assignment]
    with keeping_kernels(nn.ModuleList([nn.Linear(1, 1), experts]), torch.device(device)):
        method.moe_kernel, method.moe_quant_config = "new", "of what was loaded aside"
    kept = ("captured", "of the parameters") if device == "cuda" else ("new", "of what was loaded aside")
    assert (method.moe_kernel, method.moe_quant_config) == kept


@pytest.mark.parametrize(
    ("name", "sinks", "derives"),
    [("FlashInferImpl", None, False), ("FlashInferImpl", torch.ones(1), True), ("Another", None, True)],
)
def test_a_kernel_that_only_casts_its_sinks_derives_nothing_without_them(
    name: str, sinks: torch.Tensor | None, derives: bool
) -> None:
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import AttentionImplBase

    from streamrl.workers.engines.vllm.loading.places import NoPlace, _refuse_derived_weights

    kind = type(name, (AttentionImplBase,), {"process_weights_after_loading": lambda self, act_dtype: None})
    attention: Any = Attention.__new__(Attention)
    nn.Module.__init__(attention)
    attention.impl = bare(kind, _sinks_source=sinks)
    if not derives:
        _refuse_derived_weights(nn.ModuleList([attention]))
        return
    with pytest.raises(NoPlace, match="derives further weights"):
        _refuse_derived_weights(nn.ModuleList([attention]))


def test_of_what_a_kernel_keeps_in_its_own_form_nothing_is_loaded_aside() -> None:
    from streamrl.workers.proofs.read_back import _Reader

    experts = nn.Module()
    experts.quant_method = SimpleNamespace()  # type: ignore[assignment]
    reader = _Reader(columns=None)  # type: ignore[arg-type]
    reader.read("layer", experts, {"w13_weight": [((), {})], "w2_weight": [((), {})]})  # no loader could be called so
    assert (reader.unreadable, reader.num_read) == (["layer.w13_weight", "layer.w2_weight"], 0)
