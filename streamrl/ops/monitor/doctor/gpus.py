"""Checks of this machine's GPUs: which process gets which, and whether a worker's part of the run fits.

What the learner needs is estimated where its model is known (`streamrl.learner.preflight`).
"""

from __future__ import annotations

from collections.abc import Iterator

from streamrl.config.load import Loaded
from streamrl.config.placement import GpuShare, StartedPart, gpus_of_worker, place
from streamrl.config.schema import Config
from streamrl.finding import Finding, error, ok, warning
from streamrl.gpus import gpus_here
from streamrl.ops.monitor.doctor.sizes import served_bytes
from streamrl.terminal import size

_WORKING_BYTES = 2 << 30  # of an engine besides weights and KV cache: activations, graphs, driver context; a guess


def check_gpus(loaded: Loaded, part: StartedPart = "all") -> Iterator[Finding]:
    gpus = gpus_here()
    if not gpus:
        yield ok("gpu", "none that torch can use: CPUs will be used")
    for gpu in gpus:
        memory = f", {size(gpu.free)} of {size(gpu.memory)} free" if gpu.memory else ", of unknown size"
        yield ok(f"gpu {gpu.name}", f"{gpu.model or 'model unknown to nvidia-smi'}{memory}")


def check_placement(loaded: Loaded, part: StartedPart = "all") -> Iterator[Finding]:
    config = loaded.config
    placement = place(config, gpus_here(), part)
    for name, share in placement.shares.items():
        assignment = f"{name} on {share.words}"
        if share.fraction is None:
            yield ok("placement", assignment)
        else:
            seen = f"{assignment}, shared with another process"
            yield warning("placement", seen, "use fewer workers, or a machine with more GPUs")
    if placement.idle:
        names = ", ".join(gpu.name for gpu in placement.idle)
        yield warning("placement", f"no part of the run uses GPU {names}", "raise worker.count, or learner.processes")
    workers = [share for name, share in placement.shares.items() if name.startswith("worker/") and share.memory]
    yield from _workers(config, workers)


def _workers(config: Config, shares: list[GpuShare]) -> Iterator[Finding]:
    """Check the worker with the least memory; unknown sizes are skipped."""
    weights = served_bytes(config)
    if not shares or not weights:
        return
    smallest, num_gpus = min(share.memory for share in shares), gpus_of_worker(config.worker)
    needed = weights // max(1, num_gpus * config.worker.hosts) + _WORKING_BYTES
    estimate = f"{size(needed)} of weights and workspace per GPU, {size(smallest)} available"
    if needed > smallest:
        remedy = (
            f"raise worker.gpus above {num_gpus} or worker.hosts above {config.worker.hosts}, use a smaller model, or "
            "put fewer processes on each GPU"
        )
        yield error("worker on GPU", estimate, remedy)
    else:
        yield ok("worker on GPU", f"{estimate}: {size(smallest - needed)} are left for the KV cache")
