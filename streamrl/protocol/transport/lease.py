"""Being the learner of a run: the lease that keeps others out, and the fence that every write passes.

    await_lease ─► the durable term, in the checkpoint root ─► claim (term known to Redis) ─► writes, renew ─► release

The lease comes before the term, so that a learner that is not admitted leaves no trace in the run's history. Others
wait for the lease; what protects the data is the fence: once another has the lease or a newer term, every script of
this learner is refused, however long it slept. Blocks in `await_lease` and `claim` (at most `wait_s`) and in every call
while Redis is away (at most `give_up_after_s`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypedDict, Unpack

import redis
from redis.client import Pipeline

from streamrl.crashpoints import crashpoint
from streamrl.errors import Fenced, ResourceError, RunGone, TransportError
from streamrl.protocol.transport import learner_scripts as scripts
from streamrl.protocol.transport.address import server_name
from streamrl.protocol.transport.connection import Argument, Call, Fence, Script, repeat, run
from streamrl.protocol.transport.keys import Keys

_CLAIM_PAUSE_S = 0.1


def await_lease(
    client: redis.Redis,
    keys: Keys,
    *,
    holder: str,
    lease_s: float,
    wait_s: float,
    takeover: bool = False,
    give_up_after_s: float = 120.0,
) -> None:
    """Take the run's lease, now if nobody or this very holder has it, or with `takeover`; else wait for its end.
    TransportError names the holder who still renews it after `wait_s`."""
    call = Call(scripts.TAKE_LEASE, (keys.lease,), (holder, int(lease_s * 1000), int(takeover)))

    def try_once() -> str | None:
        reply = repeat(client, "take the run's lease", partial(run, client, call), give_up_after_s=give_up_after_s)
        return _other_holder(reply)

    _wait_out(try_once, keys, wait_s)
    crashpoint("lease.taken")


def lease_holder(client: redis.Redis, keys: Keys, *, give_up_after_s: float) -> str | None:
    """Who the learner is; None when nobody is."""
    get = partial(client.get, keys.lease)
    holder: Any = repeat(client, "say who learns the run", get, give_up_after_s=give_up_after_s)
    return None if holder is None else str(holder.decode(errors="replace"))


def known_term(client: redis.Redis, keys: Keys, run_uid: str, *, takeover: bool = False, give_up_after_s: float) -> int:
    """The newest term of this run that Redis has seen; 0 when it has seen none. RunGone where the run was removed, but
    for a `takeover`, which begins it anew there."""

    def read() -> Any:
        return *client.hmget(keys.meta, "uid", "term"), client.get(keys.tombstone)

    uid, term, tombstone = repeat(client, "say how the run stands", read, give_up_after_s=give_up_after_s)
    if tombstone == run_uid.encode() and not takeover:
        raise RunGone(
            f"run {keys.name!r} was removed from Redis at {server_name(client)}: with --takeover it goes on there, "
            "from its newest checkpoint; or set another name"
        )
    return int(term) if uid == run_uid.encode() and term else 0


def _wait_out(try_once: Callable[[], str | None], keys: Keys, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while (other := try_once()) is not None:
        if time.monotonic() >= deadline:
            raise TransportError(
                f"run {keys.name!r} has a learner already: {other} holds its lease. Stop it, or take over explicitly"
            )
        time.sleep(_CLAIM_PAUSE_S)


def _other_holder(reply: list[Any]) -> str | None:
    return str(reply[1].decode(errors="replace")) if reply[0] == b"HELD" else None


class Patience(TypedDict, total=False):
    """Another than the lease's own, as `repeat` has it."""

    give_up_after_s: float
    wait_for_room: bool


