"""Peak GPU memory of the learner's own code, computed without a GPU.

Policy, reference and AdamW consist of tensors without memory (FakeTensor), sharded over ranks that do not exist
(torch's fake process group). They run a step of two micro-batches, and live storages are added up. Attention is a
double that holds what flash attention holds, or the model's own where it has its own. Sharded experts get equally many
tokens on each rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from bench.memory_cases import Case, model_config
from streamrl.learner.loading.load import _checkpoint, fill, make_policy
from streamrl.learner.model.logprobs import CHUNK_ELEMENTS
from streamrl.learner.model.lora import place_adapters, without_adapters
from streamrl.learner.model.policy import Policy, evaluating
from streamrl.learner.packing.attention import EAGER, VARLEN
from streamrl.learner.packing.micro_batches import MicroBatch
from streamrl.learner.packing.ways import Way, attention_of
from streamrl.learner.parallel.experts import Divided, GroupExchange, experts_of
from streamrl.learner.parallel.fsdp import shard
from streamrl.learner.process.ranks import World

_AS_FLASH = "streamrl_held"


class Even(GroupExchange):
    """An exchange where every rank sends equally many tokens to each other, since FakeTensors have no values."""

    def __init__(self, group: dist.ProcessGroup, *, rows: int) -> None:
        super().__init__(group)
        self._each = [rows // group.size()] * group.size()

    def counts(self, given: torch.Tensor) -> tuple[torch.Tensor, Sequence[int], Sequence[int]]:
        return given, self._each, self._each


def tell_evenly(model: nn.Module, *, rows: int) -> None:
    """Use `Even` for all sharded experts. `rows`: routed tokens per rank."""
    for _, module in experts_of(model):
        divided: Divided | None = vars(module).get("divided")
        if divided is not None:
            assert isinstance(divided.exchange, GroupExchange)
            vars(module)["divided"] = replace(divided, exchange=Even(divided.exchange.group, rows=rows))


class _AsFlash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    """Replace the kernel that `ways.attend` calls."""
    parts = (x.to(torch.bfloat16).transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out: torch.Tensor = _AsFlash.apply(*parts)  # type: ignore[no-untyped-call]
    return out.view(query.shape[0], query.shape[2], query.shape[1], query.shape[3]), None


def run(case: Case) -> dict[str, int]:
    """Return the peak bytes of each phase."""
    if case.ranks > 1:  # one rank does not communicate
        dist.init_process_group("fake", rank=0, world_size=case.ranks, store=FakeStore())
    world = World(rank=0, size=case.ranks, device=torch.device("cpu")).under(case.config.learner.layout)
    transformers.AttentionInterface.register(_AS_FLASH, attend)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        policy = _policy(case, world, trains=True)
        frozen = _reference(case, policy, world)
        # Local shards only: for whole parameters, DTensor first runs each operation at full size to find its shape.
        trained = {p: nn.Parameter(_mine(p.detach())) for p in policy.parameters() if p.requires_grad}
        optimizer = torch.optim.AdamW(trained.values(), lr=1e-6, fused=True)
        batch = _batch(case)
        held = Held(mode, [*policy.parameters(), *policy.buffers(), *(frozen.parameters() if frozen else ())])
        with held:
            _make_moments(trained.values(), optimizer)
            if frozen is not None:
                with held.phase("reference"), evaluating(frozen), without_adapters(frozen):
                    frozen(batch)
            for _ in range(2):  # the second has the first one's gradients in memory
                with held.phase("forward"):
                    logp = policy(batch).logp
                with held.phase("backward"):
                    logp.sum().backward()
                del logp
            for whole, part in trained.items():
                assert whole.grad is not None
                part.grad, whole.grad = _mine(whole.grad), None
            with held.phase("step"):
                optimizer.step()
                optimizer.zero_grad()
    return held.peaks


def _reference(case: Case, policy: Policy, world: World) -> Policy | None:
    if not case.reference:
        return None
    return policy if case.config.model.lora else _policy(case, world, trains=False)


def _make_moments(trained: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    for part in trained:
        part.grad = torch.empty_like(part)
    optimizer.step()
    optimizer.zero_grad()


def _mine(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Held(TorchDispatchMode):
    """Adds up the bytes of live storages, and their peak in each phase."""

    def __init__(self, mode: FakeTensorMode, there: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._mode = mode
        self._now, self._most, self._sizes = 0, 0, dict[int, int]()
        self.peaks: dict[str, int] = {}
        for tensor in there:
            self._see(_mine(tensor))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._most = self._now
        with self._watching_resizes():
            yield
        self.peaks[name] = max(self._most, self.peaks.get(name, 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local parts are dispatched next
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            # DTensor's shape propagation at full size, under its own mode, uses no memory.
            if isinstance(tensor, FakeTensor) and tensor.fake_mode is self._mode:
                self._see(tensor)
        return out

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._set, key, None)
        self._set(key, storage.nbytes())

    def _set(self, key: int, num_bytes: int | None) -> None:
        self._now += (num_bytes or 0) - self._sizes.get(key, 0)
        self._most = max(self._most, self._now)
        if num_bytes is None:
            self._sizes.pop(key, None)
        else:
            self._sizes[key] = num_bytes

    @contextmanager
    def _watching_resizes(self) -> Iterator[None]:
        """Track FSDP's gathers, which resize storages without any operator."""
        resize: Callable[[torch.UntypedStorage, int], Any] = torch.UntypedStorage.resize_

        def resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
            resize(storage, size)
            if storage._cdata in self._sizes:
                self._set(storage._cdata, storage.nbytes())

        torch.UntypedStorage.resize_ = resize_and_tell  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]


