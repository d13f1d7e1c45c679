"""A rank's peak GPU memory in a step: a closed form, in bytes, before any weights are loaded.

    always     per trained weight masters 4, gradients 4 and moments 8; a frozen base 2, a reference 2: all sharded.
               Of masters on the host: nothing, but with replicas the gradients, which wait for the last micro-batch
    kept       by all layers for the backward pass: only inputs, with checkpointing; of two layers, if they are
               offloaded to the host

    and the most of    a layer     what it keeps, recomputed, and its temporaries (`activations`); its weights and the
                                   previous layer's in bf16; their gradients in bf16 and fp32
                       the head    logits of a chunk, its gradient in bf16 and fp32
                       the end     gradients of the outermost weights, in both, when nothing is kept any more

The outermost weights (embeddings, head) are gathered throughout, except at the end. Divided experts are gathered and
reduced separately: a rank has only its own. So are shared layers; they also need columns exchanged for rows, which are
kept for the backward pass unless the layer is recomputed. Fused AdamW needs no memory of its own.

A teacher's pass comes first, when nothing is kept yet: its shard always, and temporarily two of its layers, the
activations of one, and the logits of a chunk.

The arithmetic is that of Llama and Qwen layers, and of their mixtures, in bf16 with flash attention; for others it is a
guess. Compared with the learner's own code on tensors without memory (`python -m bench memory`), it was off by 5 % at
most, and by 7 % for undivided experts. On an H200, one rank of dense models took 1 to 3 % more or less; on an H100 4 %
less, since what compiles the head's passes holds less of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from streamrl.config import schema
from streamrl.errors import ResourceError
from streamrl.learner.model.logprobs import CHUNK_ELEMENTS
from streamrl.learner.planning import activations
from streamrl.learner.planning.activations import Part
from streamrl.learner.planning.sizes import Sizes
from streamrl.recipe.algorithms import make_algorithm
from streamrl.terminal import size

REMEDY = (
    "lower training.micro_batch_tokens, and sampling.max_tokens if a single sample may be longer than that, keep "
    "model.gradient_checkpointing at auto, set model.reference, model.masters, model.activations or teacher.place to "
    "cpu, train adapters (model.lora), keep fewer copies (learner.layout.replicas), share samples, layers or a "
    "mixture's experts among more ranks (learner.layout), or take more GPUs (learner.processes, `learn --nodes`)"
)
# Headroom: guesses. An H200 was compared with the tensors alone.
_CONTEXT = 700_000_000  # the CUDA context, with loaded kernels
_WORKSPACES = 300_000_000  # of cuBLAS and flash attention
_NCCL = 500_000_000  # its buffers; a single rank has a group too
_FRAGMENTS = 0.05  # share of the allocator's blocks lost to fragmentation
_UNEVEN = 0.5  # divided experts: how many more tokens a rank may get than the mean
_CHUNK_THERE, _CHUNK_BACK = 10, 8  # per element of the head's logits, with its exponential and its bf16


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one rank."""

    always: int
    kept: int  # by all layers for the backward pass
    in_layer: int  # peak beyond these two, in a layer's backward pass
    in_head: int
    at_end: int  # beyond `always` alone, when nothing is kept any more
    teaching: int = 0  # of a teacher's pass, beyond `always` alone
    uneven: int = 0  # extra for a layer if experts get uneven numbers of tokens

    @property
    def peak(self) -> int:
        """Peak of the tensors alone."""
        return self.always + max(self.kept + max(self.in_layer, self.in_head), self.at_end, self.teaching)

    @property
    def needed(self) -> int:
        """Need of the GPU, with headroom."""
        uneven = replace(self, in_layer=self.in_layer + self.uneven)
        return int(uneven.peak * (1 + _FRAGMENTS)) + _CONTEXT + _WORKSPACES + _NCCL


def refuse_too_large(
    sizes: Sizes, config: schema.Config, *, ranks: int, room: int, teacher: Sizes | None = None
) -> None:
    """Raise ResourceError if tensors alone exceed this room on a GPU."""
    needed = plan(sizes, config, ranks=ranks, teacher=teacher).peak
    if needed > room:
        problem = f"a rank needs {size(needed)} of its GPU at its peak (calculated), but {size(room)} are available"
        raise ResourceError(f"{problem}: {REMEDY}")


