"""The GPUs of this machine that are visible to this process, found without creating a CUDA context.

Uses `nvidia-smi` and CUDA_VISIBLE_DEVICES, not CUDA itself: a launcher with a CUDA context would hold memory on the
first GPU, and could not fork. Numbers are those of `nvidia-smi`, so processes that get them are started with
CUDA_DEVICE_ORDER=PCI_BUS_ID. Run with one GPU; for several, and for slices of one, written from the manuals.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from streamrl.errors import ResourceError
from streamrl.misfits import version

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICES = Path("/dev")
_MIB = 1 << 20
_TIMEOUT_S = 15.0
_FIELDS = "index,uuid,name,memory.total,memory.free,driver_version,mig.mode.current,compute_cap"
_BFLOAT16_SINCE = 8  # major compute capability: Ampere; earlier GPUs (V100, T4) emulate it slowly
_SLICE = re.compile(r"\s+MIG (?P<model>\S+)\s+Device\s+\d+: \(UUID: (?P<uuid>[^)]+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    name: str  # as in CUDA_VISIBLE_DEVICES: a number, or the UUID of a GPU or of a slice of one (MIG)
    model: str = ""  # with its driver; empty if unknown
    memory: int = 0  # bytes; 0: not known
    free: int = 0
    has_bfloat16: bool = True  # computes in it; also if unknown

    @property
    def is_slice(self) -> bool:
        """A MIG slice; CUDA shows a process only one of them, however many are named."""
        return self.name.startswith("MIG-")


def visible_to(names: tuple[str, ...]) -> Mapping[str, str]:
    """Return the environment of a process that shall see only these GPUs."""
    return {VISIBLE: ",".join(names), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def gpus_here(
    environment: Mapping[str, str] = os.environ, *, torch: str | None = None, devices: Path = _DEVICES
) -> tuple[Gpu, ...]:
    """Return the visible GPUs; none if torch is a CPU build. ResourceError if nvidia-smi fails, or if only the driver
    (`devices`) says that there are GPUs. `torch`: its version, by default the installed one."""
    if "+cpu" in (torch or version("torch") or ""):
        return ()
    wanted = environment.get(VISIBLE)
    if wanted is not None and not wanted.strip():
        return ()
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None:
        if wanted is not None:
            return tuple(_named(wanted, {}))
        _refuse_unknown(devices)
        return ()
    there = dict(_all_of(program, environment))
    return tuple(gpu for gpu in there.values()) if wanted is None else tuple(_named(wanted, there))


def _refuse_unknown(devices: Path) -> None:
    """Raise ResourceError if there are GPUs that nothing here can divide: every process would take the first."""
    if any(devices.glob("nvidia[0-9]*")):
        raise ResourceError(
            "there are GPUs here, but no nvidia-smi to say which: start the container with "
            f"NVIDIA_DRIVER_CAPABILITIES=compute,utility, or name the GPUs in {VISIBLE} (empty: use none)"
        )


def _all_of(program: str, environment: Mapping[str, str]) -> Iterator[tuple[str, Gpu]]:
    """Yield the GPUs by UUID, in bus order; a GPU that is partitioned yields its slices instead."""
    slices = _slices(_ask(program, "-L", environment=environment))
    for line in _ask(program, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits", environment=environment):
        index, uuid, model, total, free, driver, mig, capability = (field.strip() for field in line.split(","))
        if mig == "Enabled":
            yield from slices.get(uuid, {}).items()
        else:
            description = f"{model}, driver {driver}"
            has = _has_bfloat16(capability)
            yield uuid, Gpu(name=index, model=description, memory=_bytes(total), free=_bytes(free), has_bfloat16=has)


def _slices(lines: list[str]) -> Mapping[str, Mapping[str, Gpu]]:
    """Parse each GPU's slices from `GPU 0: A100 (UUID: GPU-1)`, `  MIG 3g.40gb  Device 0: (UUID: MIG-2)`."""
    found: dict[str, dict[str, Gpu]] = {}
    of: dict[str, Gpu] = {}
    for line in lines:
        if whole := re.match(r"GPU \d+: .*\(UUID: ([^)]+)\)", line):
            of = found.setdefault(whole[1], {})
        elif part := _SLICE.match(line):
            size = re.search(r"(\d+)gb", part["model"])
            memory = int(size[1]) << 30 if size else 0
            of[part["uuid"]] = Gpu(name=part["uuid"], model=f"MIG {part['model']}", memory=memory, free=memory)
    return found


def _named(wanted: str, there: Mapping[str, Gpu]) -> Iterator[Gpu]:
    """Read the variable as CUDA does: numbers or UUID prefixes; the first invalid entry ends the list."""
    for name in map(str.strip, wanted.split(",")):
        matching = [gpu for uuid, gpu in there.items() if name == gpu.name or (len(name) > 4 and uuid.startswith(name))]
        if not name or name.startswith("-") or (there and not matching):
            return
        gpu = matching[0] if matching else Gpu(name=name)
        yield replace(gpu, name=name)


def _ask(program: str, *words: str, environment: Mapping[str, str]) -> list[str]:
    try:
        done = subprocess.run(
            [program, *words], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True, env=dict(environment)
        )
    except (OSError, subprocess.SubprocessError) as failed:
        raise ResourceError(f"nvidia-smi fails ({failed}): fix the driver, or set {VISIBLE}= to do without") from None
    return [line for line in done.stdout.splitlines() if line.strip()]


def _has_bfloat16(capability: str) -> bool:
    """Decide by the compute capability, such as `9.0`; `[N/A]` if the driver does not know it."""
    major = capability.partition(".")[0]
    return not major.isdigit() or int(major) >= _BFLOAT16_SINCE


def _bytes(mebibytes: str) -> int:
    """Convert to bytes; `[N/A]` (a GPU that shares the machine's memory) becomes 0."""
    return int(mebibytes) * _MIB if mebibytes.isdigit() else 0
