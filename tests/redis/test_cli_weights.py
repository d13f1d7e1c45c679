"""`streamrl weights ls|show|verify|pull` on a run with versions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from safetensors import deserialize

from streamrl.ops.cli.main import main
from streamrl.protocol.transport import operator_scripts as for_reports
from streamrl.protocol.transport.entries import encode_report
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.script import run
from streamrl.protocol.transport.types import Announcement
from streamrl.protocol.weights.format import BITS, DTYPES, TensorMeta
from streamrl.protocol.weights.manifest_bytes import encode_manifest
from streamrl.protocol.weights.redis_store import RedisStore
from streamrl.telemetry.progress import Progress
from streamrl.versions import show
from tests.feed_world import make_config
from tests.redis.conftest import MakeLearner
from tests.tiny_models import make_model
from tests.weights_world import TENSORS, State, World, nudged, random_state


class Run:
    """A run whose weights are in Redis, and the command line that looks at it."""

    def __init__(self, client: redis.Redis, keys: Keys, learner: LearnerStream, url: str) -> None:
        self.client, self.keys, self._learner, self._url = client, keys, learner, url
        self.store = RedisStore(client, keys)

    def publish(self, states: Sequence[State], tensors: Sequence[TensorMeta] = TENSORS) -> World:
        world = World(self.store, tensors=tensors)
        for state in states:
            m = world.publish(state)
            told = Announcement(version=m.version, base=m.base, step=m.step, manifest=encode_manifest(m))
            self._learner.announce(told, keep=list(world.manifests))
        return world

    def serves(self, worker: str, version: int) -> None:
        progress = Progress(part=f"worker/{worker}", role="worker")
        progress.note(version=version)
        run(self.client, for_reports.report(self.keys, progress.part, encode_report(progress.report())))

    def ask(self, *arguments: str) -> int:
        return main(["weights", *arguments, "--redis", self._url, "--run", self.keys.name])


@pytest.fixture
def published(client: redis.Redis, keys: Keys, make_learner: MakeLearner, redis_url: str, tmp_path: Path) -> Run:
    learner = make_learner(claim=False)
    config = make_config(model={"path": str(tmp_path / "model")})
    learner.claim(config_json=config.model_dump_json(), fingerprint="model", wait_s=0.0)
    return Run(client, keys, learner, redis_url)


def chain(num_versions: int) -> list[State]:
    rng = np.random.default_rng(0)
    states = [random_state(rng)]
    while len(states) < num_versions:
        states.append(nudged(rng, states[-1]))
    return states


def asked_json(published: Run, capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert published.ask(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_versions_are_listed_with_their_sizes_and_who_serves_them(published: Run, capsys) -> None:
    world = published.publish(chain(3))
    _, second, third = world.manifests.values()
    published.serves("here-1", third.version)
    published.serves("here-2", third.version)
    published.serves("late", second.version)

    rows = asked_json(published, capsys, "ls")

    assert [(row["version"], row["kind"], row["base"]) for row in rows] == [
        ("1.0", "anchor", None),
        ("1.1", "delta", "1.0"),
        ("1.2", "delta", "1.1"),
    ]
    assert [row["served_by"] for row in rows] == [[], ["late"], ["here-1", "here-2"]]
    assert rows[0]["ratio"] == 1.0
    assert rows[2]["ratio"] == sum(t.num_bytes for t in TENSORS) / third.num_bytes > 5

    assert published.ask("ls") == 0
    shown = capsys.readouterr().out
    assert "VERSION" in shown
    assert "here-1, here-2" in shown


def test_a_version_is_shown_with_its_blobs_and_its_most_changed_tensors(published: Run, capsys) -> None:
    states = chain(2)
    moved = {**states[0], "model.norm": states[1]["model.norm"] + np.uint32(1)}
    world = published.publish([states[0], moved])

    told = asked_json(published, capsys, "show", "--version", "1.1")

    assert told["tensors"][0]["name"] == "model.norm"
    assert told["tensors"][0]["changed"] == 33
    assert [t["changed"] for t in told["tensors"][1:]] == [0] * 4
    assert {blob["name"] for blob in told["blobs"]} == set(list(world.manifests.values())[1].blob_names)
    assert published.ask("show") == 0
    assert "version 1.1, after step 1: delta on 1.0" in capsys.readouterr().out


def test_damage_in_the_store_is_found_and_named(published: Run, capsys) -> None:
    world = published.publish(chain(3))
    assert published.ask("verify") == 0
    assert "3 versions, 3 blobs" in capsys.readouterr().out
    _, second, third = world.manifests.values()
    published.client.setrange(published.keys.blob(second.shards[0].blob_name, 0), 7, b"\xff\x00")
    published.store.delete(third.shards[0].blob_name)

    assert published.ask("verify", "--json") == 1

    told = json.loads(capsys.readouterr().out)
    assert [fault["version"] for fault in told["faults"]] == ["1.1", "1.2"]
    assert "does not agree with its digest" in told["faults"][0]["fault"]
    assert told["faults"][1]["fault"].endswith("or incomplete")
    assert published.ask("verify", "--version", "1.0") == 0


def test_a_manifest_that_cannot_be_read_is_named_and_hides_no_other(published: Run, capsys) -> None:
    world = published.publish(chain(2))
    for name, data in ((b"another", b"x"), (str((7 << 32) + 3).encode(), b"\xff"), (b"9" * 400, b"")):
        published.client.hset(published.keys.manifests, name, data)
    assert published.ask("ls") == 0
    told = capsys.readouterr().out
    for shown in (*(show(version) for version in world.manifests), "7.3  its manifest cannot be read"):
        assert shown in told
    assert told.count("cannot be read") == 3
    assert published.ask("ls", "--json") == 0
    first, _, *others = json.loads(capsys.readouterr().out)
    assert {row["version"] for row in others} == {"7.3", "another", "9" * 400}
    assert {row["kind"] for row in others} == {"unreadable"}
    assert all(row.keys() == first.keys() for row in others)
    assert published.ask("verify") == 1
    assert "2 versions" in capsys.readouterr().out
    assert published.ask("verify", "--version", "latest") == 0


def test_looking_writes_nothing(published: Run, capsys) -> None:
    published.publish(chain(2))
    before = {key: published.client.dump(key) for key in published.client.scan_iter()}

    for command in ("ls", "show", "verify"):
        assert published.ask(command) == 0

    assert {key: published.client.dump(key) for key in published.client.scan_iter()} == before


def test_a_version_that_is_not_there_is_a_clear_error(published: Run, capsys) -> None:
    assert published.ask("show") == 2
    assert "published no weights yet" in capsys.readouterr().err
    published.publish(chain(2))
    assert published.ask("show", "--version", "1.7") == 2
    assert "version 1.7 does not exist or was deleted; the oldest is 1.0, the newest 1.1" in capsys.readouterr().err
    assert published.ask("verify", "--version", "7") == 2
    assert "expected TERM.NUMBER" in capsys.readouterr().err


def read_state(path: Path) -> tuple[list[TensorMeta], State]:
    dtypes = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    entries = deserialize(path.read_bytes())
    tensors = [TensorMeta(name=n, dtype=dtypes[t["dtype"]], shape=tuple(t["shape"])) for n, t in entries]
    assert {tensor.dtype for tensor in tensors} <= set(DTYPES)
    return tensors, {n: np.frombuffer(bytes(t["data"]), dtype=BITS[dtypes[t["dtype"]]]) for n, t in entries}


def test_a_pulled_version_is_a_folder_that_transformers_loads(published: Run, tmp_path: Path, capsys) -> None:
    import torch
    import transformers

    make_model(tmp_path / "model")
    tensors, state = read_state(tmp_path / "model" / "model.safetensors")
    moved = {name: bits + np.array(1, dtype=bits.dtype) for name, bits in state.items()}
    published.publish([state, moved], tensors)

    assert published.ask("pull", "--to", str(tmp_path / "newest")) == 0
    assert "version 1.1, after step 1, is in" in capsys.readouterr().out

    _, pulled = read_state(tmp_path / "newest" / "model.safetensors")
    assert {name: bits.tobytes() for name, bits in pulled.items()} == {n: b.tobytes() for n, b in moved.items()}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "newest")
    assert loaded.dtype == torch.float32
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path / "newest")) > 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "newest"]

    assert published.ask("pull", "--to", str(tmp_path / "newest")) == 2
    assert "already exists" in capsys.readouterr().err
    assert published.ask("pull", "--to", str(tmp_path / "other"), "--model", str(tmp_path)) == 2
    assert "has no config.json" in capsys.readouterr().err


def test_a_damaged_version_is_not_pulled(published: Run, tmp_path: Path, capsys) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    world = published.publish(chain(2))
    [anchor, _] = world.manifests.values()
    published.client.setrange(published.keys.blob(anchor.shards[0].blob_name, 0), 7, b"\xff\x00")

    assert published.ask("pull", "--to", str(tmp_path / "newest")) == 1

    assert "does not agree with its digest" in capsys.readouterr().err
    assert not (tmp_path / "newest").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
