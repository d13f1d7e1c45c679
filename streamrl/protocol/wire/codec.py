"""msgpack with limits: pack maps, unpack them strictly, and take fields out by type.

Hostile bytes are the normal case here: 8 MB of empty maps unpack to 593 MB, duplicate keys silently overwrite, and
extension types run hooks. So sizes are bounded before anything is built, and whatever is not in the schema is refused.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import msgpack

from streamrl.errors import WireError

if TYPE_CHECKING:
    import numpy.typing as npt
    from _typeshed import DataclassInstance

SCHEMA = 3
MAX_MESSAGE_BYTES = 64 << 20
MAX_TEXT_CHARS = 1 << 20
_MAX_CONTAINER = 4096  # samples in a group, spans in a sample, fields in a map: all far below this
_MAX_ITEMS_PER_BYTE_BUDGET = 1 << 16

T = TypeVar("T")
Word = TypeVar("Word", bound=str)
Code = Literal["Q", "d"]  # of numbers, as `struct` calls them: unsigned ones of 8 bytes, and doubles
_NUMBER_BYTES = 8


def pack(values: Mapping[str, object]) -> bytes:
    """One message: the schema's number and the fields."""
    message: bytes = msgpack.packb({"schema": SCHEMA, **values}, use_bin_type=True)
    return message


def fields_of(data: DataclassInstance) -> dict[str, Any]:
    """As they are, under their names."""
    names, values_of = _reader(type(data))
    return dict(zip(names, values_of(data), strict=True))


@cache
def _reader(kind: type[DataclassInstance]) -> tuple[Sequence[str], Callable[[DataclassInstance], tuple[Any, ...]]]:
    names = [field.name for field in fields(kind)]
    return names, attrgetter(*names)


def pack_numbers(code: Code, values: Sequence[float]) -> bytes:
    """What `Fields.numbers` gives back."""
    return struct.pack(f"<{len(values)}{code}", *values)


def unpack(data: bytes | memoryview, *, max_bytes: int = MAX_MESSAGE_BYTES) -> Fields:
    """The inverse of `pack`; any bytes give fields or one WireError."""
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
        raise WireError(f"message of schema {schema}; this program speaks schema {SCHEMA}: update the older side")
    return found


class _ItemBudget:
    """Bounds how many containers one message may build, and refuses a key that comes twice."""

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


def _refuse_extension(code: int, data: bytes) -> object:
    raise WireError(f"extension type {code} refused")


class Fields:
    """A map whose entries are taken out one by one, each checked. What is left at the end of a `with` is refused."""

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
        """A text: what is in it may nest, and the limits on containers stay small."""
        try:
            value = json.loads(self.text(name))
        except (ValueError, RecursionError) as error:
            raise WireError(f"field {name!r} is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise WireError(f"field {name!r} must be a JSON object")
        return value

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
        """Raw little-endian items; their number is known beforehand and must agree."""
        import numpy as np  # messages without arrays are read without it

        data = self.blob(name)
        kind = np.dtype(dtype)
        if len(data) != count * kind.itemsize:
            raise WireError(f"field {name!r} holds {len(data)} bytes, expected {count} items of {kind.itemsize}")
        return np.frombuffer(data, dtype=kind)

    def numbers(self, name: str, code: Code) -> tuple[Any, ...]:
        """As many Python numbers as there are: where they are few, and looked at one by one, arrays cost more."""
        data = self.blob(name)
        count, left = divmod(len(data), _NUMBER_BYTES)
        if left:
            raise WireError(f"field {name!r} holds {len(data)} bytes, which are no numbers of {_NUMBER_BYTES}")
        return struct.unpack(f"<{count}{code}", data)

    def list(self, name: str, kind: type[T], *, max_items: int = _MAX_CONTAINER) -> list[T]:
        value = self._take(name)
        if not isinstance(value, list) or len(value) > max_items or any(type(item) is not kind for item in value):
            raise WireError(f"field {name!r} must be a list of at most {max_items} items of type {kind.__name__}")
        return value

    def done(self) -> None:
        """Everything must have been taken: an unknown field means another program or an attack."""
        if self._left:
            raise WireError(f"unknown fields: {', '.join(sorted(map(repr, self._left)))[:200]}")
