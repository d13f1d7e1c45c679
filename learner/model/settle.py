"""Chooses how the model is called, by a trial at start that compares packed results with single sequences.

    head      ours is tried on hidden states of all magnitudes; if logits differ, they are left to the model
    layout    the fastest way whose hidden states and log-probs match the model's own, with gradients off and in
              training mode; also with narrowed attention windows, so that a few tokens reach beyond them

`learner.packing.ways` decides what a few tokens cannot show. Everything here is collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import structlog
import torch
import transformers
from torch.distributed.fsdp import FSDPModule

from streamrl.errors import DataError
from streamrl.learner.model.logits import Head
from streamrl.learner.model.policy import Policy, Seen, evaluating
from streamrl.learner.packing.attention import EAGER, MASKED, VARLEN
from streamrl.learner.packing.micro_batches import Piece
from streamrl.learner.packing.pack import pack
from streamrl.learner.packing.ways import Way, has_window, layer_types, unpackable
from streamrl.learner.process.ranks import World

_LOGP_TOLERANCE = 1e-3
_HIDDEN_TOLERANCE = 1e-3  # relative to a hidden state's norm, so that models with small weights are tested too
_NARROW = 3  # tokens
# Names that model families use for the factor or divisor of their logits, and for their cap.
_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "logits_mup_width_multiplier")
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")

log = structlog.get_logger(__name__)


def settle(policy: Policy, world: World, *, wished: str = MASKED) -> None:
    """Take the fastest way that is correct; DataError if none is. `wished`: the preferred attention."""
    with evaluating(policy), _without_tf32():
        trial = _Trial(policy, world)
        head = trial.find_head()
        ways = [way for way in policy.ways if head is not None or way.own_logits]
        taken, errors = None, []
        for way in ways:
            if trial.is_right(way, head or policy.head):
                taken = way
                break
            errors.append(trial.error)  # "" where it computed other log-probs
        if taken is None and policy.split is not None:
            raise policy.split.refusal(policy.model, "its log-probs change")
        if taken is None and errors and all(errors):
            raise trial.refusal(f"its log-probs cannot be computed ({errors[-1]})")
        if taken is None:
            raise trial.refusal(
                "its log-probs of a sequence depend on what comes after it; model.path must be a causal language model"
            )
        if not trial.is_right(taken, policy.head, while_training=True):
            raise trial.refusal("its log-probs differ in training mode; turn noise and dropout off in its config.json")
    if world.is_main:
        _log_choice(policy, wished)


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Multiply fp32 matrices in full fp32 inside the block. TF32 rounding is as large as the trial's tolerances, and
    some containers enable it (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1): a correct model would be refused."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _log_choice(policy: Policy, wished: str) -> None:
    """Log which part of the fastest way is unavailable."""
    about = {"model": policy.model.name_or_path, "kind": type(policy.model).__name__, "way": str(policy.way)}
    if policy.shape.alone:
        reason = ", ".join(unpackable(policy.model.config)[:3]) or "packed log-probs differ from its own"
        log.warning("sequences are not packed: correct, but slower", reason=reason, **about)
    elif wished == VARLEN and policy.way.attention != VARLEN:
        log.warning("attention uses a mask: the model does not support varlen", **about)


class _Trial:
    """Compares one model's results for a few sequences, two of which share a prompt, with ours."""

    def __init__(self, policy: Policy, world: World) -> None:
        self._policy, self._world = policy, world
        self.error = ""  # which the model raised here when it was last called, if it did
        self._pieces = _pieces(policy.model.config.get_text_config().vocab_size)
        self._device = world.device
        self._truth: dict[bool, list[Seen]] = {}
        for narrow in (False, True) if has_window(policy.model.config) else (False,):
            if not self._all_ranks(partial(self._run_plain, narrow)):
                raise self.refusal(f"it cannot compute logits from token ids alone ({self.error})")

    def refusal(self, why: str) -> DataError:
        model = self._policy.model
        return DataError(f"model.path {model.name_or_path!r}: {type(model).__name__} cannot be trained: {why}")

    def find_head(self) -> Head | None:
        """The head that matches the model's logits; None if ours cannot express them."""
        ids = _token_ids(self._pieces[0], self._device)
        heads = _heads(self._policy.model.config, self._policy.head)
        return next((head for head in heads if self._all_ranks(partial(self._policy.head_fits, ids, head))), None)

    def is_right(self, way: Way, head: Head, *, while_training: bool = False) -> bool:
        self._policy.take(way, head)
        narrowings = [narrow for narrow in self._truth if not (narrow and way.layout == "rows")]
        kinds = layer_types(self._policy.model.config) or ("sliding_attention",)
        bites = "sliding_attention" in kinds and True in narrowings
        if bites and not self._all_ranks(lambda: not _alike(self._truth[True], self._truth[False])):
            return False  # the model keeps its window in a place unknown to us
        self._policy.train(while_training)
        right = all(self._all_ranks(partial(self._same, narrow)) for narrow in narrowings)
        self._policy.eval()
        return right

    def _run_plain(self, narrow: bool) -> bool:
        # Eager: other attention implementations silently skip a model's unusual treatment of scores.
        self._policy.take(Way(layout="rows", attention=EAGER), self._policy.head)
        with _narrowed(self._policy.model) if narrow else nullcontext():
            self._truth[narrow] = [self._policy.plain(_token_ids(piece, self._device)) for piece in self._pieces]
        return True

    def _same(self, narrow: bool) -> bool:
        """Compare on every rank; each makes the same passes whatever it finds, since they are collective."""
        policy, found, finite = self._policy, {}, True
        with _narrowed(policy.model) if narrow else nullcontext():
            for batch in pack(self._pieces, max_tokens=64, shape=policy.shape):
                on_device = batch.to(self._device)
                finite &= bool(policy(on_device).logp.isfinite().all())  # low-precision kernels may support less
                with policy.watching() as passes:
                    logp = policy(on_device, raw=True).logp
                split = policy.split
                hidden = (passes[0] if split is None else split.joined_rows(passes[0])).flatten(0, 1)
                for sample in batch.sample.unique().tolist():
                    own = on_device.sample == sample
                    found[sample] = Seen(
                        logp=logp[own], hidden=hidden[on_device.index[own]] if hidden.numel() else hidden
                    )
        return finite and _alike([found[piece.sample] for piece in self._pieces], self._truth[narrow])

    def _all_ranks(self, holds: Callable[[], bool]) -> bool:
        """Whether `holds` on all ranks; an exception from the model counts as no. A collective."""
        self.error = ""
        try:
            holds_here = holds()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - models raise arbitrary exceptions
            self.error, holds_here = repr(error).splitlines()[0], False
            log.info("a way of calling the model failed", way=str(self._policy.way), error=self.error)
            for module in self._policy.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return self._world.all_agree(holds_here)


