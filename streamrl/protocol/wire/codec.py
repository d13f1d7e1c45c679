"""msgpack with limits, in two forms.

Messages sent by the thousand per second, tickets and groups, have a struct each: `Messages` reads and writes it in C
(msgspec), which checks every field's type and bounds while it builds the struct. All others are packed as a map,
unpacked strictly, and read field by field from `Fields`.

Hostile bytes are the normal case: 8 MB of empty maps unpack to 593 MB, duplicate keys silently overwrite, and extension
types run hooks. So sizes are bounded before anything is built, and anything outside the schema is refused.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Generic, Self, TypeVar

import msgpack
import msgspec

from streamrl.errors import WireError

if TYPE_CHECKING:
    import numpy.typing as npt
    from _typeshed import DataclassInstance

SCHEMA = 4
MAX_MESSAGE_BYTES = 64 << 20
MAX_TEXT_CHARS = 1 << 20
_MAX_CONTAINER = 4096  # samples in a group, spans in a sample, fields in a map: all far below this
_MAX_ITEMS_PER_BYTE_BUDGET = 1 << 16

Count = Annotated[int, msgspec.Meta(ge=0)]
Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]  # NaN fails both bounds

T = TypeVar("T")
M = TypeVar("M", bound="Message")
Word = TypeVar("Word", bound=str)


class Message(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag_field="schema", tag=SCHEMA
):
    """A map on the wire: the schema's number, then the subclass's fields.

    Subclasses must be frozen and keyword-only, like this class.
    """


class Messages(Generic[M]):
    """Encodes and decodes messages of one kind; numpy scalars are written as plain numbers."""

    def __init__(self, kind: type[M], *, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._begin = _begin_of_map(1 + len(kind.__struct_fields__))
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._encode = msgspec.msgpack.Encoder(enc_hook=_plain_number).encode

    def pack(self, message: M) -> bytes:
        try:
            return self._encode(message)
        except (msgspec.MsgspecError, TypeError, UnicodeEncodeError, OverflowError) as error:
            raise WireError(f"cannot be sent: {error}") from None

    def unpack(self, data: bytes | memoryview) -> M:
        """Decode a message; any malformed input raises WireError."""
        if len(data) > self._max_bytes:
            raise WireError(f"message of {len(data)} bytes exceeds the limit of {self._max_bytes}")
        try:
            message = self._decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            _check_schema(data)
            raise WireError(f"not a message: {error}") from None
        if data[: len(self._begin)] != self._begin:
            raise WireError("a field is missing, or comes twice")
        return message


class _Any(msgspec.Struct):
    schema: int


def _check_schema(data: bytes | memoryview) -> None:
    """Raise the error of a different schema, if that is the cause."""
    try:
        schema = msgspec.msgpack.decode(data, type=_Any).schema
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    if schema != SCHEMA:
        raise _of_schema(schema)


def _of_schema(schema: int) -> WireError:
    return WireError(f"message of schema {schema}; this program uses schema {SCHEMA}: update the older side")


def _begin_of_map(num_fields: int) -> bytes:
    """Return the map header that `pack` writes, so that a reader notices at once a missing or duplicate field."""
    return bytes([0x80 | num_fields]) if num_fields < 16 else b"\xde" + num_fields.to_bytes(2, "big")


def _plain_number(value: Any) -> int | float:
    if not hasattr(value, "dtype"):
        raise TypeError(f"{type(value).__name__} is not a type that messages can hold")
    number: int | float = value.item()
    return number


def pack(values: Mapping[str, object]) -> bytes:
    """Pack one message: the schema's number and the fields."""
    message: bytes = msgpack.packb({"schema": SCHEMA, **values}, use_bin_type=True)
    return message


def fields_of(data: DataclassInstance) -> dict[str, Any]:
    """Return the fields by name, without conversion."""
    names, values_of = _reader(type(data))
    return dict(zip(names, values_of(data), strict=True))


@cache
def _reader(kind: type[DataclassInstance]) -> tuple[Sequence[str], Callable[[DataclassInstance], tuple[Any, ...]]]:
    names = [field.name for field in fields(kind)]
    return names, attrgetter(*names)


