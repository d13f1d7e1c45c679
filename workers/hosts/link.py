"""The connection between the first host of an engine and a further one: lines of JSON, and a sign of life each second.

    further ── connects ──► first
        both prove that they read the run's secret in Redis, over numbers that each made for this connection
        then either side sends messages; who hears nothing for `SILENT_S`, or sees the connection end, takes the other
        for lost

A process that is killed is lost at once, since the kernel ends its connections; a host that is cut off, after
`SILENT_S`. No TLS: what is said is which version to hold and where ranks meet. vLLM's own connections between hosts are
neither encrypted nor proved, and carry pickles, so that the network between them has to be closed to others anyway.
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
    """Nothing more will come from the other side; its text says why."""


class Link:
    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, silent_s: float = SILENT_S
    ) -> None:
        """`reader`: made with a limit of `LONGEST_LINE`."""
        self._reader, self._writer, self._silent_s = reader, writer, silent_s
        self._beating = asyncio.create_task(self._beat(), name="signs of life")

    @property
    def own_address(self) -> str:
        """Ours, as the other side reaches it."""
        return str(self._writer.get_extra_info("sockname")[0])

    @property
    def other_address(self) -> str:
        return str(self._writer.get_extra_info("peername")[0])

    def send(self, message: Message) -> None:
        """Does not wait: messages are short, and a side that does not read is lost soon."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> Message:
        """The next message that is more than a sign of life."""
        while True:
            try:
                async with asyncio.timeout(self._silent_s):
                    line = await self._reader.readline()
                message = json.loads(line) if line else None
            except TimeoutError:
                raise LinkLost(f"nothing was heard from it for {self._silent_s:g} s") from None
            except OSError as error:
                raise LinkLost(f"its connection broke: {error.strerror or error}") from None
            except ValueError:  # no JSON, or longer than the limit
                raise LinkLost("it sent what is no message of ours") from None
            if message is None:
                raise LinkLost("its connection ended: its process died, or left")
            if not isinstance(message, dict):
                raise LinkLost("it sent what is no message of ours")
            if message:
                return message

    async def close(self) -> None:
        self._writer.close()  # first: who closes may be cancelled
        await cancel_all([self._beating])
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):  # nobody takes what was said last
            self._writer.transport.abort()

    async def _beat(self) -> None:
        while True:
            self.send({})
            await asyncio.sleep(_BEAT_S)


async def greet(link: Link, *, side: Side, secret: bytes, run_uid: str, about: Message | None = None) -> Message:
    """What the other side says about itself, once both have proved to be of this run. LinkLost where it cannot."""
    own = secrets.token_hex(16)
    other: Side = "further" if side == "first" else "first"
    try:
        async with asyncio.timeout(_GREET_S):
            link.send({"number": own, "about": about or {}})
            said = await link.receive()
            numbers = {side: own, other: str(said.get("number"))}
            link.send({"proof": _proof(secret, run_uid, side, numbers)})
            proof = str((await link.receive()).get("proof"))
    except TimeoutError:
        raise LinkLost(f"it did not say who it is within {_GREET_S:g} s") from None
    if not hmac.compare_digest(proof.encode(), _proof(secret, run_uid, other, numbers).encode()):
        raise LinkLost("it does not know this run's secret: it belongs to another run, or to another Redis")
    found = said.get("about")
    return found if isinstance(found, dict) else {}


def _proof(secret: bytes, run_uid: str, side: Side, numbers: Mapping[Side, str]) -> str:
    text = f"{run_uid}\n{side}\n{numbers['first']}\n{numbers['further']}"
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()
