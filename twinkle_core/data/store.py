"""How rows lie in an Arrow table without being changed by it (L1).

Arrow gives every row of a column one type: a key that one conversation's tool arguments have would appear as None in all
others, and 1 beside 1.5 would become 1.0. So rows that twinkle makes are kept as JSON text in one column, and only token ids
beside it as integers. What JSON lacks and rows with images need (bytes, pictures, arrays of several axes) lies in that text as
base64, and comes back as it was; a picture upright. Tables that come typed already (csv, parquet, arrow) stay as they are until
they are mapped.
"""

from __future__ import annotations

import base64
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from twinkle_core.errors import DataError, NeedsLibrary

if TYPE_CHECKING:
    import datasets

#: The column of rows as JSON text; a table that has it was written by twinkle.
ROW = "twinkle_row"
#: The key of a value that JSON lacks, beside what it is.
BINARY = "twinkle_binary"
#: Lists of whole numbers that get a column of their own.
IDS = ("input_ids", "labels")

Row = dict[str, Any]


def library() -> Any:
    """The library of tables.

    Raises:
        NeedsLibrary: it is not installed.
    """
    try:
        import datasets
    except ImportError as cause:
        raise NeedsLibrary("a data set", "datasets", "twinkle-core[data]", sys.prefix) from cause
    return datasets


def from_rows(rows: Iterable[Mapping[str, Any]]) -> datasets.Dataset:
    """A table of rows in memory."""
    datasets: Any = library()
    texts: list[str] = []
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError.not_rows(index, row)
        texts.append(dumps(row, index))
    table: datasets.Dataset = datasets.Dataset.from_dict({ROW: texts}, features=_features(encoded=False))
    return table


def is_kept(table: datasets.Dataset) -> bool:
    """Whether rows lie as JSON text."""
    return ROW in table.column_names


def read(table: datasets.Dataset, index: int) -> Row:
    """One row, with its values as they were put in."""
    return unpack(table[index])


def read_all(table: datasets.Dataset, batch_size: int = 256) -> Iterator[Row]:
    """All rows in order; faster than one by one."""
    for start in range(0, len(table), batch_size):
        columns = table[start : start + batch_size]
        names = list(columns)
        for values in zip(*columns.values(), strict=True):
            yield unpack(dict(zip(names, values, strict=True)))


def unpack(cells: Mapping[str, Any]) -> Row:
    """The cells of one table row to the row."""
    if ROW not in cells:
        return dict(cells)
    text = cells[ROW]
    row: Row = json.loads(text, object_hook=_restored) if BINARY in text else json.loads(text)
    row.update({name: cells[name] for name in IDS if cells.get(name) is not None})
    return row


def check_flag(name: str, value: Any) -> None:
    """Raise DataError unless it is True or False: a text that says "false" would count as true."""
    if not isinstance(value, bool):
        raise DataError.argument(name, value, "True or False")


def map_rows(
    table: datasets.Dataset,
    function: Callable[[Row, int], Sequence[Mapping[str, Any]]],
    *,
    encoded: bool,
    num_proc: int | None,
    description: str,
) -> tuple[datasets.Dataset, int]:
    """Each row to any number of rows.

    Args:
        function: (row, index) -> rows.
        encoded: whether the new rows hold token ids.
        num_proc: processes; None: this one.

    Returns:
        The new table, and how many rows gave none.
    """
    if num_proc is not None and (isinstance(num_proc, bool) or not isinstance(num_proc, int) or num_proc < 1):
        raise DataError.argument("num_proc", num_proc, "a whole number of at least 1, or None for this process")
    total = len(table)
    if total == 0:
        return from_rows(()), 0
    names = list(table.column_names)

    def work(columns: Mapping[str, Sequence[Any]], indices: Sequence[int]) -> dict[str, list[Any]]:
        out: dict[str, list[Any]] = {name: [] for name in (ROW, "source", *(IDS if encoded else ()))}
        for at, index in enumerate(indices):
            row = unpack({name: columns[name][at] for name in names})
            for new in function(row, index):
                _put(out, new, index, encoded)
        return out

    import datasets

    features = _features(encoded)
    new = table.map(
        work,
        batched=True,
        batch_size=64,
        with_indices=True,
        remove_columns=names,
        features=datasets.Features({**features, "source": datasets.Value("int64")}),
        num_proc=num_proc,
        load_from_cache_file=False,
        new_fingerprint=datasets.fingerprint.generate_random_fingerprint(),  # hashing a tokenizer costs more than encoding
        desc=description,
    )
    kept = len(set(new.data.column("source").to_pylist())) if len(new) else 0
    return new.remove_columns("source"), total - kept