class LearnerLease:
    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        *,
        fence: Fence,
        lease_s: float,
        give_up_after_s: float,
    ) -> None:
        self.fence = fence
        self.disturbed = False
        self._client = client
        self._keys = keys
        self._lease_s = lease_s
        # Anything that may be repeated; trouble with the server is remembered in `disturbed`.
        self.ask = partial(repeat, client, give_up_after_s=give_up_after_s, on_trouble=self._note_trouble)
        self._claimed: tuple[str, str] | None = None  # configuration and fingerprint
        self._server_run_id = ""

    def claim(self, *, config_json: str, fingerprint: str, takeover: bool, wait_s: float) -> None:
        if takeover:
            holder, lease_s = self.fence.holder, self._lease_s
            await_lease(self._client, self._keys, holder=holder, lease_s=lease_s, wait_s=wait_s, takeover=True)
        claimed = config_json, fingerprint
        _wait_out(lambda: self._try_claim(*claimed, takeover=takeover), self._keys, wait_s)
        self._claimed = claimed
        self._note_server()

    def renew(self) -> None:
        self.write("renew the learner's lease", scripts.RENEW, [], int(1000 * self._lease_s))
        self._note_server()

    def write(
        self, what: str, script: Script, keys: Sequence[str], *args: Argument, **patience: Unpack[Patience]
    ) -> None:
        """Run a fenced script, which must be safe to repeat. ServerFull at once unless it shall wait for room."""
        ask = partial(self.ask, what, partial(run, self._client, self.fence.call(script, self._keys, keys, *args)))
        reply = ask(**patience)
        if reply[0] == b"LOST":
            self._claim_again(what)
            reply = ask(**patience)
        self._check(reply, what)

    def ask_all(self, what: str, fill: Callable[[Pipeline], object], **patience: Unpack[Patience]) -> list[Any]:
        """Commands that change nothing, in one round trip. No transaction, which a full Redis refuses."""

        def read() -> list[Any]:
            with self._client.pipeline(transaction=False) as pipe:
                fill(pipe)
                return pipe.execute()

        return self.ask(what, read, **patience)

    def _try_claim(self, config_json: str, fingerprint: str, *, takeover: bool = False) -> str | None:
        """None: it is ours. Otherwise who holds it."""
        keys = (self._keys.meta, self._keys.tombstone, self._keys.lease)
        args = int(1000 * self._lease_s), int(takeover), config_json, fingerprint, time.time()
        call = Call(scripts.CLAIM, keys, (*self.fence, *args))
        reply = self.ask("claim the run", partial(run, self._client, call))
        other = _other_holder(reply)
        if other is None:
            self._check(reply, "claim the run")
        return other

    def _claim_again(self, what: str) -> None:
        """Redis knows nothing of our claim: it was emptied, or came back from an older copy."""
        assert self._claimed is not None, f"claim the run before you {what}"
        self.disturbed = True
        other = self._try_claim(*self._claimed)
        if other is not None:
            raise Fenced(f"run {self._keys.name!r} was lost from Redis, and {other} has taken its lease")

    def _check(self, reply: list[Any], what: str) -> None:
        status, *rest = reply
        name, term = self._keys.name, self.fence.term
        match status:
            case b"OK":
                return
            case b"FENCED":
                raise Fenced(f"run {name!r} has another learner than this one of term {term}: it may not {what}")
            case b"GONE":
                raise RunGone(f"run {name!r} was removed from Redis, or another took its name: could not {what}")
            case b"TAKEN":
                uid, state = (part.decode(errors="replace") for part in rest)
                raise ResourceError(
                    f"name {name!r} is taken: Redis at {server_name(self._client)} holds another run of that name "
                    f"(uid {uid}, {state}); remove that run, or set another name"
                )
            case b"STALE":
                raise TransportError(f"Redis already has weights of version {int(rest[0])}: could not {what}")
            case b"UNKNOWN":
                raise TransportError(f"Redis has lost the weights: could not {what}")
            case _:
                raise TransportError(f"run {name!r} vanished from Redis twice while trying to {what}")

    def _note_trouble(self, error: redis.RedisError) -> None:
        # A server that is merely full has lost nothing.
        self.disturbed |= isinstance(error, redis.ConnectionError | redis.TimeoutError | redis.ReadOnlyError)

    def _note_server(self) -> None:
        """A server that was replaced while nobody spoke to it shows by its run id alone."""
        try:
            run_id = str(self.ask("say what it is", lambda: self._client.info("server"))["run_id"])
        except TransportError as error:
            if isinstance(error.__cause__, redis.exceptions.NoPermissionError):
                return  # INFO is not granted everywhere; lost connections and the fence still tell most
            raise
        self.disturbed |= self._server_run_id not in ("", run_id)
        self._server_run_id = run_id
