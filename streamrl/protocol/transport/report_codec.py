"""A report as bytes, and back: apart from those who write reports, so that a monitor starts quickly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, get_args

from streamrl.errors import WireError
from streamrl.protocol.wire.codec import fields_of, pack, unpack
from streamrl.telemetry.progress import Report, Role, State

LARGEST = 1e200  # what is beyond is no number to reckon with: a few of them added up would be none
_MAX_REPORT_BYTES = 64 << 10


def encode_report(report: Report) -> bytes:
    return pack({**fields_of(report), "detail": json.dumps(dict(report.detail))})


def decode_report(data: bytes) -> Report:
    """A report or one WireError."""
    with unpack(data, max_bytes=_MAX_REPORT_BYTES) as f:
        return Report(
            part=f.text("part", max_chars=200),
            role=f.one_of("role", get_args(Role)),
            host=f.text("host", max_chars=300),
            pid=f.integer("pid", low=0),
            state=f.one_of("state", get_args(State)),
            doing=f.text("doing", max_chars=200),
            since=f.number("since"),
            last_progress=f.number("last_progress"),
            at=f.number("at"),
            detail=_decode_detail(f.text("detail")),
        )


def _decode_detail(text: str) -> dict[str, int | float | str]:
    try:
        detail = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"field 'detail' is not JSON: {error}") from None
    if not isinstance(detail, dict) or any(not isinstance(value, int | float | str) for value in detail.values()):
        raise WireError("field 'detail' must be a flat JSON object")
    return {name: value for name, value in detail.items() if isinstance(value, str) or abs(value) < LARGEST}


def decode_reports(packed: Mapping[Any, Any]) -> list[Report]:
    reports: list[Report] = []
    for data in packed.values():
        try:
            reports.append(decode_report(data))
        except WireError:  # another program's, or an attack: it hides no other
            continue
    return sorted(reports, key=lambda report: report.part)
