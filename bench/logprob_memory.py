"""Memory of logprobs at a large vocabulary: `python -m bench.logprob_memory naive|ours`, one process each.

    naive    logits = hidden @ head, log_softmax, gather; forward and backward in fp32
    ours     learner.model.logprobs

Prints the peak growth of the process in bytes, beyond its inputs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from streamrl.learner.model.logits import Head
from streamrl.learner.model.logprobs import token_logprobs

VOCABULARY, _HIDDEN, NUM_TOKENS = 131_072, 64, 2048


def measure(way: str) -> int:
    """Measure in a separate process."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.logprob_memory", way],
        cwd=Path(__file__).resolve().parents[1],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    return int(done.stdout.splitlines()[-1])


def run(way: str, *, num_tokens: int, device: torch.device) -> int:
    """Return the peak bytes beyond inputs and their gradients, in this process or on its GPU."""
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, _HIDDEN, device=device, requires_grad=True)
    weight = torch.randn(VOCABULARY, _HIDDEN, device=device, requires_grad=True)
    targets = torch.randint(VOCABULARY, (num_tokens,), device=device)
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    before = _reset_peak(device)
    if way == "naive":
        logp = (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    else:
        logp = token_logprobs(hidden, weight, targets, torch.zeros_like(targets, dtype=torch.bool), Head()).logp
    logp.mean().backward()
    return _peak(device) - before


def _reset_peak(device: torch.device) -> int:
    """Reset the peak; return the bytes in use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the peak
    return _status("VmRSS")


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [kilobytes] = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(kilobytes)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(run(sys.argv[1], num_tokens=NUM_TOKENS, device=torch.device("cpu")))
