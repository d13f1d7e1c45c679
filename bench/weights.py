"""Versioned weights: size and speed of deltas, their cost to learner and engine; and no corrupt version is served.

    real Adam steps ─► bf16 states ─► encode ─► store ─► mirror in shared memory: patch, verify
                                                                                 (and on into vLLM: `serving`)

The figures of encode and patch are for one core, with encoder and mirror alone: the store is in memory. The late joiner
reads everything from Redis, with all cores. A quick run leaves out the engine, which alone takes a minute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np

from bench.entropy import delta_entropy_bits, knowing_exponents
from bench.measure import Rounds, Say, seconds
from bench.mutations import HARMLESS, REFUSED, WRONG, Trial
from bench.publishing import RUN_UID, Publishing, State
from bench.report import Bar, Fact, Line
from streamrl.config import schema
from streamrl.held_folders import scratch_folder
from streamrl.protocol.transport.connection import connect
from streamrl.protocol.transport.embedded import EmbeddedRedis
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.weights.catchup import catch_up
from streamrl.protocol.weights.encoder import EncodedShard
from streamrl.protocol.weights.format import TensorMeta
from streamrl.protocol.weights.manifest import Manifest
from streamrl.protocol.weights.mirror import Mirror
from streamrl.protocol.weights.redis_store import RedisStore
from streamrl.protocol.weights.retention import AnchorPace
from streamrl.protocol.weights.stores import MemoryStore

_LEARNING_RATES = (1e-6, 1e-5)
_NUM_BEHIND = 100  # versions


def bench(*, quick: bool, say: Say) -> list[Line]:
    lines: list[Line] = []
    slow, tensors = _trained(_LEARNING_RATES[0], quick=quick, say=say)
    lines += _size(_LEARNING_RATES[0], slow)
    say("speed of encoding and patching")
    lines += _speed(slow, tensors, say=say)
    say(f"a worker that is {_NUM_BEHIND} versions behind")
    lines += _late_joiner(slow, tensors, quick=quick)
    del slow
    fast, _ = _trained(_LEARNING_RATES[1], quick=quick, say=say)
    lines += _size(_LEARNING_RATES[1], fast)
    del fast
    say("steps of a learner that publishes, and of one that does not")
    lines += _steps(quick=quick, say=say)
    if not quick:
        lines += _serving(say=say)
        lines += _in_place(say=say)
    num_trials = 1_000 if quick else 10_000
    say(f"{num_trials:,} corrupted versions")
    return lines + _corruption(num_trials)


def _trained(lr: float, *, quick: bool, say: Say) -> tuple[list[State], list[TensorMeta]]:
    """Return the states after the last steps."""
    from bench.training import bits_of, make_model, tensors_of, train  # imports torch

    num_steps, num_kept = (6, 4) if quick else (30, 8)
    model = make_model(quick=quick)
    say(f"{num_steps} Adam steps at lr {lr:g}, {sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters")
    states: deque[State] = deque([bits_of(model)], maxlen=num_kept)
    states.extend(train(model, lr=lr, num_steps=num_steps))
    return list(states), tensors_of(model)


def _steps(*, quick: bool, say: Say) -> list[Line]:
    from bench.publish_steps import bench_steps  # imports torch

    return bench_steps(quick=quick, say=say)


def _serving(*, say: Say) -> list[Line]:
    from bench.serving import bench_serving  # imports vLLM

    with scratch_folder(in_memory=True) as shared:
        return bench_serving(shared=shared, num_rounds=4, say=say)


def _in_place(*, say: Say) -> list[Line]:
    from bench.in_place import bench_in_place  # runs vLLM in its own processes

    return bench_in_place(say=say)


def _size(lr: float, states: list[State]) -> list[Line]:
    """Report the size of the last step's delta."""
    old, new = states[-2:]
    tensors = [TensorMeta(name=name, dtype="bfloat16", shape=bits.shape) for name, bits in new.items()]
    publishing = Publishing(tensors, MemoryStore())
    publishing.publish(old, anchor=True)
    delta = publishing.encode(new, anchor=False)
    full_bytes = _num_bytes(new)
    bound_bytes = delta_entropy_bits(new, old) / 8
    changed = sum(part.num_changed for part in delta.ranges) / sum(part.length for part in delta.ranges)
    at = f"lr {lr:g}"
    return [
        Bar(
            name=f"{at}: entropy bound / delta",
            value=bound_bytes / len(delta.blob),
            unit="x",
            goal=0.6,
            better="higher",
        ),
        Fact(name=f"{at}: model / delta", value=full_bytes / len(delta.blob), unit="x"),
        Fact(name=f"{at}: model / entropy bound", value=full_bytes / bound_bytes, unit="x"),
        Fact(
            name=f"{at}: model / bound knowing exponents",
            value=full_bytes / (knowing_exponents(new, old) / 8),
            unit="x",
        ),
        Fact(name=f"{at}: elements changed", value=100 * changed, unit="%"),
    ]


# Speed