def _put(out: dict[str, list[Any]], row: Mapping[str, Any], source: int, encoded: bool) -> None:
    rest = dict(row)
    if encoded:
        for name in IDS:
            value = rest.get(name)
            out[name].append(rest.pop(name) if _is_ids(value) else None)
    out[ROW].append(dumps(rest, source))
    out["source"].append(source)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and type(value[0]) is int and all(type(v) is int for v in value)


def join(tables: Sequence[datasets.Dataset]) -> datasets.Dataset:
    """Tables one after the other, whatever their columns."""
    import datasets

    if len(tables) == 1:
        return tables[0]
    if any(t.features != tables[0].features for t in tables):
        encoded = any(name in t.column_names for t in tables for name in IDS if is_kept(t))
        tables = [_keep(t, encoded) for t in tables]
    return datasets.concatenate_datasets(list(tables))


def _keep(table: datasets.Dataset, encoded: bool) -> datasets.Dataset:
    return map_rows(table, lambda row, _: [row], encoded=encoded, num_proc=None, description="joining")[0]


def _features(encoded: bool) -> datasets.Features:
    import datasets

    ids = datasets.Sequence(datasets.Value("int32"))
    columns: dict[str, Any] = {ROW: datasets.Value("large_string")}
    return datasets.Features({**columns, **dict.fromkeys(IDS, ids)} if encoded else columns)


def dumps(row: Mapping[str, Any], index: int) -> str:
    """A row as JSON text.

    Raises:
        DataError: it holds what JSON or UTF-8 can't.
    """
    try:
        text = json.dumps(row, ensure_ascii=False, default=_plain, separators=(",", ":"))
        if not text.isascii():
            text.encode()
        if (odd := _other_key(row)) is not None:  # JSON would make a text of it in silence
            raise DataError.key(odd.value)
    except UnicodeEncodeError as cause:
        near = cause.object[max(cause.start - 20, 0) : cause.end + 5]
        raise DataError.in_row("a data set", index, DataError.half_character(near)) from cause
    except DataError as cause:
        raise DataError.in_row("a data set", index, cause) from cause
    except (TypeError, ValueError, RecursionError) as cause:  # keys that are no text, a circle, too deep
        raise DataError.in_row("a data set", index, DataError.unkept(cause)) from cause
    return text


_TEXT = {str}
_LEAVES = {str, int, float, bool, type(None)}


class _Key(NamedTuple):
    value: Any  # None too may be a key


def _other_key(value: Any) -> _Key | None:
    """The first key in a value that is no text. Looks at types in bulk: each row passes here."""
    if isinstance(value, dict):
        if _types(value) != _TEXT:
            for key in value:
                if not isinstance(key, str):
                    return _Key(key)
        value = value.values()
    if _types(value) <= _LEAVES:
        return None
    inner = (v for v in value if isinstance(v, (dict, list, tuple)))
    return next((found for v in inner if (found := _other_key(v)) is not None), None)


def _types(values: Iterable[Any]) -> set[type]:
    return set(map(type, values))


def _plain(value: Any) -> Any:
    """Arrays of one axis as lists, dates as text, and what ``_restored`` reads; nothing else can be kept in a table."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _binary("bytes", bytes(value))
    if isinstance(value, PurePath):
        return str(value)
    if len(getattr(value, "shape", ())) > 1 and hasattr(value, "__array__"):
        array = _numpy().ascontiguousarray(value)
        if not array.dtype.hasobject:
            return _binary("array", array.tobytes(), dtype=array.dtype.str, shape=list(array.shape))
    if "PIL" in sys.modules and isinstance(value, sys.modules["PIL.Image"].Image):
        return _binary("picture", _png(value))
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise DataError.value("a data set's row", "a value", value, "something that JSON can hold (text, numbers, lists, mappings)")


def _binary(what: str, data: bytes, **more: Any) -> dict[str, Any]:
    return {BINARY: what, "data": base64.b64encode(data).decode("ascii"), **more}


def _restored(value: dict[str, Any]) -> Any:
    what = value.get(BINARY)
    if what not in ("bytes", "array", "picture") or not isinstance(value.get("data"), str):
        return value
    data = base64.b64decode(value["data"])
    if what == "array":
        return _numpy().frombuffer(bytearray(data), dtype=value["dtype"]).reshape(value["shape"])
    if what == "picture":
        from PIL import Image

        return Image.open(io.BytesIO(data))
    return data


def _png(picture: Any) -> bytes:
    from PIL import ImageOps

    picture = ImageOps.exif_transpose(picture)
    if picture.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        picture = picture.convert("RGB")
    out = io.BytesIO()
    picture.save(out, format="PNG", compress_level=1)
    return out.getvalue()


def _numpy() -> Any:
    import numpy

    return numpy
