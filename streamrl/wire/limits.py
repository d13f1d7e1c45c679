"""What messages may hold at most. Settings and prompts are held to it before a run begins: what nobody could read is
never asked for.

On its own, so that who only looks at settings need not load what reads messages.
"""

from __future__ import annotations

MAX_MESSAGE_BYTES = 64 << 20
MAX_TEXT_CHARS = 1 << 20
MAX_TOKENS = 1 << 20  # of a prompt, and of a sample
MAX_SAMPLES = 1024  # of a ticket, and of the group that answers it
MAX_REWARD_SOURCES = 32
# A ticket's prompt and fields, of four bytes a character, its token ids, of four bytes each, and what is small.
MAX_TICKET_BYTES = 4 * (2 * MAX_TEXT_CHARS + MAX_TOKENS) + (1 << 20)

_COLUMN_BYTES = 4 << 20  # of a group, besides tokens: rewards, versions and mask runs are some KB a sample
_BYTES_PER_TOKEN = 8  # its id and its log-prob
MAX_GROUP_TOKENS = (MAX_MESSAGE_BYTES - _COLUMN_BYTES) // _BYTES_PER_TOKEN  # of its prompt and its samples
