"""The connection between an engine's first host and a further one: lines of JSON, and a heartbeat each second.

    further ── connects ──► first
        both prove that they can read the run's secret in Redis, with nonces made for this connection
        then either side sends messages; a side that receives nothing for `SILENT_S`, or sees the connection end,
        considers the other one lost

A killed process is detected at once, since the kernel closes its connections; an unreachable host, after `SILENT_S`.
No TLS: messages only contain versions to hold and rendezvous addresses. vLLM's own connections between hosts are
neither encrypted nor authenticated, and carry pickles, so the network between them must be private anyway.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from typing import Any, Literal

from streamrl.errors import TransportError
from streamrl.tasks import cancel_all

SILENT_S = 20.0
_BEAT_S = 1.0
_GREET_S = 10.0
_CLOSE_S = 1.0
LONGEST_LINE = 64 << 10

Side = Literal["first", "further"]
Message = Mapping[str, Any]


class LinkLost(TransportError):
    """The other side will send nothing more; the text says why."""


class Link:
    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, silent_s: float = SILENT_S
    ) -> None:
        """`reader` must have a limit of `LONGEST_LINE`."""
        self._reader, self._writer, self._silent_s = reader, writer, silent_s
        self._beating = asyncio.create_task(self._beat(), name="signs of life")

    @property
    def own_address(self) -> str:
        """Return this host's address, as the other side reaches it."""
        return str(self._writer.get_extra_info("sockname")[0])

    @property
    def other_address(self) -> str:
        return str(self._writer.get_extra_info("peername")[0])

    def send(self, message: Message) -> None:
        """Send without waiting: messages are short, and a side that does not read is soon detected as lost."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> Message:
        """Return the next message that is not a heartbeat."""
        while True:
            try:
                async with asyncio.timeout(self._silent_s):
                    line = await self._reader.readline()
                message = json.loads(line) if line else None
            except TimeoutError:
                raise LinkLost(f"it sent nothing for {self._silent_s:g} s") from None
            except OSError as error:
                raise LinkLost(f"its connection broke: {error.strerror or error}") from None
            except (ValueError, RecursionError):  # not JSON, longer than the limit, or too deep
                raise LinkLost("it sent something that is not a message of this protocol") from None
            if message is None:
                raise LinkLost("its connection ended: its process died, or left")
            if not isinstance(message, dict):
                raise LinkLost("it sent something that is not a message of this protocol")
            if message:
                return message

    async def close(self) -> None:
        self._writer.close()  # first, since the caller may be cancelled
        await cancel_all([self._beating])
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):  # the last messages cannot be delivered
            self._writer.transport.abort()

    async def _beat(self) -> None:
        while True:
            self.send({})
            await asyncio.sleep(_BEAT_S)


async def greet(link: Link, *, side: Side, secret: bytes, run_uid: str, about: Message | None = None) -> Message:
    """Authenticate both sides; return what the other side says about itself. LinkLost if it fails."""
    nonce = secrets.token_hex(16)
    other: Side = "further" if side == "first" else "first"
    try:
        async with asyncio.timeout(_GREET_S):
            link.send({"number": nonce, "about": about or {}})
            hello = await link.receive()
            nonces = {side: nonce, other: str(hello.get("number"))}
            link.send({"proof": _proof(secret, run_uid, side, nonces)})
            proof = str((await link.receive()).get("proof"))
    except TimeoutError:
        raise LinkLost(f"it did not identify itself within {_GREET_S:g} s") from None
    if not hmac.compare_digest(_bytes(proof), _proof(secret, run_uid, other, nonces).encode()):
        raise LinkLost("it does not know this run's secret: it belongs to another run, or to another Redis")
    identity = hello.get("about")
    return identity if isinstance(identity, dict) else {}


def _proof(secret: bytes, run_uid: str, side: Side, nonces: Mapping[Side, str]) -> str:
    text = f"{run_uid}\n{side}\n{nonces['first']}\n{nonces['further']}"
    return hmac.new(secret, _bytes(text), hashlib.sha256).hexdigest()


def _bytes(text: str) -> bytes:
    return text.encode(errors="replace")  # what the other side sent may have half a surrogate
