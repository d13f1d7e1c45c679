"""`streamrl status` and `streamrl why` as scripts and people call them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streamrl.config.load import dump_config, load_config
from streamrl.ops.cli.main import main
from tests.redis.monitor_world import Watched

HEAVY = ("torch", "vllm", "transformers", "numpy", "pydantic", "structlog", "rich")


def target(run: Watched) -> list[str]:
    return ["--redis", run.world.url, "--run", run.world.keys.name]


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, Any]:
    capsys.readouterr()  # what making the run logged
    code = main(argv)
    return code, json.loads(capsys.readouterr().out)


async def test_a_healthy_run_fits_on_a_screen_and_exits_with_0(
    run: Watched, capsys: pytest.CaptureFixture[str]
) -> None:
    await run.world.train_steps(2)
    run.record()
    run.learner("train", state="working")
    for number in range(40):
        run.worker(name=f"host-{number}", detail={"tokens_per_s": 100, "in_flight": 3})
    capsys.readouterr()
    assert main(["status", *target(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    for expected in ("running  step 2", "healthy", "40 generate", "4 000 tokens/s", "120 in flight", "reward 0.5"):
        assert expected in text, text


async def test_the_json_keeps_its_names(run: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts read these: adding is fine, taking away needs a new schema."""
    await run.world.train_steps(1)
    run.record()
    run.healthy()
    code, found = told(capsys, "status", *target(run), "--json")
    assert (code, found["schema"], found["verdict"], found["causes"]) == (0, 1, "healthy", [])
    part = {"name", "role", "host", "pid", "state", "doing", "doing_s", "progress_s", "report_s"}
    names = {
        "run": "name uid state control term step max_steps data_epochs created_at eta_s share_done",
        "learner": "lead ranks holder lease_left_s metrics rewards live",
        "weights": "latest step age_s kept num_bytes largest_bytes changed_share behind worst_lag",
        "drops": "trained dropped by_reason rate_by_length ignored",
        "dead": "count retry_requests latest",
        "redis": "server version used_bytes max_bytes policy role save_error",
    }
    for section, expected in names.items():
        assert set(expected.split()) <= set(found[section]), section
    [worker] = found["workers"]
    assert set(worker["part"]) == set(found["learner"]["lead"]) == part
    assert {"part", "version", "step", "lag", "tokens_per_s", "in_flight", "kv_use", "leases", "detail"} <= set(worker)
    assert [stream["purpose"] for stream in found["streams"]] == ["train", "eval"]
    assert [source["name"] for source in found["rewards"]] == ["exact"]


def test_what_workers_say_of_themselves_is_told(run: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    run.worker(detail={"tokens_per_s": 90, "in_flight": 4, "kv_used": 0.25})
    _, found = told(capsys, "status", *target(run), "--json")
    [worker] = found["workers"]
    assert (worker["tokens_per_s"], worker["in_flight"], worker["kv_use"]) == (90, 4, 0.25)


def test_the_exit_code_says_how_the_run_is(run: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    run.learner("train", state="working")
    assert main(["status", *target(run)]) == 4  # no workers
    run.worker()
    run.worker(name="old", ago_s=60)
    assert main(["status", *target(run)]) == 3
    run.world.learner.stream.release("stopped")
    assert main(["status", *target(run)]) == 5
    assert main(["why", *target(run)]) == 5
    assert main(["status", "--redis", run.world.url, "--run", "nobody"]) == 5
    assert main(["status"]) == 2


def test_without_a_server_both_say_so_plainly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = ["--redis", f"unix://{tmp_path}/nowhere.sock", "--run", "x"]
    assert main(["status", *nowhere]) == 6
    assert "Redis does not answer" in capsys.readouterr().out
    code, found = told(capsys, "why", *nowhere, "--json")
    assert (code, found["verdict"], found["causes"][0]["name"]) == (6, "unreachable", "redis_unreachable")


def test_the_folder_of_a_run_is_enough(run: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = load_config("conf/reinforce.yaml", [f"name={run.world.keys.name}", f"redis.url={run.world.url}"])
    folder = run.world.config.folder
    (folder / "config.yaml").write_text(dump_config(loaded.config, loaded.origin))
    run.healthy()
    capsys.readouterr()
    assert main(["status", str(folder)]) == 0
    assert capsys.readouterr().out.startswith(f"run      {run.world.keys.name}")
    (folder / "config.yaml").write_text("name: [")
    assert main(["status", str(folder)]) == 2


def test_why_gives_evidence_and_remedy(run: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    run.world.learner.plan()
    run.learner()
    capsys.readouterr()
    assert main(["why", *target(run)]) == 4
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(": stalled")
    assert lines[2] == "!! there are no workers"
    assert lines[3].startswith("   seen  6 tickets wait")
    assert lines[4].startswith("   do    start one, on any machine: streamrl worker")
    code, found = told(capsys, "why", *target(run), "--json")
    assert (code, set(found["causes"][0])) == (4, {"name", "level", "title", "evidence", "remedy"})


def test_status_loads_nothing_heavy(run: Watched) -> None:
    run.healthy()
    script = (
        "import sys; from streamrl.ops.cli.main import main; code = main(sys.argv[1:]);"
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    command = [sys.executable, "-c", script, "status", *target(run), "--json"]
    with run.alive():  # on a busy machine the command takes longer to start than a part may be silent
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")


def test_what_other_machines_wrote_cannot_steer_the_terminal(run: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    run.learner("train", state="working")
    run.worker("generate\x1b[2J", name="evil\x1b[31m", ago_s=60)
    run.worker()
    main(["status", *target(run)])
    main(["why", *target(run)])
    assert "\x1b" not in capsys.readouterr().out
