"""The routers of a mixture-of-experts model: capturing their outputs, and freezing them.

Capturing uses hooks that are active only inside `capturing`: not in a reference's pass, nor when layers are recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers.utils.output_capturing import OutputRecorder

from streamrl.config import schema
from streamrl.config.routers import SELECTION_BIASES
from streamrl.errors import ConfigError
from streamrl.learner.parallel.experts import experts_of, refuse_experts


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOutputs:
    """Router outputs of one pass, layer by layer."""

    logits: list[torch.Tensor] = field(default_factory=list)  # [cells, E]
    chosen: list[torch.Tensor] = field(default_factory=list)  # [cells, k]

    def loads(self, index: torch.Tensor) -> torch.Tensor:  # [T] of the cells that count -> [layers, E]
        """Tokens routed to each expert, among the indexed cells."""
        found = []
        for logits, chosen in zip(self.logits, self.chosen, strict=True):
            experts = chosen[index].flatten()
            none = torch.zeros(logits.shape[-1], dtype=torch.float64, device=logits.device)
            found.append(none.scatter_add_(0, experts, torch.ones_like(experts, dtype=torch.float64)))
        return torch.stack(found)

    def wide(self, index: torch.Tensor) -> torch.Tensor:  # [layers, T, E]
        """Logits of the indexed cells, in 32 bits or more."""
        logits = torch.stack([each[index] for each in self.logits])
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


class Routers:
    """The routers of a model that has some, one for each layer of experts."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self._captured: RouterOutputs | None = None
        for (router, place), experts in zip(_routers(model), [module for _, module in experts_of(model)], strict=True):
            router.register_forward_hook(lambda _module, _args, out, place=place: self._capture_logits(out, place))
            experts.register_forward_pre_hook(lambda _module, args: self._capture_choice(args))

    @classmethod
    def of(cls, model: transformers.PreTrainedModel) -> Routers | None:
        return cls(model) if has_routers(model) else None

    @contextmanager
    def capturing(self) -> Iterator[RouterOutputs]:
        """Capture router outputs of the passes inside."""
        self._captured = captured = RouterOutputs()
        try:
            yield captured
        finally:
            self._captured = None

    def _capture_logits(self, out: Any, place: int) -> None:
        if self._captured is not None:
            self._captured.logits.append(out[place] if isinstance(out, tuple) else out)

    def _capture_choice(self, args: Sequence[torch.Tensor]) -> None:
        if self._captured is not None:
            self._captured.chosen.append(args[1])


def has_routers(model: transformers.PreTrainedModel) -> bool:
    num = len(_routers(model))
    return num > 0 and num == sum(1 for _ in experts_of(model))


def prepare_mixture(model: transformers.PreTrainedModel, config: schema.Config) -> None:
    """Freeze routers if configured; ConfigError for settings that the model does not support."""
    refuse_experts(model, config.learner.layout.experts)
    settings = config.model
    settings_in_use = _router_settings(settings)
    if not settings_in_use:
        return
    kind = type(model).__name__
    if not has_routers(model):
        raise ConfigError(f"{settings_in_use[0]}: {kind} has no routers known to streamrl; leave it out")
    if settings.router_balance and any(name.endswith(SELECTION_BIASES) for name, _ in model.named_buffers()):
        raise ConfigError(
            f"model.router_balance = {settings.router_balance:g}: routers of {kind} are balanced by their own bias; "
            f"set it to 0"
        )
    if settings.router == "frozen":
        for router, _ in _routers(model):
            router.requires_grad_(False)


def _router_settings(settings: schema.Model) -> list[str]:
    found = [f"model.router = {settings.router}"] if settings.router == "frozen" else []
    of_loss = {"router_balance": settings.router_balance, "router_z": settings.router_z}
    return found + [f"model.{name} = {value:g}" for name, value in of_loss.items() if value]


def _routers(model: transformers.PreTrainedModel) -> list[tuple[nn.Module, int]]:
    """(module, index of the logits in its output) of each router, as transformers finds them."""
    recorder = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    if not isinstance(recorder, OutputRecorder):
        return []
    return [
        (module, recorder.index)
        for name, module in model.named_modules()
        if isinstance(module, recorder.target_class) and name.endswith(recorder.layer_name or "")
    ]