def _speed(states: list[State], tensors: list[TensorMeta], *, say: Say) -> list[Line]:
    publishing = Publishing(tensors, MemoryStore())
    with scratch_folder(in_memory=True) as folder:
        mirror = Mirror(folder)
        mirror.apply(publishing.publish(states[0], anchor=True), publishing.store)
        one_turn = _Turn(publishing, mirror, states[1:])
        ways: dict[str, Callable[[], float]] = {
            "memcpy": one_turn.copy,
            "encode": one_turn.encode,
            "patch + verify": one_turn.patch,
        }
        rounds = Rounds(ways, num_rounds=len(states) - 1, say=say)
        mirror.close()
    goals = {"encode": (1.5, 0.15), "patch + verify": (2.0, 0.2)}
    lines: list[Line] = []
    for name, (goal, goal_ratio) in goals.items():
        lines.append(Bar(name=name, value=rounds.median(name), unit="GB/s", goal=goal, better="higher"))
        value = rounds.ratio(name, to="memcpy")
        lines.append(Bar(name=f"{name} / memcpy", value=value, unit="x", goal=goal_ratio, better="higher"))
    return [*lines, Fact(name="memcpy", value=rounds.median("memcpy"), unit="GB/s")]


class _Turn:
    """Encodes and patches each step's delta, and copies as many bytes; all in GB of model per second."""

    def __init__(self, publishing: Publishing, mirror: Mirror, states: list[State]) -> None:
        self._publishing, self._mirror = publishing, mirror
        self._left = iter(states)
        self._gigabytes = _num_bytes(states[0]) / 1e9
        self._source = np.concatenate(list(states[0].values()))
        self._target = np.zeros_like(self._source)  # already written to, so that its pages exist
        self._shard: EncodedShard | None = None

    def copy(self) -> float:
        return self._gigabytes / seconds(lambda: np.copyto(self._target, self._source))

    def encode(self) -> float:
        state = next(self._left)

        def work() -> None:
            self._shard = self._publishing.encode(state, anchor=False)

        return self._gigabytes / seconds(work)

    def patch(self) -> float:
        assert self._shard is not None, "encoded in this turn"
        manifest = self._publishing.announce(self._shard, anchor=False)
        return self._gigabytes / seconds(lambda: self._mirror.apply(manifest, self._publishing.store))


# A worker that comes late


def _late_joiner(states: list[State], tensors: list[TensorMeta], *, quick: bool) -> list[Line]:
    """Time a late joiner's longest path against an anchor of the newest state; both through the default store."""
    with (
        scratch_folder() as folder,
        EmbeddedRedis.start(folder) as server,
        connect(server.url, schema.Redis()) as client,
    ):
        publishing = Publishing(tensors, RedisStore(client, Keys("bench")))
        oldest, newest, whole = _publish_many(publishing, states)
        path = catch_up(oldest.version, newest, publishing.manifests.get)
        rounds = Rounds(
            {
                "anchor": partial(_time_to_follow, publishing, oldest, [whole]),
                "path": partial(_time_to_follow, publishing, oldest, path),
            },
            num_rounds=3 if quick else 5,
        )
    return [
        Bar(
            name=f"{_NUM_BEHIND} versions behind / anchor load",
            value=rounds.ratio("path", to="anchor"),
            unit="x",
            goal=2.0,
            better="lower",
        ),
        Fact(name="deltas on its way, after an anchor", value=len(path) - 1, unit=""),
        Fact(name="versions between anchors", value=_distance(publishing), unit=""),
        Fact(name="anchor load from Redis", value=rounds.median("anchor"), unit="s"),
        Fact(name="anchor and deltas from Redis", value=rounds.median("path"), unit="s"),
    ]


def _publish_many(publishing: Publishing, states: list[State]) -> tuple[Manifest, Manifest, Manifest]:
    """Return the oldest version, the last one before a new anchor, and an anchor with its state."""
    settings = schema.Weights()
    pace = AnchorPace(every=settings.anchor_every, share=settings.anchor_share)
    rng = np.random.default_rng(0)
    share = np.mean([(states[-1][name] != states[-2][name]).mean() for name in states[-1]])
    state = dict(states[-1])
    newest = oldest = publishing.publish_at_pace(state, pace)
    while len(publishing.manifests) <= _NUM_BEHIND or not pace.due:
        state = {name: _nudged(bits, share, rng) for name, bits in state.items()}
        newest = publishing.publish_at_pace(state, pace)
    return oldest, newest, publishing.publish(state, anchor=True)


def _distance(publishing: Publishing) -> float:
    """Return the number of versions between the last two anchors."""
    anchors = [number for number, one in enumerate(publishing.manifests.values()) if one.as_anchor() is not None]
    return anchors[-2] - anchors[-3]


def _nudged(bits: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Move about this share of the elements one step up or down, like an optimizer's small step."""
    count = rng.poisson(share * len(bits))
    moved = bits.copy()
    moved[rng.integers(0, len(bits), count)] += rng.choice(np.array([1, 0xFFFF], dtype=np.uint16), count)
    return moved


def _time_to_follow(publishing: Publishing, start: Manifest, path: list[Manifest]) -> float:
    with scratch_folder(in_memory=True) as folder:
        mirror = Mirror(folder)
        mirror.apply(start, publishing.store)
        elapsed = seconds(lambda: mirror.apply_path(path, publishing.store))
        mirror.close()
    return elapsed


# Corruption


def _corruption(num_trials: int) -> list[Line]:
    with scratch_folder(in_memory=True) as folder:
        trial = Trial(Mirror(folder, run_uid=RUN_UID), seed=1)
        trial.run(num_trials)
    return [
        Bar(name="corrupted versions served", value=trial.outcomes[WRONG], unit="", goal=0, better="lower"),
        Fact(name="corrupted versions refused", value=trial.outcomes[REFUSED], unit=""),
        Fact(name="corruptions that were harmless", value=trial.outcomes[HARMLESS], unit=""),
    ]


def _num_bytes(state: State) -> int:
    return sum(bits.nbytes for bits in state.values())
