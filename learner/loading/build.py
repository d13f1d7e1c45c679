"""Builds and loads transformers models.

    are the rules from files to parameters known (`converted`), including stacked experts and four-bit weights?
        yes    built on `meta`, without memory; once it is sharded, each rank reads its own rows (`sources`)
        no     loaded whole on each rank by transformers, if the machine has enough memory

Buffers that the files lack, such as rotary frequencies, are computed on the host either way, so that both ways give the
same bits. Blocks on the disk, and on the hub if the model is not here yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, suppress
from typing import Any

import structlog
import torch
import transformers
from safetensors import SafetensorError
from torch import nn

from streamrl.config.routers import keep_biases
from streamrl.errors import DataError, ResourceError
from streamrl.host import available_memory
from streamrl.learner.loading.converted import UNPACKED, Unlike, quantised_as, sources_of
from streamrl.learner.loading.sources import Files, Sources, read_rows
from streamrl.learner.packing.attention import MASKED
from streamrl.learner.packing.ways import attention_of
from streamrl.learner.process.ranks import World
from streamrl.terminal import size

# What transformers raises for a model that is incomplete, unknown, or needs a package that is not installed.
_UNLOADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError, SafetensorError)
_LOADED = "be loaded as a causal language model"
_HEAD = "lm_head.weight"

log = structlog.get_logger(__name__)


def begin_model(path: str, *, attention: str, world: World) -> tuple[transformers.PreTrainedModel, Sources]:
    """The model on `meta` with the sources of its weights; or whole on the host, with no sources.

    FSDP moves a layer to the device when it shards it, so the device never holds the whole; `load.fill` moves a model
    that stays whole. Read in torch's sources: no GPU has run this.
    """
    model = build_model(path, attention)
    try:
        sources, buffers = sources_of(model, path)
    except (OSError, SafetensorError, Unlike) as reason:
        refuse_whole(model, path, reason, ranks_here=world.local_size, room=available_memory())
        model, sources, buffers = load_model(path, attention=attention), {}, {}
    with Files() as files:
        for name, source in buffers.items():
            read_rows(source, model.get_buffer(name), files)
    _move_buffers(model, lambda buffer: buffer.to(world.device))
    return model, sources


def refuse_whole(
    model: transformers.PreTrainedModel, path: str, reason: Exception, *, ranks_here: int, room: int
) -> None:
    """Raise ResourceError if this machine lacks memory for all its ranks to load the whole model."""
    each = 4 * sum(parameter.numel() for parameter in model.parameters())
    log.info("weights are loaded whole", model=path, reason=str(reason), each_rank=size(each), ranks_here=ranks_here)
    if each * ranks_here > room:
        raise ResourceError(
            f"model.path {path!r}: each rank loads the whole model, {size(each)} in fp32, because {reason}; the "
            f"{ranks_here} ranks here need {size(each * ranks_here)} of this machine's memory, but {size(room)} are "
            "free; use a copy of the model in bfloat16 safetensors, which is read shard by shard, or start fewer ranks "
            "on each host (learner.processes)"
        )


def build_model(path: str, attention: str) -> transformers.PreTrainedModel:
    """The model with parameters on `meta`, and computed buffers on the host."""
    config = _to_train(path)
    with usable(path, _LOADED, _UNLOADABLE), torch.device("meta"):
        model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention_of(config, attention)
        )
    keep_biases(model)
    _move_buffers(model, lambda buffer: torch.empty_like(buffer, device="cpu"))
    model.initialize_weights()  # only of what has memory by now
    with suppress(OSError):  # optional
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    return model


def _move_buffers(model: nn.Module, move: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for name, buffer in list(model.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, move(buffer))


def load_model(path: str, *, attention: str = MASKED) -> transformers.PreTrainedModel:
    """The whole model, on the host, in fp32."""
    config = _to_train(path)
    with usable(path, _LOADED, _UNLOADABLE):
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=torch.float32,
            attn_implementation=attention_of(config, attention),
            output_loading_info=True,
        )
    model: transformers.PreTrainedModel = loaded[0]
    _refuse_incomplete(model, path, loaded[1]["missing_keys"])
    keep_biases(model)
    return model


def _refuse_incomplete(model: transformers.PreTrainedModel, path: str, missing: Set[str]) -> None:
    """Raise DataError for what transformers only warns about: it draws missing parameters at random, and unties a head
    from the embedding if the files hold both. `missing`: what the files lack, and nothing is tied to."""
    lacking = missing & {name for name, _ in model.named_parameters(remove_duplicate=False)}  # buffers are computed
    if lacking == {_HEAD}:
        raise DataError(
            f"model.path {path!r}: its files hold no {_HEAD}; if its embedding is its head, set tie_word_embeddings: "
            "true in its config.json"
        )
    if lacking:
        raise DataError(
            f"model.path {path!r}: its files hold no {min(lacking)}, and lack {len(lacking)} parameters in all; write "
            "them again, under the names that transformers' save_pretrained gives them"
        )
    untied = model.get_expanded_tied_weights_keys(all_submodels=True).keys() - model.all_tied_weights_keys.keys()
    if untied:
        raise DataError(
            f"model.path {path!r}: its files hold {min(untied)}, which its config.json ties to another parameter; set "
            "tie_word_embeddings: false there"
        )


def _to_train(path: str) -> transformers.PretrainedConfig:
    """The model's configuration, without dropout and other training noise, which would make pi differ from what the
    engine sampled from; DataError if its weights are quantised in a way that is not undone here."""
    config = _read(path)
    if (method := quantised_as(config)) not in (None, UNPACKED):
        raise DataError(
            f"model.path {path!r} is quantised ({method}), which is not undone here: use the release of the model in "
            "bfloat16, from which it was made"
        )
    marks = ("dropout", "pdrop", "layerdrop", "dropout_prob", "jitter_noise")
    text = config.get_text_config()
    for name, value in text.to_dict().items():
        if isinstance(value, float) and name.endswith(marks):
            setattr(text, name, 0.0)
    return config


def read_config(path: str) -> transformers.PretrainedConfig:
    text: transformers.PretrainedConfig = _read(path).get_text_config()
    return text


def _read(path: str) -> transformers.PretrainedConfig:
    with usable(path, "be read", (OSError, ValueError)):
        config: transformers.PretrainedConfig = transformers.AutoConfig.from_pretrained(path)
    return config


@contextmanager
def usable(path: str, what: str, errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """Raise DataError if one of these errors shows that the model cannot do this."""
    try:
        yield
    except errors as error:
        reason = (str(error).splitlines() or [repr(error)])[0]
        raise DataError(f"model.path {path!r} cannot {what}: {reason}") from error
