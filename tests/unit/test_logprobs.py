"""Chunked log-probs against the plain way of computing them."""

from __future__ import annotations

import pytest
import structlog
import torch

from streamrl.learner.model import logprobs
from streamrl.learner.model.logits import Functions, Head, InPlace, compiled, passes_on
from streamrl.learner.model.logprobs import given_logprobs, token_logprobs

TOKENS, HIDDEN, VOCABULARY = 37, 8, 23


@pytest.fixture(params=["in place", "functions"], autouse=True)
def passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test sees both ways over a chunk's logits: the one of a CPU, and what a GPU's compiler is given."""
    if request.param == "functions":
        monkeypatch.setattr(logprobs, "passes_on", lambda _device: Functions())


def _inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(2, VOCABULARY, (TOKENS,), generator=generator)


def _plain(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    early: torch.Tensor,
    head: Head,
    bias: torch.Tensor | float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = (hidden @ weight.T + bias) * head.scale
    if head.soft_cap is not None:
        logits = head.soft_cap * torch.tanh(logits / head.soft_cap)
    logits = logits / head.temperature
    ends = torch.zeros(VOCABULARY, dtype=torch.bool)
    ends[list(head.end_ids)] = True
    logp = logits.masked_fill(early[:, None] & ends, -torch.inf).log_softmax(-1)
    entropy = -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0.0)).sum(-1)
    return logp.gather(1, targets[:, None])[:, 0], entropy


@pytest.mark.parametrize("chunk_tokens", [1, 5, TOKENS, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_give_the_plain_log_probs_entropy_and_gradients(chunk_tokens: int, temperature: float) -> None:
    hidden, weight, targets = _inputs()
    early = torch.arange(TOKENS) % 3 == 0
    head = Head(
        temperature=temperature,
        end_ids=(0, 1),
        compute_dtype=torch.float64,
        chunk_elements=chunk_tokens * VOCABULARY,
    )
    out = token_logprobs(hidden, weight, targets, early, head)
    logp, entropy = _plain(hidden, weight, targets, early, head)
    torch.testing.assert_close(out.logp, logp)
    torch.testing.assert_close(out.entropy, entropy)
    upstream = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)
    ours = torch.autograd.grad(out.logp, (hidden, weight), upstream)
    plain = torch.autograd.grad(logp, (hidden, weight), upstream)
    torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_bias_scale_and_cap_are_the_models_own_also_in_gradients(scale: float, soft_cap: float | None) -> None:
    hidden, weight, targets = _inputs()
    bias = torch.randn(VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    early = torch.arange(TOKENS) % 3 == 0
    head = Head(
        scale=scale,
        soft_cap=soft_cap,
        temperature=0.7,
        end_ids=(0, 1),
        compute_dtype=torch.float64,
        chunk_elements=5 * VOCABULARY,
    )
    out = token_logprobs(hidden, weight, targets, early, head, bias)
    logp, entropy = _plain(hidden, weight, targets, early, head, bias)
    torch.testing.assert_close(out.logp, logp)
    torch.testing.assert_close(out.entropy, entropy)
    upstream = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)
    ours = torch.autograd.grad(out.logp, (hidden, weight, bias), upstream)
    plain = torch.autograd.grad(logp, (hidden, weight, bias), upstream)
    torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 1000])
def test_an_entropy_that_learns_has_the_gradient_of_the_plain_one_chunk_by_chunk(
    chunk_tokens: int, soft_cap: float | None
) -> None:
    hidden, weight, targets = _inputs()
    bias = torch.randn(VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    early = torch.arange(TOKENS) % 3 == 0
    head = Head(
        scale=0.3,
        soft_cap=soft_cap,
        temperature=0.7,
        end_ids=(0, 1),
        compute_dtype=torch.float64,
        chunk_elements=chunk_tokens * VOCABULARY,
    )
    out = token_logprobs(hidden, weight, targets, early, head, bias, entropy_learns=True)
    logp, entropy = _plain(hidden, weight, targets, early, head, bias)
    upstream = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)
    for of_ours, of_plain in (
        ((out.entropy * upstream).sum(), (entropy * upstream).sum()),
        (out.logp @ upstream - out.entropy.sum(), logp @ upstream - entropy.sum()),
    ):
        ours = torch.autograd.grad(of_ours, (hidden, weight, bias), retain_graph=True)
        plain = torch.autograd.grad(of_plain, (hidden, weight, bias), retain_graph=True)
        torch.testing.assert_close(ours, plain)


def test_an_entropy_that_nobody_asked_for_has_no_gradient() -> None:
    hidden, weight, targets = _inputs()
    never = torch.zeros(TOKENS, dtype=torch.bool)
    head = Head(compute_dtype=torch.float64)
    assert not token_logprobs(hidden, weight, targets, never, head).entropy.requires_grad
    assert not given_logprobs(hidden @ weight.T, targets, never, head).entropy.requires_grad


def test_given_logits_are_cooled_and_banned_like_ours() -> None:
    hidden, weight, targets = _inputs()
    early = torch.arange(TOKENS) % 3 == 0
    head = Head(temperature=0.7, end_ids=(0, 1), compute_dtype=torch.float64)
    given = given_logprobs(hidden @ weight.T, targets, early, head, entropy_learns=True)
    ours = token_logprobs(hidden, weight, targets, early, head, entropy_learns=True)
    torch.testing.assert_close(given.logp, ours.logp)
    torch.testing.assert_close(given.entropy, ours.entropy)
    gradients = [torch.autograd.grad((out.logp - 2 * out.entropy).sum(), (hidden, weight)) for out in (given, ours)]
    torch.testing.assert_close(*gradients)


def test_the_gradient_is_one_hot_minus_softmax_by_hand() -> None:
    weight = torch.zeros(3, 1, dtype=torch.float64, requires_grad=True)
    hidden = torch.ones(1, 1, dtype=torch.float64)
    target, never = torch.tensor([2]), torch.tensor([False])
    out = token_logprobs(hidden, weight, target, never, Head(compute_dtype=torch.float64))
    out.logp.sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad[:, 0], torch.tensor([-1 / 3, -1 / 3, 2 / 3], dtype=torch.float64))


def test_a_response_that_ended_early_all_the_same_keeps_finite_numbers() -> None:
    hidden, weight, targets = _inputs()
    targets[0] = 1
    early = torch.ones(TOKENS, dtype=torch.bool)
    out = token_logprobs(hidden, weight, targets, early, Head(end_ids=(0, 1), compute_dtype=torch.float64))
    out.logp.sum().backward()
    assert torch.isfinite(out.logp).all()
    assert torch.isfinite(out.entropy).all()
    assert hidden.grad is not None
    assert torch.isfinite(hidden.grad).all()


def test_bfloat16_projects_in_bfloat16_and_normalises_in_fp32() -> None:
    hidden, weight, targets = _inputs()
    never = torch.zeros(TOKENS, dtype=torch.bool)
    out = token_logprobs(hidden.float(), weight.float(), targets, never, Head(compute_dtype=torch.bfloat16))
    logits = (hidden.to(torch.bfloat16) @ weight.to(torch.bfloat16).T).float()
    plain = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert out.logp.dtype == torch.float32
    torch.testing.assert_close(out.logp, plain)


def test_no_tokens_still_connect_the_graph_so_that_sharded_ranks_stay_in_step() -> None:
    hidden, weight, _ = _inputs()
    nothing = torch.zeros(0, dtype=torch.int64)
    out = token_logprobs(hidden[nothing], weight, nothing, nothing.bool(), Head(compute_dtype=torch.float64))
    out.logp.sum().backward()
    assert weight.grad is not None
    assert hidden.grad is not None
    assert not weight.grad.any()


def test_a_gpu_without_a_compiler_takes_the_operations_in_place_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_function: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nMore of it")

    compiled.cache_clear()
    monkeypatch.setattr(torch, "compile", fails)
    with structlog.testing.capture_logs() as logs:
        assert isinstance(passes_on(torch.device("cuda")), InPlace)
        assert isinstance(passes_on(torch.device("cuda")), InPlace)
    assert [log["reason"] for log in logs] == ["Failed to find C compiler."], "once, not for each chunk"
    compiled.cache_clear()