def plan(
    sizes: Sizes,
    config: schema.Config,
    *,
    ranks: int | None = None,
    teacher: Sizes | None = None,
    tokens: int | None = None,
    longest: int | None = None,
) -> MemoryEstimate:
    """Plan a rank's memory on GPUs, with recomputed layers unless the configuration turns that off, and with compiled
    ones only if it demands that: `auto` as the one that takes less, and the one that takes more.

    `ranks` on all hosts; by default those of one. `teacher`: one loaded beside the policy. `tokens` per micro-batch and
    `longest` sample default to the configuration's; a sample longer than a micro-batch makes one of its own.
    """
    layout = config.learner.layout
    ranks = max(1, (ranks or config.learner.processes) // layout.replicas)  # sharing one model
    longest = longest or config.data.max_prompt_tokens + config.max_response_tokens
    part = Part.of(layout, tokens=tokens or max(longest, config.training.micro_batch_tokens), longest=longest)
    is_lora = config.model.lora is not None
    weights = _of_masters(sizes, config) + (2 * (sizes.trained + sizes.frozen) if keeps_reference(config) else 0)
    if teacher is not None and config.teacher is not None and config.teacher.place == "device":
        weights += 2 * (teacher.trained + teacher.frozen)
    own = sizes.divided(layout.tensor)
    of_layer = activations.of_layer(own, part, is_compiled=config.model.compile is True)
    again = computes_again(config)
    columns = 0 if layout.tensor == 1 else 2 * own.width * (own.queries + own.mlp)
    outermost = 2 * sizes.outermost + activations.masks(sizes, part)
    return MemoryEstimate(
        always=weights // ranks,
        kept=_inputs(sizes, config) * part.tokens * 2 * sizes.width
        + (0 if again else sizes.layers * (of_layer + columns)),
        in_layer=outermost + _in_a_layer(own, part, ranks, is_lora=is_lora) + (of_layer if again else 0) + 2 * columns,
        in_head=outermost + _in_the_head(sizes, part.tokens, is_lora=is_lora),
        at_end=0 if is_lora else (2 + 4) * sizes.outermost + 4 * sizes.outermost // ranks,
        teaching=0 if teacher is None else _of_a_teacher(teacher, part, ranks),
        uneven=int(_UNEVEN * activations.of_experts(own, part)),
    )


def _of_masters(sizes: Sizes, config: schema.Config) -> int:
    """Bytes of masters, gradients, moments and a frozen base, over all ranks that share a model.

    FSDP offloads a gradient once replicas have added it up, at the last micro-batch; until then it is on the device in
    fp32. Read in torch's sources: no GPU has run this.
    """
    if config.model.masters == "device":
        return 16 * sizes.trained + 2 * sizes.frozen
    return 4 * sizes.trained if config.learner.layout.replicas > 1 else 0


def computes_again(config: schema.Config) -> bool:
    """Whether layers keep only their input, on a GPU."""
    return bool(config.model.gradient_checkpointing)  # or `auto`


def _inputs(sizes: Sizes, config: schema.Config) -> int:
    """Number of layers whose inputs are on the device."""
    wait_on_host = computes_again(config) and config.model.activations == "cpu"
    return min(2, sizes.layers) if wait_on_host else sizes.layers


def keeps_reference(config: schema.Config) -> bool:
    """Whether a reference is kept on the device beside the policy."""
    is_separate = config.model.lora is None and config.model.reference == "device"
    return is_separate and make_algorithm(config.algorithm).needs_reference


def _in_a_layer(sizes: Sizes, part: Part, ranks: int, *, is_lora: bool) -> int:
    """Bytes at work in a layer's backward pass, while the head's gradient waits for the embeddings'."""
    experts = 0 if sizes.experts is None or part.experts == 1 else sizes.experts.weights
    gathered = 2 if ranks == 1 else 4  # bytes per weight: of this layer, and of the previous one
    of_gradients = 0 if is_lora else 2 + 4 + 4 // ranks
    weights = (gathered + of_gradients) * (sizes.layer - experts)
    weights += (2 + (0 if is_lora else 4)) * (experts // part.experts)  # gathered and reduced separately
    return activations.at_work(sizes, part) + weights + (0 if is_lora else 2 * sizes.head)


def _in_the_head(sizes: Sizes, tokens: int, *, is_lora: bool) -> int:
    """Bytes in the head's backward pass, with its gradient in both dtypes; or in its forward pass, without."""
    back = 0 if is_lora else (4 + 2) * sizes.head + _CHUNK_BACK * CHUNK_ELEMENTS["cuda"]
    return 6 * tokens * sizes.width + max(back, _CHUNK_THERE * CHUNK_ELEMENTS["cuda"])


def _of_a_teacher(sizes: Sizes, part: Part, ranks: int) -> int:
    """Bytes of one forward pass, which keeps nothing."""
    gathered = 2 * (sizes.outermost + (1 if ranks == 1 else 2) * sizes.layer)
    at_most = max(activations.of_layer(sizes, part), _CHUNK_THERE * CHUNK_ELEMENTS["cuda"])
    return gathered + at_most + 4 * part.tokens * sizes.width
