"""The configurations for GPUs start, as far as a machine without any can see: every check of `up` and of the doctor,
with a stand-in of the model's size on a made-up machine of the size that each is for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

from streamrl.config.load import Loaded, load_config
from streamrl.config.placement import GpuShare, StartedPart, place
from streamrl.errors import ResourceError
from streamrl.learner.preflight.examine import examine
from streamrl.ops.monitor.doctor import gpus, look
from tests.gpus_world import machine_with, made_up
from tests.stand_ins import make_stand_in

CONF = Path(__file__).parents[2] / "conf"
# Of this machine, and not of the configuration; what they ask for stands in the tests of sizes.
OF_THE_MACHINE = {"disk", "shared memory", "limits"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    file: str
    size: str
    gpus: int
    gigabytes: int = 80
    part: StartedPart = "all"
    placed: tuple[str, ...]  # GPUs of each process, in the order of the parts

    def __str__(self) -> str:
        return f"{self.file}-{self.part}"


CASES = [
    Case(file="gpu_qwen_1.5b_lora", size="1.5B", gpus=1, gigabytes=24, placed=("0", "0")),
    Case(file="gpu_qwen_1.5b", size="1.5B", gpus=1, placed=("0", "0")),
    Case(file="gpu_qwen_7b_lora", size="7B", gpus=2, placed=("0", "1")),
    Case(file="gpu_qwen_7b", size="7B", gpus=8, placed=("0,1,2,3", "4", "5", "6", "7")),
    Case(file="gpu_qwen_32b", size="32B", gpus=8, part="learner", placed=("0,1,2,3,4,5,6,7",)),
    Case(file="gpu_qwen_32b", size="32B", gpus=4, part="worker", placed=("0,1,2,3",)),
]


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")
    return cache(lambda size: make_stand_in(root / size, size))


def load(case: Case, model: Path, folder: Path) -> Loaded:
    prompts = folder / "prompts.jsonl"
    row = '{"messages": [{"role": "user", "content": "3 + 4 ="}], "answer": "7"}\n'
    prompts.write_text(row * 200)
    overrides = [f"model.path={model}", f"data.train={prompts}", f"data.validation={prompts}", f"dir={folder}"]
    if case.file == "gpu_qwen_32b":  # what is on other hosts is not asked
        overrides += ["redis.url=embedded", "rewards.model=null"]
    loaded = load_config(CONF / f"{case.file}.yaml", overrides)
    if loaded.config.weights.store.startswith("file:"):
        loaded = load_config(CONF / f"{case.file}.yaml", [*overrides, f"weights.store=file:{folder}/weights"])
    return loaded


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_starts(
    case: Case, stand_in: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamrl.gpus.version", lambda _name: "2.13.0+cu130")
    machine = machine_with(tmp_path, case.gpus, mebibytes=case.gigabytes * 1019)
    monkeypatch.setenv("PATH", machine["PATH"])
    loaded = load(case, stand_in(case.size), tmp_path)

    found = list(look(loaded, case.part))
    wrong = [f"{name}: {one.evidence}" for name, one in found if one.level == "error" and name not in OF_THE_MACHINE]
    assert wrong == []
    if case.part != "worker":
        assert [one.evidence for one in examine(loaded.config, case.part) if one.level == "error"] == []
    shares = place(loaded.config, made_up(case.gpus, gigabytes=case.gigabytes), case.part).shares
    assert tuple(share.environment["CUDA_VISIBLE_DEVICES"] for share in shares.values()) == case.placed


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_no_two_processes_of_a_shipped_configuration_share_a_gpu_where_there_are_enough(path: Path, count: int) -> None:
    config, gpus = load_config(path).config, made_up(count)
    wanted = config.learner.processes + config.worker.count + (config.reward_server is not None)
    shares: Mapping[str, GpuShare] = {}
    try:
        shares = place(config, gpus).shares
    except ResourceError as refused:
        told = str(refused)
    assert shares or (count < wanted and f"there {'is' if count == 1 else 'are'} {count} GPU" in told)
    for one, other in combinations(shares.values(), 2):
        assert not set(one.gpus) & set(other.gpus) or (one.fraction and other.fraction and count < wanted)
    for gpu in gpus:
        assert sum(share.fraction or 0 for share in shares.values() if gpu in share.gpus) <= 0.9 + 1e-9


@pytest.mark.parametrize(("hosts", "level"), [(1, "error"), (2, "ok")])
def test_an_engine_has_the_memory_of_all_its_hosts(monkeypatch: pytest.MonkeyPatch, hosts: int, level: str) -> None:
    """405B parameters in bfloat16, on eight GPUs of 80 GB a host."""
    monkeypatch.setattr(gpus, "served_bytes", lambda _: 810 * 10**9)
    settings = {"model": {"path": "m"}, "data": {"train": "x"}, "worker": {"hosts": hosts, "gpus": 8}}
    [found] = gpus._workers(load_config(settings).config, [GpuShare(gpus=made_up(8))])
    assert found.level == level
