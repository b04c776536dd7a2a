"""Forms of nested Python values: arguments of calls, what guards expect, the structure of outputs.

Numbers, text, None and lists are themselves. All else is an object with one key that says what it is:
``{"%": "linear_0"}`` is a reference, ``{"tuple": [...]}`` a tuple. Dictionaries are lists of pairs.
"""

from __future__ import annotations

import base64
import binascii
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rkgb.export.json_form import names
from rkgb.export.json_form.containers import LeftOut, NamedDict, NamedNamespace
from rkgb.export.json_form.errors import Place, refuse_generator, shortly
from rkgb.ir.call import Ref, is_ref
from rkgb.state.generators import OwnGenerator
from rkgb.tree import attributes_of, leaves

MOST = 2**64  # numbers are less: tensors hold no others
_ARRAY_KINDS = "biufc"
_ARRAY_TYPE = re.compile(f"[<|][{_ARRAY_KINDS}][0-9]{{1,2}}")
_NOT_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_TABLES = {"dtype": names.DTYPES, "layout": names.LAYOUTS, "memory_format": names.MEMORY_FORMATS}
_OF_OTHER_CLASSES = ("left_out", "same")


class TreeWriter:
    """Writes values; not `strict`, objects of other classes are written by their attributes."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._objects: dict[int, tuple[int, Any]] = {}  # by identity: number, and the object, kept alive meanwhile

    def write(self, value: Any, strict: bool = True) -> Any:
        """The form of `value`."""
        if value is None or isinstance(value, bool | str | int | float | complex):
            return self._scalar(value)
        if isinstance(value, Ref):
            return {"%": value.name}
        if isinstance(value, torch.Size):
            return {"size": list(value)}
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return {"tuple": self._items(value, strict)}
        if isinstance(value, list):
            return self._items(value, strict)
        if type(value) is dict or (isinstance(value, dict) and not strict):
            return self._dict(value, strict)
        if isinstance(value, slice):
            return {"slice": self._items((value.start, value.stop, value.step), strict)}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, np.ndarray) and value.dtype.kind in _ARRAY_KINDS:
            plain = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
            data = base64.b64encode(plain.tobytes()).decode("ascii")
            return {"array": [plain.dtype.str, list(value.shape), data]}
        for kind, table in _TABLES.items():
            if (name := names.name_in(table, value)) is not None:
                return {kind: name}
        return self._other(value, strict)

    def _scalar(self, value: Any) -> Any:
        # Through the base types: what is derived from them, such as members of enumerations, counts as a number.
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            if abs(int(value)) >= MOST:
                raise self._place.error(f"{shortly(int(value))} is no number that a tensor can hold")
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"float": str(float(value))}
        return {"complex": [self._scalar(value.real), self._scalar(value.imag)]}

    def _items(self, items: Any, strict: bool) -> list[Any]:
        written = []
        for index, item in enumerate(items):
            with self._place.at(index):
                written.append(self.write(item, strict))
        return written

    def _dict(self, value: dict[Any, Any], strict: bool) -> dict[str, Any]:
        pairs = self._items(([key, item] for key, item in value.items()), strict)
        if type(value) is dict:
            return {"dict": pairs}
        return {"dict": pairs, "class": value.class_name if isinstance(value, NamedDict) else _class_name(value)}

    def _other(self, value: Any, strict: bool) -> Any:
        if isinstance(value, OwnGenerator | torch.Generator):
            refuse_generator(self._place)
        if strict:
            raise self._place.error(f"{_class_name(value)} has no form in JSON")
        if isinstance(value, LeftOut):
            return {"left_out": value.class_name}
        if id(value) in self._objects:
            return {"same": self._objects[id(value)][0]}
        if not leaves(value, is_ref):
            return {"left_out": _class_name(value)}
        self._objects[id(value)] = (len(self._objects), value)
        name = value.class_name if isinstance(value, NamedNamespace) else _class_name(value)
        return {"object": name, "attributes": self._items(map(list, _held(value).items()), strict)}


def _class_name(value: object) -> str:
    kind = value if isinstance(value, type) else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _held(value: Any) -> dict[str, Any]:
    if hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if isinstance(value, NamedNamespace):  # its slot is the name of its class, which is no attribute of the original
        return dict(vars(value))
    return attributes_of(value)


class TreeReader:
    """Reads the forms back; raises `GraphFormatError` at all that is none."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._strict = True
        self._objects: list[NamedNamespace] = []
        self._forms: dict[str, Callable[[Any], Any]] = {
            "%": lambda form: Ref(self.text(form)),
            "tuple": lambda form: tuple(self._list(form)),
            "size": lambda form: torch.Size(self.whole_numbers(form)),
            "slice": self._slice,
            "float": self._not_finite,
            "complex": self._complex,
            "device": self.device,
            "array": self._array,
            "left_out": lambda form: LeftOut(self.text(form)),
            "same": self._same,
            **{kind: functools.partial(self.named, table) for kind, table in _TABLES.items()},
        }

    def read(self, form: Any) -> Any:
        """The value of that form."""
        if form is None or type(form) in (bool, str):
            return form
        if type(form) in (int, float):
            return self.number(form)
        if type(form) is list:
            return self._list(form)
        if type(form) is not dict:
            raise self._place.error(f"{type(form).__name__} is nothing that JSON has")
        if form.keys() == {"dict"} or (form.keys() == {"dict", "class"} and not self._strict):
            return self._dict(form)
        if form.keys() == {"object", "attributes"} and not self._strict:
            return self._object(form)
        ((kind, content),) = form.items() if len(form) == 1 else [("", None)]
        if kind not in self._forms or (kind in _OF_OTHER_CLASSES and self._strict):
            raise self._place.error(f"an object with the keys {shortly(sorted(map(str, form)))} is no value")
        with self._place.at(kind):
            value = self._forms[kind](content)
        return value

    def read_output(self, form: Any) -> Any:
        """The value of that form, in which there may be what stands for objects of other classes."""
        self._strict = False
        value = self.read(form)
        self._strict = True
        return value

    # ---- parts that have one type ---------------------------------------------------------------------

    def text(self, form: Any) -> str:
        """A text."""
        if type(form) is not str:
            raise self._place.error(f"a text is expected, not {shortly(form)}")
        return form

    def number(self, form: Any) -> Any:
        """A number that a tensor can hold."""
        if type(form) is int and abs(form) < MOST:
            return form
        if type(form) is float and math.isfinite(form):
            return form
        raise self._place.error(f"a number is expected, not {shortly(form)}")

    def whole_number(self, form: Any) -> int:
        """A whole number of 64 bits, sign included."""
        if type(form) is not int or not -(2**63) <= form < 2**63:
            raise self._place.error(f"a whole number is expected, not {shortly(form)}")
        return form

    def whole_numbers(self, form: Any) -> list[int]:
        """A list of them, none below zero."""
        if type(form) is not list:
            raise self._place.error(f"a list of whole numbers is expected, not {shortly(form)}")
        found = [self.whole_number(item) for item in form]
        if any(number < 0 for number in found):
            raise self._place.error(f"{shortly(min(found))} is less than zero")
        return found

    def named(self, table: Any, form: Any) -> Any:
        """What `table` has under that name."""
        if self.text(form) not in table:
            raise self._place.error(f"{shortly(form)} is none of PyTorch's names for this")
        return table[form]

    def device(self, form: Any) -> torch.device:
        """A device; it need not exist on this machine."""
        try:
            return names.device(self.text(form))
        except ValueError as error:
            raise self._place.error(f"{shortly(form)}: {error}") from error

    # ---- what is made of values -------------------------------------------------------------------------

    def _list(self, form: Any) -> list[Any]:
        if type(form) is not list:
            raise self._place.error(f"a list is expected, not {shortly(form)}")
        found = []
        for index, item in enumerate(form):
            with self._place.at(index):
                found.append(self.read(item))
        return found

    def _pairs(self, form: Any) -> list[tuple[Any, Any]]:
        pairs = self._list(form)
        if not all(type(pair) is list and len(pair) == 2 for pair in pairs):
            raise self._place.error("a list of pairs is expected")
        return [(key, item) for key, item in pairs]

    def _dict(self, form: dict[str, Any]) -> dict[Any, Any]:
        result = NamedDict(self.text(form["class"])) if "class" in form else {}
        with self._place.at("dict"):
            for key, item in self._pairs(form["dict"]):
                try:
                    known = key in result
                except TypeError as error:
                    raise self._place.error(f"{shortly(key)} cannot be a key of a dictionary") from error
                if known:
                    raise self._place.error(f"the key {shortly(key)} is there twice")
                result[key] = item
        return result

    def _object(self, form: dict[str, Any]) -> NamedNamespace:
        result = NamedNamespace(self.text(form["object"]))
        self._objects.append(result)  # before its attributes, which may refer to it
        with self._place.at("attributes"):
            for name, item in self._pairs(form["attributes"]):
                # Names of this form belong to Python: an object would no longer behave as one.
                if type(name) is not str or (name.startswith("__") and name.endswith("__")) or name in vars(result):
                    raise self._place.error(f"{shortly(name)} cannot be an attribute, or is one already")
                vars(result)[name] = item
        return result

    def _same(self, form: Any) -> NamedNamespace:
        if not 0 <= self.whole_number(form) < len(self._objects):
            raise self._place.error(f"there is no object number {form} before this place")
        return self._objects[form]

    def _slice(self, form: Any) -> slice:
        bounds = self._list(form)
        if len(bounds) != 3:
            raise self._place.error("a slice has a start, a stop and a step")
        return slice(*bounds)

    def _not_finite(self, form: Any) -> float:
        if self.text(form) not in _NOT_FINITE:
            raise self._place.error(f"one of {', '.join(_NOT_FINITE)} is expected, not {shortly(form)}")
        return _NOT_FINITE[form]

    def _complex(self, form: Any) -> complex:
        parts = self._list(form)
        if len(parts) != 2 or any(type(part) is not float for part in parts):
            raise self._place.error("a complex number is two fractions")
        return complex(*parts)

    def _array(self, form: Any) -> np.ndarray[Any, Any]:
        if type(form) is not list or len(form) != 3:
            raise self._place.error("an array is the type of its elements, its shape and its bytes")
        kind, shape, data = self.text(form[0]), self.whole_numbers(form[1]), self.bytes(form[2])
        try:
            dtype = np.dtype(kind if _ARRAY_TYPE.fullmatch(kind) else "no type")
        except TypeError as error:
            raise self._place.error(f"{shortly(kind)} is no type of numbers") from error
        if len(shape) > 32 or math.prod(shape) * dtype.itemsize != len(data) or (0 in shape and max(shape) > 2**31):
            raise self._place.error(f"{len(data)} bytes do not fill an array of shape {shortly(shape)}")
        if dtype.kind == "b" and any(byte > 1 for byte in data):
            raise self._place.error("a byte of a boolean is 0 or 1")
        return np.frombuffer(bytearray(data), dtype).reshape(shape)

    def bytes(self, form: Any) -> bytes:
        """Bytes, in base64."""
        try:
            return base64.b64decode(self.text(form), validate=True)
        except (binascii.Error, ValueError) as error:
            raise self._place.error(f"these are no bytes in base64 ({error})") from error
