"""Batches on disk: one safetensors file that holds no code.

Tensors are stored as such; everything else is stored as JSON in the tensor `__json__` (UTF-8 bytes). None, bool, int,
float, str and lists are plain JSON values. The other supported kinds (dict, tuple, bytes, decimals, dates and times,
NumPy arrays and scalars, tensors in an entry) are JSON objects whose key "$" states the kind. Anything else is refused
by name, because only data can be read back without running code.
"""

import base64
import datetime
import json
import os
import tempfile
import uuid
import zoneinfo
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tensordict import TensorDict, TensorDictBase

from hybridrl.errors import UserError
from hybridrl.protocol.rows import fields_of, jagged_parts, object_array
from hybridrl.utils.files import use_umask

FORMAT = "hybridrl.dataproto.1"
JSON = "__json__"

# Dtypes that the safetensors format does not support.
_UNKNOWN = frozenset({torch.complex32, torch.complex128})


#: single values that Parquet has columns of, as text and back
_AS_TEXT: dict[type, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    Decimal: (str, Decimal),
    datetime.date: (datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.timedelta: (
        lambda value: f"{value.days} {value.seconds} {value.microseconds}",
        lambda text: datetime.timedelta(*map(int, text.split())),
    ),
    uuid.UUID: (str, uuid.UUID),
}
_KINDS_OF_TEXT = {kind.__name__: kind for kind in _AS_TEXT}


class StorageError(UserError):
    """A batch cannot be stored, or a file is not a stored batch."""


class _Writer:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.names: dict[Any, str] = {}
        self.alive: list[torch.Tensor] = []
        self.storages: set[int] = set()

    def tensor(self, value: torch.Tensor, where: str) -> Any:
        if value.is_nested:
            if value.layout is not torch.jagged:
                return {"$": "nested", "rows": [self.tensor(row, where) for row in value.unbind()]}
            values, offsets, dim = jagged_parts(value)
            parts = {"values": self.tensor(values, where), "offsets": self.tensor(offsets, where)}
            return {"$": "jagged", "dim": dim, **parts}
        spread = type(value).__module__.startswith("torch.distributed")
        if value.layout is not torch.strided or value.dtype in _UNKNOWN or value.is_quantized or spread:
            raise StorageError(f"{where}: a {type(value).__name__} of {value.layout}, {value.dtype} cannot be stored")
        value = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        same_memory = (value.data_ptr(), value.shape, value.dtype) if value.numel() else object()
        self.alive.append(value)  # an address identifies its tensor only while the tensor lives
        name = self.names.setdefault(same_memory, str(len(self.tensors)))
        if name not in self.tensors:
            storage = value.untyped_storage()
            if storage.nbytes() != value.numel() * value.element_size() or storage.data_ptr() in self.storages:
                value = value.clone()  # safetensors refuses tensors that share one storage
            self.storages.add(value.untyped_storage().data_ptr())
            self.tensors[name] = value
        return {"$": "tensor", "name": name}

    def tensordict(self, value: TensorDictBase, where: str) -> Any:
        fields = {key: self.value(field, f"{where}[{key!r}]") for key, field in fields_of(value).items()}
        return {"$": "tensordict", "fields": fields, "batch_size": list(value.batch_size)}

    def array(self, value: np.ndarray, where: str) -> Any:
        if value.dtype == object:
            entries = [self.value(entry, f"{where}[{row}]") for row, entry in enumerate(value.ravel().tolist())]
            return {"$": "objects", "shape": list(value.shape), "values": entries}
        if value.dtype.kind == "U":
            entries = value.ravel().tolist()
            return {"$": "strings", "dtype": value.dtype.str, "shape": list(value.shape), "values": entries}
        if value.dtype.kind not in "biufc" or value.dtype.itemsize > 16 or value.dtype == np.longdouble:
            raise StorageError(f"{where}: a NumPy array of dtype {value.dtype} cannot be stored; convert it to object")
        data = np.ascontiguousarray(value.astype(value.dtype.newbyteorder("="), copy=False))
        return {"$": "array", "tensor": self.tensor(torch.from_numpy(data.copy()).reshape(value.shape), where)}

    def value(self, value: Any, where: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is list:
            return [self.value(entry, f"{where}[{i}]") for i, entry in enumerate(value)]
        if kind is tuple:
            return {"$": "tuple", "values": [self.value(entry, f"{where}[{i}]") for i, entry in enumerate(value)]}
        if kind is dict:
            keys = [self.value(key, f"{where} (key {key!r})") for key in value]
            return {"$": "dict", "keys": keys, "values": [self.value(v, f"{where}[{k!r}]") for k, v in value.items()]}
        if kind in _AS_TEXT:
            return {"$": "text", "kind": kind.__name__, "text": _AS_TEXT[kind][0](value)}
        if kind in (datetime.datetime, datetime.time) and _zone_of(value) is not None:
            plain = value.replace(tzinfo=None).isoformat()
            return {"$": "time", "kind": kind.__name__, "text": plain, "zone": _zone_of(value), "fold": value.fold}
        if kind.__module__.split(".")[0] == "pandas" and kind.__name__ in ("Timestamp", "Timedelta"):
            zone = _zone_of(value) if kind.__name__ == "Timestamp" else ""
            if zone is not None:
                return {"$": "pandas", "kind": kind.__name__, "value": value.value, "unit": value.unit, "zone": zone}
        if kind is bytes:
            return {"$": "bytes", "base64": base64.b64encode(value).decode()}
        if isinstance(value, torch.Tensor):
            return self.tensor(value, where)
        if isinstance(value, np.ndarray):
            return self.array(value, where)
        if isinstance(value, np.generic):
            return {"$": "scalar", "array": self.array(np.asarray(value), where)}
        if kind is TensorDict:
            return self.tensordict(value, where)
        raise StorageError(
            f"{where}: an object of type {kind.__module__}.{kind.__qualname__} cannot be stored, because reading it "
            "back would run code. Stored are None, bool, int, float, str, bytes, list, tuple, dict, decimals, dates, "
            "times, NumPy arrays and tensors: convert it to one of these, or drop the field with pop() before saving"
        )


def _zone_of(value: Any) -> str | float | None:
    """The name of a zone, the seconds of a fixed offset, or an empty text for none; None: it cannot be stored."""
    zone = value.tzinfo
    if zone is None:
        return ""
    name = getattr(zone, "key", None) or getattr(zone, "zone", None)  # of the standard library, and of pytz
    if isinstance(name, str):
        return name
    return zone.utcoffset(None).total_seconds() if isinstance(zone, datetime.timezone) else None


def _as_zone(zone: str | float) -> datetime.tzinfo | None:
    if isinstance(zone, str):
        return zoneinfo.ZoneInfo(zone) if zone else None
    return datetime.timezone(datetime.timedelta(seconds=zone))


class _Reader:
    def __init__(self, tensors: Any) -> None:
        self.tensors = tensors
        self.offsets: dict[str, torch.Tensor] = {}

    def value(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.value(entry) for entry in value]
        if not isinstance(value, dict):
            return value
        return _KINDS[value["$"]](self, value)

    def _tensor(self, value: dict[str, Any]) -> torch.Tensor:
        return self.tensors.get_tensor(value["name"])

    def _jagged(self, value: dict[str, Any]) -> torch.Tensor:
        # Tensors that shared their offsets share them again, because torch combines jagged tensors only then.
        name, values = value["offsets"]["name"], self._tensor(value["values"])
        offsets = self.offsets.setdefault(name, self._tensor(value["offsets"]))
        return torch.nested.nested_tensor_from_jagged(values, offsets=offsets, jagged_dim=value["dim"])

    def _nested(self, value: dict[str, Any]) -> torch.Tensor:
        return torch.nested.nested_tensor([self._tensor(row) for row in value["rows"]])

    def _tensordict(self, value: dict[str, Any]) -> TensorDict:
        return TensorDict({k: self.value(v) for k, v in value["fields"].items()}, batch_size=value["batch_size"])

    def _objects(self, value: dict[str, Any]) -> np.ndarray:
        return object_array(self.value(value["values"])).reshape(value["shape"])

    def _strings(self, value: dict[str, Any]) -> np.ndarray:
        dtype = np.dtype(value["dtype"])
        if dtype.kind != "U":
            raise ValueError(f"strings of dtype {dtype}")
        return np.array(value["values"], dtype=dtype).reshape(value["shape"])

    def _array(self, value: dict[str, Any]) -> np.ndarray:
        return self._tensor(value["tensor"]).numpy()

    def _scalar(self, value: dict[str, Any]) -> Any:
        return self.value(value["array"])[()]

    def _tuple(self, value: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(self.value(value["values"]))

    def _dict(self, value: dict[str, Any]) -> dict[Any, Any]:
        return dict(zip(self.value(value["keys"]), self.value(value["values"]), strict=True))

    def _text(self, value: dict[str, Any]) -> Any:
        return _AS_TEXT[_KINDS_OF_TEXT[value["kind"]]][1](value["text"])

    def _time(self, value: dict[str, Any]) -> datetime.datetime | datetime.time:
        kind = datetime.datetime if value["kind"] == "datetime" else datetime.time
        plain: Any = kind.fromisoformat(value["text"])
        return plain.replace(tzinfo=_as_zone(value["zone"]), fold=value["fold"])

    def _pandas(self, value: dict[str, Any]) -> Any:
        import pandas

        if value["kind"] == "Timedelta":
            return pandas.Timedelta(value["value"], unit="ns").as_unit(value["unit"])
        plain = pandas.Timestamp(value["value"], unit="ns", tz="UTC").as_unit(value["unit"])
        return plain.tz_convert(_as_zone(value["zone"]))

    def _bytes(self, value: dict[str, Any]) -> bytes:
        return base64.b64decode(value["base64"])


_KINDS: dict[str, Callable[[_Reader, dict[str, Any]], Any]] = {
    "tensor": _Reader._tensor,
    "jagged": _Reader._jagged,
    "nested": _Reader._nested,
    "tensordict": _Reader._tensordict,
    "objects": _Reader._objects,
    "strings": _Reader._strings,
    "array": _Reader._array,
    "scalar": _Reader._scalar,
    "tuple": _Reader._tuple,
    "dict": _Reader._dict,
    "bytes": _Reader._bytes,
    "text": _Reader._text,
    "time": _Reader._time,
    "pandas": _Reader._pandas,
}


def save(path: str | os.PathLike[str], batch: TensorDictBase | None, non_tensors: dict[str, Any], meta: dict) -> None:
    """Write the three parts of a batch to `path`: first to a file next to it, which is then renamed to `path`.

    Raises:
        StorageError: a value cannot be stored (the message names its field and row), or the file could not be written.
            An existing file is left unchanged.
    """
    writer = _Writer()
    document = {
        "format": FORMAT,
        "batch": None if batch is None else writer.tensordict(batch, "batch"),
        "non_tensor_batch": {k: writer.array(v, f"non_tensor_batch[{k!r}]") for k, v in non_tensors.items()},
        "meta_info": writer.value(dict(meta), "meta_info"),
    }
    text = json.dumps(document, separators=(",", ":")).encode()
    writer.tensors[JSON] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=target.name + ".", suffix=".writing", dir=target.parent)
    os.close(handle)
    try:
        save_file(writer.tensors, temporary, metadata={"format": FORMAT})
        use_umask(Path(temporary))
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, SafetensorError):  # how safetensors reports errors of the operating system
            raise StorageError(f"{path}: the batch could not be written: {error}") from error
        raise


def load(path: str | os.PathLike[str]) -> tuple[TensorDict | None, dict[str, np.ndarray], dict[str, Any]]:
    """Read what `save` wrote, without executing any code from the file.

    Raises:
        FileNotFoundError: there is no such file.
        StorageError: the file is not a stored batch, or it is corrupt.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no stored batch at {path}")
    try:
        with safe_open(path, framework="pt") as tensors:
            if (tensors.metadata() or {}).get("format") != FORMAT:
                raise StorageError(f"{path}: a safetensors file, but not one that DataProto.save_to_disk wrote")
            document = json.loads(tensors.get_tensor(JSON).numpy().tobytes())
            reader = _Reader(tensors)
            batch = None if document["batch"] is None else reader.value(document["batch"])
            non_tensors = {key: reader.value(value) for key, value in document["non_tensor_batch"].items()}
            return batch, non_tensors, reader.value(document["meta_info"])
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise StorageError(
            f"{path}: not a batch stored by DataProto.save_to_disk, or damaged ({error}). Pickled files are not read: "
            "they could run code"
        ) from error
