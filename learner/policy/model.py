"""The policy and its frozen reference: transformers causal models, asked for log-probs of packed sequences only.

    built without memory ─► adapters ─► sharded ─► each rank reads its own rows ─► packing tried against the bare model

Masters are fp32; passes run under autocast where the setting says bfloat16. With more than one rank each decoder layer
and the rest are sharded (FSDP2); the policy's forward pass is the whole of what happens between gathering and freeing
parameters, so the head's log-probs are computed inside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.utils import swap_tensors

from learner.distributed import World
from learner.policy.attention import VARLEN, choose
from learner.policy.logprobs import Head, LogProbs, token_logprobs
from learner.policy.lora import inject_adapters
from learner.policy.packing import MicroBatch, Piece, Shape, pack
from learner.policy.pretrained import Weights, begin_model, read_config, unusable
from learner.policy.work import Effort
from streamrl.config import schema
from streamrl.errors import DataError
from streamrl.wire.fingerprint import fingerprint, stop_ids

_SELF_CHECK_TOLERANCE = 1e-3
_HOST = torch.device("cpu")


class Policy(nn.Module):
    """log pi of the trained tokens of a micro-batch."""

    def __init__(self, model: transformers.PreTrainedModel, *, head: Head, min_tokens: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self._head, self._min_tokens, self._dtype = head, min_tokens, dtype
        config = model.config.get_text_config()
        # A mask of ours would silently widen a sliding window.
        windowed = getattr(config, "sliding_window", None) or {"full_attention"} != set(_layer_types(config))
        self.effort = Effort.of(model)  # before anything is sharded
        self._varlen = model.config._attn_implementation == VARLEN
        self.shape = Shape(
            hidden_size=config.hidden_size,
            share_prompts=not windowed and not self._varlen,
            padded=not self._varlen,
        )

    def forward(self, batch: MicroBatch, *, raw: bool = False) -> LogProbs:
        """`raw`: as the bare model gives them, in fp32 throughout, at temperature 1 and with nothing banned."""
        dtype, head, min_tokens = (torch.float32, Head(), 0) if raw else (self._dtype, self._head, self._min_tokens)
        with torch.autocast(batch.input_ids.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            out = self.model.get_decoder()(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                attention_mask=batch.attention_mask() if self.shape.share_prompts else None,
                use_cache=False,
                **({"cu_seq_lens_q": batch.starts, "max_length_q": batch.longest} if self._varlen else {}),
            )
        hidden = out.last_hidden_state.flatten(0, 1)[batch.index]
        weight = self.model.get_output_embeddings().weight
        return token_logprobs(hidden, weight, batch.targets, batch.position < min_tokens, head)

    def plain(self, token_ids: torch.Tensor) -> torch.Tensor:  # [T] -> [T - 1]
        """What the bare model says of one sequence, without packing and without a head of ours."""
        logits = self.model(input_ids=token_ids[None], use_cache=False).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(1, token_ids[1:, None])[:, 0]


def _layer_types(config: transformers.PretrainedConfig) -> Sequence[str]:
    return getattr(config, "layer_types", None) or ["full_attention"]


def load_policy(config: schema.Config, world: World, end_ids: tuple[int, ...]) -> Policy:
    """The model to train, as the hub or the folder has it, with fp32 masters, or float64 ones."""
    attention = choose(config.model, world.device)
    model, weights = begin_model(config.model.path, attention=attention, device=world.device)
    if config.model.lora is not None:
        inject_adapters(model, config.model.lora, world.device)
    if config.model.dtype == "float64":
        _cast(model, torch.float64)
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = _fill(shard(make_policy(model, config, end_ids).train(), world), weights, world.device)
    check_packing(policy)
    return policy


def load_reference(config: schema.Config, world: World, end_ids: tuple[int, ...], *, on_host: bool = False) -> Policy:
    """The policy as it was before the run: always from `model.path`, so that resuming never moves it."""
    attention = choose(config.model, world.device)
    model, weights = begin_model(config.model.path, attention=attention, device=world.device)
    _cast(model.requires_grad_(False), getattr(torch, config.model.dtype))
    reference = shard(make_policy(model, config, end_ids), world, on_host=on_host)
    return _fill(reference, weights, _HOST if on_host else world.device)


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Its parameters, and not its buffers: rotations need their fp32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _fill(policy: Policy, weights: Weights, device: torch.device) -> Policy:
    """Memory for what this rank holds, and its values."""
    for parameter in policy.parameters():
        if parameter.is_meta:
            empty = torch.empty_like(parameter, device=device)
            swap_tensors(parameter, nn.Parameter(empty, requires_grad=parameter.requires_grad))
    weights.fill(policy.model)
    return policy


def make_policy(model: transformers.PreTrainedModel, config: schema.Config, end_ids: tuple[int, ...]) -> Policy:
    dtype = getattr(torch, config.model.dtype)
    head = Head(temperature=config.sampling.temperature, end_ids=end_ids, compute_dtype=dtype)
    return Policy(model, head=head, min_tokens=config.sampling.min_tokens, dtype=dtype)


def shard(policy: Policy, world: World, *, on_host: bool = False) -> Policy:
    """Over all ranks: each decoder layer by itself, then what is left (embeddings, last norm, head) with the policy.

    `on_host`: shards wait in the host's memory, and are on the device while their layer computes.
    """
    if world.size == 1 and not on_host:
        return policy
    mesh = world.mesh()
    offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if on_host else OffloadPolicy()
    blocks = set(policy.model._no_split_modules or ())
    for module in policy.model.modules():
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh, offload_policy=offload)
    fully_shard(policy, mesh=mesh, offload_policy=offload)
    register_fsdp_forward_method(policy, "plain")
    return policy


def _read_tokenizer(path: str) -> transformers.PreTrainedTokenizerBase:
    try:
        return transformers.AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise unusable(path, "give a tokenizer", error) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Speech:
    """What model and tokenizer must agree on with every worker."""

    tokenizer: transformers.PreTrainedTokenizerBase
    end_ids: tuple[int, ...]  # what ends a response, and is therefore banned before `min_tokens`
    vocabulary: int  # sizes of the model's output
    fingerprint: str


def read_speech(path: str) -> Speech:
    """Tokenizer and configuration, no weights."""
    config = read_config(path)
    tokenizer = _read_tokenizer(path)
    try:
        generation_eos = transformers.GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # a model need not bring one
        generation_eos = config.eos_token_id
    ends = stop_ids(tokenizer_eos=tokenizer.eos_token_id, generation_eos=generation_eos)
    if not ends:
        raise DataError(f"model.path {path!r} has no end token, so that no response could ever end by itself")
    return Speech(
        tokenizer=tokenizer,
        end_ids=ends,
        vocabulary=config.vocab_size,
        fingerprint=fingerprint(vocab=tokenizer.get_vocab(), stop_ids=ends, vocab_size=config.vocab_size),
    )


@contextmanager
def evaluating(policy: Policy) -> Iterator[None]:
    """Inside, forward passes without gradient or dropout; afterwards the policy is as it was.

    FSDP leaves the outermost parameters gathered after a forward pass, for the backward pass that here never comes.
    """
    policy.eval()
    with torch.no_grad():
        yield
    if isinstance(policy, FSDPModule):
        policy.reshard()
    policy.train()


def check_packing(policy: Policy) -> None:
    """Packed log-probs through our head must be the model's own; a model that does more to its logits is refused.

    Asked once, of a few sequences in one micro-batch, two of which have the same prompt; a collective.
    """
    vocabulary = policy.model.config.get_text_config().vocab_size
    ids = np.arange(1, 16, dtype=np.int32) * 7 % vocabulary
    pieces = [probe(ids[:9], sample=0), probe(ids[[0, *range(9, 15)]], sample=1), probe(ids[3:6], sample=2, group=1)]
    device = next(policy.parameters()).device
    with evaluating(policy):
        [batch] = pack(pieces, max_tokens=64, shape=policy.shape)
        ours = policy(batch.to(device), raw=True).logp.cpu()
        for piece in pieces:
            sequence = torch.from_numpy(np.concatenate([piece.prompt_ids, piece.token_ids])).long().to(device)
            truth = policy.plain(sequence).cpu()
            if not torch.allclose(ours[batch.sample == piece.sample], truth, atol=_SELF_CHECK_TOLERANCE):
                raise DataError(
                    f"model.path {policy.model.name_or_path!r}: {type(policy.model).__name__} changes its logits or "
                    "its attention in a way that packing does not support: its packed log-probs differ from its own"
                )


def probe(token_ids: npt.NDArray[np.int32], *, sample: int = 0, group: int = 0) -> Piece:
    """A piece that asks for the log-prob of every token but the first."""
    rest = token_ids[1:]
    return Piece(
        sample=sample,
        group=group,
        prompt_ids=token_ids[:1],
        token_ids=rest,
        logmu=np.zeros(len(rest), dtype=np.float32),
        mask=np.ones(len(rest), dtype=np.bool_),
    )