def _policy(case: Case, world: World, *, trains: bool) -> Policy:
    config, about = case.config, model_config(case.size, case.layers)
    attention = EAGER if attention_of(about, VARLEN) == EAGER else _AS_FLASH
    with unset_fake_temporarily():  # rank numbers are read as values
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                about, dtype=torch.float32, attn_implementation=attention
            )
            if trains and config.model.lora is not None:
                place_adapters(model, config.model.lora)
        if trains and config.model.gradient_checkpointing:
            _checkpoint(model, is_wished=True)
        for parameter in model.parameters():
            if not parameter.requires_grad or not trains:
                parameter.requires_grad_(False).data = parameter.data.to(torch.bfloat16)
        policy = shard(make_policy(model, config, (1,), world).train(trains), world, in_half=trains)
    if world.size == 1 and not trains:  # not sharded
        _materialise(policy.model)
    for module in model.modules():
        module._buffers.update({name: torch.empty(b.shape, dtype=b.dtype) for name, b in module._buffers.items()})
    fill(policy, {}, torch.device("cpu"))
    if case.experts > 1:
        tell_evenly(model, rows=case.tokens // case.context * about.num_experts_per_tok)
    # As on a GPU.
    way = Way(layout="shared" if attention == EAGER else "packed", attention=attention)
    policy.take(way, replace(policy.head, chunk_elements=CHUNK_ELEMENTS["cuda"]))
    return policy


def _materialise(model: nn.Module) -> None:
    """Replace meta parameters by parameters without values; tied weights stay one parameter."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None:
                empty = torch.empty(old.shape, dtype=old.dtype)
                module._parameters[name] = made.setdefault(id(old), nn.Parameter(empty, old.requires_grad))


def _batch(case: Case) -> MicroBatch:
    tokens = case.tokens
    rows = tokens // case.length, case.length

    def whole(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    return MicroBatch(
        input_ids=whole(*rows),
        position_ids=whole(*rows),
        is_token=torch.ones(rows, dtype=torch.bool),
        until=whole(*rows),
        index=whole(tokens),
        targets=whole(tokens),
        position=whole(tokens),
        in_turn=whole(tokens),
        behaviour_logprobs=torch.zeros(tokens),
        sample=whole(tokens),
        starts=torch.zeros(2, dtype=torch.int32),
        longest=case.length,
        own_tokens=None if case.context == 1 else whole(tokens // case.context),
    )
