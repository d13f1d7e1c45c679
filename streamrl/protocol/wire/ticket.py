"""A ticket: the request to sample one prompt n times.

What ticket 0, 1, 2, ... asks for follows from its number, the retries before it (`learner.groups.numbering`), the seed
and the dataset, or from a curriculum's draws on disk (`learner.groups.curriculum`), so the learner can always issue it
again. It carries the prompt already tokenized: workers need neither the dataset nor the chat template.

A number alone does not identify a ticket. When Redis falls back to an older copy of itself, and from there to a newer
one, two learners have issued the same numbers, one as retries of dead tickets and one as positions in the data. So a
ticket carries all that is requested in one piece, `asked`: the run, the purpose, the number, the row, its pass, prompt
and fields, the number of samples, and the ticket it repeats. Its `identity` is the digest of that piece (XXH3-64),
which stays the same when the ticket is issued again after a failure or a loss. It accompanies the ticket everywhere:

    ledger, checkpoint ── identity by number ─────┐
    entry of the ticket, beside it ───────────────┤ compared: in reconciling, where a worker leases, in the script that
    header and entry of the group ────────────────┤ delivers, when the group is read
    journal ── identity of the ended ticket ──────┘ and once more by the audit, with the group that ended it

The further fields of a prompt's row, which the ticket carries to the rewards, are JSON inside msgpack: rows may nest,
and the wire's limits on containers stay small.

Settings and prompts are checked against the limits before a run begins, so no ticket is issued that cannot be read.
Importing this module loads little, for callers that only check settings or count tickets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import xxhash
from msgspec import Meta

from streamrl.errors import WireError
from streamrl.protocol.wire.codec import (
    MAX_MESSAGE_BYTES,
    MAX_TEXT_CHARS,
    Count,
    Message,
    Messages,
    to_array,
    to_json_object,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Purpose = Literal["train", "eval"]
PURPOSES: tuple[Purpose, ...] = ("train", "eval")

MAX_TOKENS = 1 << 20  # of a prompt, and of a sample
IDENTITY_CHARS = 16  # hex digits
MAX_SAMPLES = 1024  # of a ticket, and of the group that answers it
MAX_REWARD_SOURCES = 32
# A ticket's prompt and fields, at four bytes a character, its token ids, at four bytes each, and small fields.
MAX_TICKET_BYTES = 4 * (2 * MAX_TEXT_CHARS + MAX_TOKENS) + (1 << 20)

_ID_BYTES = 4
_COLUMN_BYTES = 4 << 20  # of a group, besides tokens: rewards, versions and mask runs take some KB per sample
_ITEM_BYTES = 4  # of each token: its id, its logprob, and what else a run has per token
_encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # created once, because that is slow


class Ticket(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    number: int  # counts from 0; training and evaluation count separately
    run_uid: str  # distinguishes a deleted run of the same name
    purpose: Purpose
    data_epoch: int  # passes over the dataset before this one
    prompt_index: int  # row of the dataset
    prompt: str  # as text, for rewards and for display
    token_ids: npt.NDArray[np.int32]  # [P]
    fields: Mapping[str, Any] = msgspec.field(default_factory=dict)  # the row's further fields, for rewards
    num_samples: int
    attempt: int = 0  # failures reported by workers so far
    issued_step: int = 0  # the learner's step when it was issued
    min_version: int = 0  # a worker must serve at least this version before it begins
    retry_of: int | None = None  # the dead ticket that this one retries

    @cached_property
    def asked(self) -> bytes:
        """The encoded request; excludes when it was issued and how often it failed."""
        return _ASKED.pack(
            _Asked(
                number=self.number,
                run_uid=self.run_uid,
                purpose=self.purpose,
                data_epoch=self.data_epoch,
                prompt_index=self.prompt_index,
                prompt=self.prompt,
                token_ids=self.token_ids.astype("<i4", copy=False).tobytes(),
                fields=encode_row(self.fields),
                num_samples=self.num_samples,
                retry_of=-1 if self.retry_of is None else self.retry_of,
            )
        )

    @cached_property
    def identity(self) -> str:
        """The request's digest in hex, which identifies the ticket."""
        return xxhash.xxh3_64_hexdigest(self.asked)


class _Asked(Message, frozen=True, kw_only=True):
    number: Count
    run_uid: Annotated[str, Meta(max_length=64)]
    purpose: Purpose
    data_epoch: Count
    prompt_index: Count
    prompt: Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
    token_ids: bytes
    fields: Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
    num_samples: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)]
    retry_of: Annotated[int, Meta(ge=-1)]


class _Issued(Message, frozen=True, kw_only=True):
    asked: bytes
    attempt: Annotated[int, Meta(ge=0, le=1 << 20)]
    issued_step: Count
    min_version: Count


_ASKED = Messages(_Asked, max_bytes=MAX_TICKET_BYTES)
_ISSUED = Messages(_Issued, max_bytes=MAX_TICKET_BYTES)


def encode_ticket(ticket: Ticket) -> bytes:
    return _ISSUED.pack(
        _Issued(
            asked=ticket.asked,
            attempt=ticket.attempt,
            issued_step=ticket.issued_step,
            min_version=ticket.min_version,
        )
    )


def decode_ticket(data: bytes) -> Ticket:
    """Decode a ticket, or raise WireError."""
    issued = _ISSUED.unpack(data)
    asked = _ASKED.unpack(issued.asked)
    num_tokens = len(asked.token_ids) // _ID_BYTES
    if not 1 <= num_tokens <= MAX_TOKENS:
        raise WireError(f"a prompt of {num_tokens} tokens: must be 1 to {MAX_TOKENS}")
    ticket = Ticket(
        number=asked.number,
        run_uid=asked.run_uid,
        purpose=asked.purpose,
        data_epoch=asked.data_epoch,
        prompt_index=asked.prompt_index,
        prompt=asked.prompt,
        token_ids=to_array("token_ids", asked.token_ids, "<i4", count=num_tokens),
        fields=to_json_object("fields", asked.fields),
        num_samples=asked.num_samples,
        attempt=issued.attempt,
        issued_step=issued.issued_step,
        min_version=issued.min_version,
        retry_of=None if asked.retry_of < 0 else asked.retry_of,
    )
    vars(ticket)["asked"] = issued.asked  # the identity is that of these bytes; saves encoding again
    return ticket


def max_group_tokens(*, items: int) -> int:
    """Return how many tokens of prompt and samples fit into a group with so many numbers per token beside its id and
    logprob."""
    return (MAX_MESSAGE_BYTES - _COLUMN_BYTES) // ((2 + items) * _ITEM_BYTES)


def encode_row(fields: Mapping[str, Any]) -> str:
    """Encode a row's further fields; WireError if they exceed what a ticket can carry."""
    text = _encode_json(dict(fields))
    if len(text) > MAX_TEXT_CHARS:
        raise WireError(f"the further fields are {len(text)} characters of JSON; a ticket carries {MAX_TEXT_CHARS}")
    return text