def unpack(data: bytes | memoryview, *, max_bytes: int = MAX_MESSAGE_BYTES) -> Fields:
    """Unpack the fields of a message; any malformed input raises WireError."""
    if len(data) > max_bytes:
        raise WireError(f"message of {len(data)} bytes exceeds the limit of {max_bytes}")
    budget = _ItemBudget(_MAX_ITEMS_PER_BYTE_BUDGET)
    try:
        value = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=budget.build_map,
            list_hook=budget.count_list,
            ext_hook=_refuse_extension,
            max_array_len=_MAX_CONTAINER,
            max_map_len=_MAX_CONTAINER,
            max_str_len=max_bytes,
            max_bin_len=max_bytes,
        )
    except WireError:
        raise
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"not a message: {type(error).__name__}: {error}") from None
    if not isinstance(value, dict):
        raise WireError(f"not a message: a map was expected, got {type(value).__name__}")
    found = Fields(value)
    schema = found.integer("schema", low=0)
    if schema != SCHEMA:
        raise _of_schema(schema)
    return found


class _ItemBudget:
    """Bounds how many containers one message may build, and refuses duplicate keys."""

    def __init__(self, limit: int) -> None:
        self._left = limit

    def _spend(self, items: int) -> None:
        self._left -= 1 + items
        if self._left < 0:
            raise WireError("message holds too many items")

    def build_map(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self._spend(len(pairs))
        built = dict(pairs)
        if len(built) != len(pairs):
            raise WireError("a key appears twice in one map")
        return built

    def count_list(self, items: list[Any]) -> list[Any]:
        self._spend(len(items))
        return items


def to_json_object(name: str, text: str) -> dict[str, Any]:
    """Parse a JSON text, which may nest while the limits on containers stay small."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"field {name!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise WireError(f"field {name!r} must be a JSON object")
    return value


def to_array(name: str, data: bytes, dtype: npt.DTypeLike, *, count: int) -> npt.NDArray[Any]:
    """View raw little-endian items; their number is known in advance and must agree."""
    import numpy as np  # messages without arrays need no numpy

    kind = np.dtype(dtype)
    if len(data) != count * kind.itemsize:
        raise WireError(f"field {name!r} holds {len(data)} bytes, expected {count} items of {kind.itemsize}")
    return np.frombuffer(data, dtype=kind)


def _refuse_extension(code: int, data: bytes) -> object:
    raise WireError(f"extension type {code} refused")


class Fields:
    """A map whose entries are taken one by one, each checked. Entries left at the end of a `with` are refused."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._left = values

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.done()

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def _take(self, name: str) -> Any:
        try:
            return self._left.pop(name)
        except KeyError:
            raise WireError(f"field {name!r} is missing") from None

    def integer(self, name: str, *, low: int = -(1 << 63), high: int = (1 << 64) - 1) -> int:
        value = self._take(name)
        if type(value) is not int or not low <= value <= high:
            raise WireError(f"field {name!r} must be an integer in [{low}, {high}], got {value!r:.40}")
        return value

    def number(self, name: str) -> float:
        value = self._take(name)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise WireError(f"field {name!r} must be a finite number, got {value!r:.40}")
        return float(value)

    def text(self, name: str, *, max_chars: int = MAX_TEXT_CHARS) -> str:
        value = self._take(name)
        if not isinstance(value, str) or len(value) > max_chars:
            raise WireError(f"field {name!r} must be a text of at most {max_chars} characters")
        return value

    def json_object(self, name: str) -> dict[str, Any]:
        return to_json_object(name, self.text(name))

    def one_of(self, name: str, choices: tuple[Word, ...]) -> Word:
        value = self._take(name)
        for choice in choices:
            if choice == value:
                return choice
        raise WireError(f"field {name!r} must be one of {', '.join(choices)}, got {value!r:.40}")

    def blob(self, name: str) -> bytes:
        value = self._take(name)
        if not isinstance(value, bytes):
            raise WireError(f"field {name!r} must be bytes, got {type(value).__name__}")
        return value

    def array(self, name: str, dtype: npt.DTypeLike, *, count: int) -> npt.NDArray[Any]:
        return to_array(name, self.blob(name), dtype, count=count)

    def list(self, name: str, kind: type[T]) -> list[T]:
        value = self._take(name)
        if not isinstance(value, list) or len(value) > _MAX_CONTAINER or any(type(item) is not kind for item in value):
            raise WireError(f"field {name!r} must be a list of at most {_MAX_CONTAINER} items of type {kind.__name__}")
        return value

    def done(self) -> None:
        """Raise WireError for entries left: an unknown field means another program or an attack."""
        if self._left:
            raise WireError(f"unknown fields: {', '.join(sorted(map(repr, self._left)))[:200]}")
