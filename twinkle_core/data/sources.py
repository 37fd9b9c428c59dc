"""What a DatasetMeta points at, to a table of rows (L1)."""

from __future__ import annotations

import bz2
import contextlib
import csv
import gzip
import itertools
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from twinkle_core import hub, settings
from twinkle_core.data import store
from twinkle_core.errors import DataError, NoSuchPath
from twinkle_core.log import get_logger

if TYPE_CHECKING:
    import datasets

_JSON = (".json", ".jsonl", ".ndjson")
_SEPARATED = {".csv": ",", ".tsv": "\t"}
_TYPED = {".parquet": "parquet", ".arrow": "arrow"}
_OPEN: dict[str, Callable[..., IO[Any]]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
#: What a file may be compressed with; some of it Hugging Face's library alone reads.
_PACKED = (*_OPEN, ".zst", ".lz4", ".zip")
#: What libraries write beside data.
_NO_DATA = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
_KNOWN = "json, jsonl, csv, tsv, parquet, arrow, and folders of these"


@dataclass(frozen=True, slots=True)
class DatasetMeta:
    """Where a data set is, and which part of it is wanted.

    Args:
        dataset_id: ``hf://org/name``, ``ms://org/name``, a local file (json, jsonl, csv, tsv, parquet, arrow; json also .gz,
            .bz2, .xz), a folder of them, or a folder written by ``save_as`` or ``datasets``' ``save_to_disk``. With ``data``
            only a name.
        subset_name: the configuration of a hub's data set. A single file, or rows in memory, have ``default`` alone.
        split: ``train``, ``test``, …; the whole of it, and one. A single file, or rows in memory, have ``train`` alone.
        data_slice: indices to take, in this order: a ``range`` or list. One beyond the end starts again at the beginning, with
            a warning.
        data: rows in memory; then nothing is read. No iterator or generator, which could be read only once.

    Values of csv and tsv files are texts, as they are written there.
    """

    dataset_id: str = ""
    subset_name: str = "default"
    split: str = "train"
    data_slice: Sequence[int] | None = None
    data: Iterable[Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        if not self.dataset_id and self.data is None:
            raise DataError.argument("dataset_id", self.dataset_id, "give an id or a path, or rows with data=")
        for name, word in (("subset_name", self.subset_name), ("split", self.split)):
            if not isinstance(word, str) or not word:
                raise DataError.argument(name, word, "it is a name, such as 'train'")
        if re.search(r"[\[\]+]", self.split):
            raise DataError.part(self.split)
        if self.data_slice is not None:
            _check_slice(self.data_slice)
        if self.data is None:
            return
        _check_only(self)
        if isinstance(self.data, (str, Mapping)) or not isinstance(self.data, Iterable):
            raise DataError.argument("data", self.data, "give rows, a list of mappings")
        if isinstance(self.data, Iterator):
            way = "an iterator is empty after its first pass; give list(…), or an object whose iter() starts anew"
            raise DataError.argument("data", self.data, way)

    @classmethod
    def of(cls, source: DatasetMeta | str | Path | Iterable[Mapping[str, Any]]) -> DatasetMeta:
        """Itself, an id or a path alone, or rows in memory (an iterator is read here)."""
        if isinstance(source, DatasetMeta):
            return source
        if isinstance(source, (str, Path)):
            return cls(str(source))
        rows = isinstance(source, Iterable) and not isinstance(source, Mapping)
        return cls(data=list(source) if rows else source)

    @property
    def name(self) -> str:
        """How messages call it."""
        return self.dataset_id or "the data in memory"


def _check_slice(cut: Any) -> None:
    if not isinstance(cut, Sequence) or isinstance(cut, (str, bytes)):
        raise DataError.argument("data_slice", cut, "give a range or a list of whole numbers, such as range(1000)")
    if not isinstance(cut, range):
        for place, index in enumerate(cut):
            if isinstance(index, bool) or not isinstance(index, int):
                raise DataError.argument(f"data_slice[{place}]", index, "give a range or a list of whole numbers")
    if not cut:
        raise DataError.argument("data_slice", cut, "it takes no row at all; leave it out to take all")


def _check_only(meta: DatasetMeta, choices: str = "split subset") -> None:
    """What has a single part has it under the default's name: another one is a mistake, not all rows."""
    given = {"split": (meta.split, "train"), "subset": (meta.subset_name, "default")}
    for what in choices.split():
        name, only = given[what]
        if name != only:
            raise DataError.only(what, name, meta.name, only)


def check_local(meta: DatasetMeta) -> None:
    """What can be told of a local file before it is read.

    Raises:
        HubError: it is not there, or an id without its hub. DataError: it has no such split or subset.
    """
    if meta.data is None and not hub.is_hub_id(meta.dataset_id) and hub.resolve(meta.dataset_id, kind="dataset").is_file():
        _check_only(meta)


def load(meta: DatasetMeta) -> datasets.Dataset:
    """The rows that ``meta`` asks for.

    Raises:
        HubError: it isn't there. DataError: it can't be read, or has no such split or subset.
    """
    table = store.from_rows(meta.data) if meta.data is not None else _read(hub.resolve(meta.dataset_id, kind="dataset"), meta)
    return table if meta.data_slice is None else _take(table, meta)


def check_stream(meta: DatasetMeta) -> None:
    """What can be told of a stream before it is read.

    Raises:
        HubError: a local path that is not there, or an id without its hub. DataError: a slice that a stream can't give, or a
        split or subset that a file does not have.
    """
    if meta.data_slice is not None and not (isinstance(meta.data_slice, range) and _ascends(meta.data_slice)):
        raise DataError.argument("data_slice", meta.data_slice, "a stream can only be cut by an ascending range from 0 up")
    check_local(meta)


def _ascends(cut: range) -> bool:
    return cut.start >= 0 and cut.step > 0


def stream(meta: DatasetMeta) -> Iterator[dict[str, Any]]:
    """The rows one after the other, read as they are asked for. Errors as for ``load``."""
    rows: Iterable[Mapping[str, Any]]
    if meta.data is not None:
        rows = meta.data
    elif meta.dataset_id.startswith(hub.HF):
        rows = _hub_stream(meta)
    else:
        path = hub.resolve(meta.dataset_id, kind="dataset")
        is_text = path.is_file() and _kind(path) in ("json", "csv")
        rows = _text_rows(path) if is_text else store.read_all(_read(path, meta))
    if meta.data_slice is not None:
        cut = meta.data_slice
        assert isinstance(cut, range)
        rows = itertools.islice(rows, cut.start, cut.stop, cut.step)
    return (dict(row) for row in rows)


def _hub_stream(meta: DatasetMeta) -> Iterable[dict[str, Any]]:
    datasets: Any = store.library()
    if settings.offline():  # its own cache then
        return store.read_all(_read(hub.resolve(meta.dataset_id, kind="dataset"), meta))
    name = None if meta.subset_name == "default" else meta.subset_name
    try:
        rows: Iterable[dict[str, Any]] = datasets.load_dataset(
            meta.dataset_id.removeprefix(hub.HF), name, split=meta.split, streaming=True
        )
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as cause:
        raise DataError.loading(meta.name, cause) from cause
    return rows


def _take(table: datasets.Dataset, meta: DatasetMeta) -> datasets.Dataset:
    indices, total = list(meta.data_slice or ()), len(table)
    if indices and total == 0:
        raise DataError.empty(meta.name)
    beyond = sum(not -total <= i < total for i in indices)
    if beyond:
        get_logger("data").warning(
            "data_slice asks for %d rows beyond the %d of %s; rows from its beginning are repeated", beyond, total, meta.name
        )
    return table.select([i % total for i in indices])


def _read(path: Path, meta: DatasetMeta) -> datasets.Dataset:
    if path.is_dir():
        return _read_folder(path, meta)
    _check_only(meta)
    kind = _kind(path)
    if kind in ("json", "csv"):
        return store.from_rows(_text_rows(path))
    if kind is None:
        raise DataError.format(path, _KNOWN)
    return _typed(kind, meta, [path])


def _kind(path: Path) -> str | None:
    """json, csv, parquet or arrow; None: not known."""
    return "json" if _is_json(path) else "csv" if path.suffix in _SEPARATED else _TYPED.get(path.suffix)


def _text_rows(path: Path) -> Iterator[dict[str, Any]]:
    return json_rows(path) if _is_json(path) else csv_rows(path)


def _read_folder(path: Path, meta: DatasetMeta) -> datasets.Dataset:
    datasets: Any = store.library()
    if (path / "dataset_dict.json").is_file():
        _check_only(meta, "subset")
        splits = datasets.load_from_disk(str(path))
        if meta.split not in splits:
            raise DataError.choice("split", meta.split, meta.name, map(str, splits))
        found: datasets.Dataset = splits[meta.split]
        return found
    if (path / "state.json").is_file():
        _check_only(meta)
        table: datasets.Dataset = datasets.load_from_disk(str(path))
        return table
    there = [] if _declared(path) else _data_files(path)
    if not hub.is_hub_id(meta.dataset_id):
        _check_one_format(path, there)
    try:
        names = datasets.get_dataset_config_names(str(path))
        if meta.subset_name not in names and not (meta.subset_name == "default" and len(names) == 1):
            raise DataError.choice("subset", meta.subset_name, meta.name, names)
        subset = meta.subset_name if meta.subset_name in names else names[0]
        files = datasets.load_dataset_builder(str(path), name=subset).config.data_files
    except (FileNotFoundError, datasets.exceptions.DatasetsError) as cause:  # nothing in the folder is data
        raise NoSuchPath.empty(meta.name, _KNOWN) from cause
    except ValueError as cause:  # splits of different formats
        raise DataError.loading(meta.name, cause) from cause
    if meta.split not in files:
        raise DataError.choice("split", meta.split, meta.name, map(str, files))
    paths, strange = _part(Path(str(p)) for p in files[meta.split])
    if not paths:
        raise NoSuchPath.empty(meta.name, _KNOWN)
    used = {Path(str(p)).resolve() for of_split in files.values() for p in of_split}
    if left := [*strange, *(str(p.relative_to(path)) for p in there if p.resolve() not in used)]:
        get_logger("data").warning(
            "%s: files that are no part of a split are left out (%s); the split %r is %s. Name files alike, or give the file "
            "that is meant",
            *(meta.name, ", ".join(left), meta.split, ", ".join(p.name for p in paths)),
        )
    if all(_kind(p) in ("json", "csv") for p in paths):
        return store.from_rows(row for p in paths for row in _text_rows(p))
    kinds = {_kind(p) for p in paths}
    if strange and kinds <= {*_TYPED.values()}:
        return _typed(str(kinds.pop()), meta, paths)
    try:
        made: datasets.Dataset = datasets.load_dataset(str(path), name=subset, split=meta.split)
    except (ValueError, TypeError, datasets.exceptions.DatasetsError) as cause:
        raise DataError.loading(f"{meta.name} ({_some(paths)})", cause.__cause__ or cause) from cause
    return made


def _part(paths: Iterable[Path]) -> tuple[list[Path], list[str]]:
    """Files that are data, and the names of those that only begin like data: ``rows.jsonl.bak``, which Hugging Face's library
    would read as the data itself.
    """
    found = list(paths)
    strange = [p for p in found if not _kind(p) and p.suffix not in _PACKED and _kind(p.with_suffix(""))]
    return [p for p in found if p not in strange], [p.name for p in strange]


def _some(paths: Sequence[Path]) -> str:
    return ", ".join(p.name for p in paths[:3]) + (", ..." if len(paths) > 3 else "")


def _declared(path: Path) -> bool:
    """Whether the data set's card says which files are data."""
    card = path / "README.md"
    return card.is_file() and re.search(r"^configs:", card.read_text("utf-8", "replace"), re.MULTILINE) is not None


def _data_files(path: Path) -> list[Path]:
    """All files in a folder that could be data, hidden ones apart."""
    found = (p for p in sorted(path.rglob("*")) if _kind(p) and p.name not in _NO_DATA and p.is_file())
    return [p for p in found if not any(name.startswith((".", "__")) for name in p.relative_to(path).parts)]


def _check_one_format(path: Path, files: Iterable[Path]) -> None:
    kinds: dict[str, list[str]] = {}
    for file in files:
        kinds.setdefault(_kind(file) or "", []).append(str(file.relative_to(path)))
    if len(kinds) > 1:
        raise DataError.formats(path, kinds)


def _typed(kind: str, meta: DatasetMeta, files: Sequence[Path]) -> datasets.Dataset:
    datasets: Any = store.library()
    try:
        table: datasets.Dataset = datasets.load_dataset(kind, data_files={meta.split: [*map(str, files)]}, split=meta.split)
    except (ValueError, TypeError, OSError, datasets.exceptions.DatasetsError) as cause:
        raise DataError.loading(", ".join(map(str, files)), cause.__cause__ or cause) from cause
    return table


def _is_json(path: Path) -> bool:
    inner = path.with_suffix("") if path.suffix in _OPEN else path
    return inner.suffix in _JSON


def json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSON Lines file, or of a JSON file: a list of objects, an object with such a list under ``data`` or ``rows``,
    or JSON Lines under that name.
    """
    inner = path.with_suffix("") if path.suffix in _OPEN else path
    with _told(path), _OPEN.get(path.suffix, open)(path, "rb") as file:
        if inner.suffix != ".json":
            yield from _lines(path, file)
            return
        try:
            value = json.loads(file.read().decode("utf-8-sig"))
        except json.JSONDecodeError as cause:
            if not cause.msg.startswith("Extra data"):
                raise DataError.line(path, cause.lineno, str(cause)) from cause
            file.seek(0)
            yield from _lines(path, file)
            return
    yield from _document(path, value)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """What can go wrong in reading a file's bytes, with the file's name."""
    try:
        yield
    except UnicodeDecodeError as cause:
        raise DataError.encoding(path, cause) from cause
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as cause:  # a damaged or cut compressed file
        raise DataError.loading(path, cause) from cause
    except RecursionError as cause:
        raise DataError.loading(path, "its values are nested too deep") from cause


def _lines(path: Path, file: IO[bytes]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except json.JSONDecodeError as cause:
            raise DataError.line(path, number, str(cause)) from cause
        except UnicodeDecodeError as cause:
            raise DataError.encoding(f"{path}, line {number}", cause) from cause
        if not isinstance(row, dict):
            raise DataError.line(path, number, f"it is a {type(row).__name__}")
        yield row


def _document(path: Path, value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        value = next((value[key] for key in ("data", "rows") if isinstance(value.get(key), list)), [value])
    if not isinstance(value, list):
        raise DataError.loading(path, f"it holds a {type(value).__name__}, not a list of objects")
    for index, row in enumerate(value):
        if not isinstance(row, dict):
            raise DataError.not_rows(index, row)
        yield row


def csv_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a csv or tsv file with a header. Every value is the text that is written there: nothing is guessed to be a
    number or to be absent, or 007 and NA would be lost.
    """
    limit = csv.field_size_limit(2**31 - 1)  # the csv library's own, for the whole process, is 128 KiB
    try:
        with _told(path), path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file, delimiter=_SEPARATED[path.suffix], strict=True)
            try:
                names = next(lines, [])
                if len(set(names)) != len(names):
                    raise DataError.loading(path, f"two columns have one name in its header {names}")
                for values in lines:
                    if len(values) not in (0, len(names)):
                        why = f"{len(values)} values for the {len(names)} columns {names}"
                        raise DataError.loading(f"{path}, line {lines.line_num}", why)
                    if values:
                        yield dict(zip(names, values, strict=True))
            except csv.Error as cause:
                raise DataError.loading(f"{path}, line {lines.line_num}", cause) from cause
    finally:
        csv.field_size_limit(limit)
