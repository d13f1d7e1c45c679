"""Groups that nobody asked for, written directly into the stream with write access; none may be trained.

They are genuine groups that were seen, with bytes changed: so each is wrong in exactly one way.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import msgpack

from tests.faults.judge.layout import Fields, name_of
from tests.faults.judge.recorder import GROUPS, Record
from tests.faults.judged.server import MortalRedis
from tests.faults.judged.team import KEYS

_NEVER_ISSUED = 1_000_000


@dataclass(frozen=True, slots=True)
class _Scene:
    """What a forger has at hand."""

    chance: random.Random
    genuine: dict[bytes, bytes]  # a group, field by field
    open_ticket: int  # a ticket that is waiting


def forge(server: MortalRedis, record: Record, chance: random.Random, *, how: str, before: Collection[str]) -> set[str]:
    """Write one forged group and return its name. `before`: names of earlier forgeries."""
    genuine = [seen for seen in record.of(GROUPS) if seen.name not in before]
    with server.client() as client:
        waiting = [int(fields[b"n"]) for _, fields in client.xrange(KEYS.tickets("train"), count=50)]
        if not genuine or not waiting:
            return set()
        scene = _Scene(chance, dict(chance.choice(genuine[-50:]).fields), chance.choice(waiting))
        forged = FORGERIES[how](scene)
        if name_of(forged) in {seen.name for seen in genuine}:
            return set()  # a ticket that waits again after a rollback: this would be its own group
        client.xadd(KEYS.groups("train"), forged)  # type: ignore[arg-type]
    return {name_of(forged)}


def _with_header(fields: Fields, **changes: object) -> dict[bytes, bytes]:
    header = {**msgpack.unpackb(fields[b"h"]), **changes}
    number = str(header["ticket"]).encode()
    return {**fields, b"h": msgpack.packb(header), b"n": number}


def _garbage(scene: _Scene) -> dict[bytes, bytes]:
    return {b"n": b"%d" % scene.open_ticket, b"u": scene.genuine[b"u"], b"h": scene.chance.randbytes(40), b"b": b""}


def _of_never_issued(scene: _Scene) -> dict[bytes, bytes]:
    return _with_header(scene.genuine, ticket=_NEVER_ISSUED + scene.chance.randrange(1000))


def _of_another_run(scene: _Scene) -> dict[bytes, bytes]:
    return {**_with_header(scene.genuine, ticket=scene.open_ticket, run_uid="f" * 32), b"u": b"f" * 32}


def _of_another_model(scene: _Scene) -> dict[bytes, bytes]:
    return _with_header(scene.genuine, ticket=scene.open_ticket, fingerprint="f" * 32)


def _with_flipped_bit(scene: _Scene) -> dict[bytes, bytes]:
    body = bytearray(scene.genuine[b"b"])
    if body:
        body[scene.chance.randrange(len(body))] ^= 1 << scene.chance.randrange(8)
    return {**_with_header(scene.genuine, ticket=scene.open_ticket), b"b": bytes(body) or b"\0"}


def _with_other_rewards(scene: _Scene) -> dict[bytes, bytes]:
    """Change the header's rewards, but not the body's."""
    rewards = msgpack.unpackb(scene.genuine[b"h"])["sample_rewards"]
    return _with_header(scene.genuine, ticket=scene.open_ticket, sample_rewards=[reward + 8.0 for reward in rewards])


def _with_bomb(scene: _Scene) -> dict[bytes, bytes]:
    return {**_with_header(scene.genuine, ticket=scene.open_ticket), b"h": b"\xdd\x00\x00\xea\x60" + b"\x80" * 60_000}


def _of_another_ticket(scene: _Scene) -> dict[bytes, bytes]:
    """A valid group, but for another prompt."""
    return _with_header(scene.genuine, ticket=scene.open_ticket)


FORGERIES: Mapping[str, Callable[[_Scene], dict[bytes, bytes]]] = {
    "garbage": _garbage,
    "of a ticket that was never issued": _of_never_issued,
    "of another run": _of_another_run,
    "of another model": _of_another_model,
    "with a flipped bit": _with_flipped_bit,
    "with other rewards": _with_other_rewards,
    "with a bomb": _with_bomb,
    "of another ticket": _of_another_ticket,
}