def _pieces(vocabulary: int) -> list[Piece]:
    """Sample sequences in which every response token is trained."""
    ids = np.random.default_rng(0).integers(3, min(vocabulary, 1000), 64, dtype=np.int32)
    prompts = {0: ids[:4], 1: ids[4:6]}
    responses = [(0, ids[10:21]), (0, ids[21:27]), (1, ids[27:31])]
    return [
        Piece(
            sample=sample,
            group=group,
            prompt_ids=prompts[group],
            token_ids=response,
            behaviour_logprobs=np.zeros(len(response), dtype=np.float32),
            mask=np.ones(len(response), dtype=np.bool_),
        )
        for sample, (group, response) in enumerate(responses)
    ]


def _token_ids(piece: Piece, device: torch.device) -> torch.Tensor:  # [P + T]
    return torch.from_numpy(np.concatenate([piece.prompt_ids, piece.token_ids])).long().to(device)


@contextmanager
def _narrowed(model: transformers.PreTrainedModel) -> Iterator[None]:
    """Inside, attention windows are narrower than the trial's sequences."""
    config = model.config.get_text_config()
    modules = list(model.modules())
    found: list[Any] = [config, *modules, *(getattr(module, "config", None) for module in modules)]
    holders = {id(holder): holder for holder in found}
    wide = [(owner, owner.sliding_window) for owner in holders.values() if getattr(owner, "sliding_window", None)]
    for owner, _ in wide:
        owner.sliding_window = _NARROW
    try:
        yield
    finally:
        for owner, window in wide:
            owner.sliding_window = window


def _alike(ours: Sequence[Seen], truth: Sequence[Seen]) -> bool:
    return all(_same_numbers(a, b) for a, b in zip(ours, truth, strict=True))


def _same_numbers(ours: Seen, truth: Seen) -> bool:
    """Compare the response tokens, at the end of both."""
    num = len(ours.logp)
    if not torch.allclose(ours.logp[-num:].double(), truth.logp[-num:].double(), atol=_LOGP_TOLERANCE, rtol=0):
        return False
    if not (ours.hidden.shape[1] and truth.hidden.shape[1]):
        return True
    expected = truth.hidden[-num:].double()
    off = (ours.hidden.double()[-num:] - expected).norm(dim=-1)
    return bool((off <= _HIDDEN_TOLERANCE * expected.norm(dim=-1)).all())


def _heads(config: transformers.PretrainedConfig, base: Head) -> Iterator[Head]:
    """The heads that the configuration may mean, the plain one first."""
    text = config.get_text_config()
    named = [value for name in _SCALES if (value := getattr(text, name, None))]
    caps = [value for name in _CAPS if (value := getattr(text, name, None))]
    scales = [1.0, *(scale for value in named for scale in (value, 1 / value))]
    for cap, scale in product([*caps, None], scales):
        yield replace(base, scale=scale, soft_cap=cap)
