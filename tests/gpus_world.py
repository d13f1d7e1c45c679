"""A machine with made-up GPUs: an nvidia-smi that reports them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from streamrl.gpus import Gpu

GB = 10**9


def made_up(count: int, *, gigabytes: int = 80) -> tuple[Gpu, ...]:
    return tuple(Gpu(name=str(n), model="H100", memory=gigabytes * GB, free=gigabytes * GB) for n in range(count))


def machine_with(
    folder: Path, count: int, *, mebibytes: int = 81559, slices: int = 0, capability: str = "9.0"
) -> Mapping[str, str]:
    """Return the environment of such a machine. `slices`: MIG slices of the last GPU."""
    rows, whole = [], count - bool(slices)
    listed = []
    for n in range(count):
        mode = "Enabled" if n >= whole else "Disabled"
        told = f"{n}, GPU-{n:08d}-aaaa, NVIDIA H100 80GB HBM3, {mebibytes}, {mebibytes - 500}, 580.65.06"
        rows.append(f"{told}, {mode}, {capability}")
        listed.append(f"GPU {n}: NVIDIA H100 80GB HBM3 (UUID: GPU-{n:08d}-aaaa)")
    listed += [f"  MIG 3g.40gb     Device  {n}: (UUID: MIG-{n:08d}-bbbb)" for n in range(slices)]
    program = folder / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\nif [ \"$1\" = -L ]; then cat <<'END'\n" + "\n".join(listed) + "\nEND\nelse cat <<'END'\n"
        "" + "\n".join(rows) + "\nEND\nfi\n"
    )
    program.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}
