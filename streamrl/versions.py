"""Weight versions: `term * 2**32 + n`, shown as `6.103`.

The learner's term is claimed durably in the checkpoint root before anything else, so versions grow across restarts,
rollbacks and the loss of Redis, and no two learners ever give different weights the same number.
"""

from __future__ import annotations

from typing import NewType

Version = NewType("Version", int)

_N_BITS = 32
_MAX_N = (1 << _N_BITS) - 1


def make_version(term: int, n: int) -> Version:
    """Return the n-th version that a learner of this term publishes (n counts from 0)."""
    assert term >= 1, f"terms count from 1, got {term}"
    assert 0 <= n <= _MAX_N, f"n out of range: {n}"
    return Version((term << _N_BITS) | n)


def term_of(version: int) -> int:
    return version >> _N_BITS


def number_of(version: int) -> int:
    return version & _MAX_N


def show(version: int) -> str:
    """Format as `6.103`, the form shown to people."""
    return f"{term_of(version)}.{number_of(version)}"


def parse(text: str) -> Version:
    """The inverse of `show`; raises ValueError on anything else."""
    term, dot, n = text.partition(".")
    if not (dot and term.isascii() and term.isdigit() and n.isascii() and n.isdigit()):
        raise ValueError(f"not a weight version: {text!r} (expected TERM.NUMBER, such as 6.103)")
    if int(n) > _MAX_N or int(term) < 1:
        raise ValueError(f"weight version out of range: {text!r}")
    return make_version(int(term), int(n))
