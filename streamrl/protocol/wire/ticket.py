"""A ticket: the request to sample one prompt n times.

Ticket t = 0, 1, 2, ... is a function of t, the seed and the dataset, or of the draws that a curriculum has on the disk
(`learner.groups.curriculum`), so the learner can always issue it again. It carries the prompt already tokenised:
workers need neither the dataset nor an opinion on the chat template.

A number alone does not say which ticket it is. Where Redis returns to an older copy of itself, and from there to a
newer one, two learners have issued the same numbers, one as retries of dead tickets and one as places of the data. So a
ticket's `identity` is a digest of the run, the purpose, the number and all that is asked for: the row, its pass, prompt
and fields, how many samples, and what it repeats. The same ticket issued again, after a failure or a loss, has the same
one. It goes wherever the ticket goes:

    ledger, checkpoint ── what this number asks ──┐
    entry of the ticket, beside it ───────────────┤ compared: in reconciling, where a worker leases, in the script that
    header and entry of the group ────────────────┤ delivers, when the group is read
    journal ── what the ended ticket had asked ───┘ and once more by the audit, with the group that ended it

The further fields of a prompt's row, which it carries to the rewards, are JSON inside msgpack: rows may nest, and the
wire's limits on containers stay small.

Settings and prompts are held to the limits before a run begins: what nobody could read is never asked for. Importing
this loads little, for those who only check settings or count tickets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from streamrl.errors import WireError
from streamrl.protocol.wire.codec import MAX_MESSAGE_BYTES, MAX_TEXT_CHARS, fields_of, pack, unpack

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Purpose = Literal["train", "eval"]
PURPOSES: tuple[Purpose, ...] = ("train", "eval")

MAX_TOKENS = 1 << 20  # of a prompt, and of a sample
IDENTITY_CHARS = 16  # hex digits
MAX_SAMPLES = 1024  # of a ticket, and of the group that answers it
MAX_REWARD_SOURCES = 32
# A ticket's prompt and fields, of four bytes a character, its token ids, of four bytes each, and what is small.
MAX_TICKET_BYTES = 4 * (2 * MAX_TEXT_CHARS + MAX_TOKENS) + (1 << 20)

_COLUMN_BYTES = 4 << 20  # of a group, besides tokens: rewards, versions and mask runs are some KB a sample
_BYTES_PER_TOKEN = 8  # its id and its log-prob
MAX_GROUP_TOKENS = (MAX_MESSAGE_BYTES - _COLUMN_BYTES) // _BYTES_PER_TOKEN  # of its prompt and its samples
_encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # made once: that takes its time


@dataclass(frozen=True, kw_only=True)
class Ticket:
    number: int  # counts from 0 within its stream; training and evaluation count apart
    run_uid: str  # entries of a deleted run of the same name are not ours
    purpose: Purpose
    data_epoch: int  # passes over the dataset before this one
    prompt_index: int  # row of the dataset
    prompt: str  # as text, for rewards and for people
    token_ids: npt.NDArray[np.int32]  # [P]
    fields: Mapping[str, Any] = field(default_factory=dict)  # the row's further fields, handed to rewards
    num_samples: int
    attempt: int = 0  # failures that workers reported for it so far
    issued_step: int = 0  # the learner's step when it was issued
    min_version: int = 0  # a worker serves at least this version before it begins
    retry_of: int | None = None  # the dead ticket that this one repeats

    @cached_property
    def identity(self) -> str:
        """Hex digits that stand for which ticket this is; when it was issued, and how often it failed, is no part."""
        place = (self.run_uid, self.purpose, self.number, self.data_epoch, self.prompt_index)
        lengths = (len(self.prompt), len(self.token_ids))
        digest = xxhash.xxh3_64(f"{place} {self.num_samples} {self.retry_of} {lengths}".encode())
        digest.update(self.prompt.encode("utf-8", "surrogatepass"))
        digest.update(self.packed_ids)
        digest.update(self.packed_fields.encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    @cached_property
    def packed_ids(self) -> bytes:
        return self.token_ids.astype("<i4", copy=False).tobytes()

    @cached_property
    def packed_fields(self) -> str:
        return encode_row(self.fields)


def encode_ticket(ticket: Ticket) -> bytes:
    return pack(
        {
            **fields_of(ticket),
            "num_prompt_tokens": len(ticket.token_ids),
            "token_ids": ticket.packed_ids,
            "fields": ticket.packed_fields,
            "retry_of": -1 if ticket.retry_of is None else ticket.retry_of,
        }
    )


def decode_ticket(data: bytes) -> Ticket:
    """A ticket or one WireError."""
    with unpack(data, max_bytes=MAX_TICKET_BYTES) as f:
        retry_of = f.integer("retry_of", low=-1)
        return Ticket(
            number=f.integer("number", low=0),
            run_uid=f.text("run_uid", max_chars=64),
            purpose=f.one_of("purpose", PURPOSES),
            data_epoch=f.integer("data_epoch", low=0),
            prompt_index=f.integer("prompt_index", low=0),
            prompt=f.text("prompt"),
            token_ids=f.array("token_ids", "<i4", count=f.integer("num_prompt_tokens", low=1, high=MAX_TOKENS)),
            fields=f.json_object("fields"),
            num_samples=f.integer("num_samples", low=1, high=MAX_SAMPLES),
            attempt=f.integer("attempt", low=0, high=1 << 20),
            issued_step=f.integer("issued_step", low=0),
            min_version=f.integer("min_version", low=0),
            retry_of=None if retry_of < 0 else retry_of,
        )


def encode_row(fields: Mapping[str, Any]) -> str:
    """WireError when no ticket can carry it."""
    text = _encode_json(dict(fields))
    if len(text) > MAX_TEXT_CHARS:
        raise WireError(f"the further fields are {len(text)} characters of JSON; a ticket carries {MAX_TEXT_CHARS}")
    return text
