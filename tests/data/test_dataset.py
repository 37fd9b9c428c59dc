"""Data sets: sources, values that survive, mapping, encoding."""

from __future__ import annotations

import gzip
import json
import logging
import sys

import datasets
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twinkle_core.contracts.template import Template
from twinkle_core.data.dataset import Dataset, DatasetMeta, LazyDataset
from twinkle_core.data.streaming import IterableDataset
from twinkle_core.errors import BareId, DataError, NeedsLibrary, NoSuchPath, UnknownName, WrongArgument, WrongType
from twinkle_core.templates.chat import ChatTemplate
from twinkle_core.testing.tokenizers import chatml_tokenizer, toy_t_tokenizer


def calling(name, arguments, **more):
    return {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}], **more}


CALLS = [
    {"messages": [{"role": "user", "content": "hi"}, calling("a", {"x": 1}, content=None)]},
    {"messages": [calling("b", {"y": 1.5, "z": None, "l": [1, "a"]}, content="")], "tools": [{"p": {}}]},
]


@pytest.fixture(autouse=True)
def _quiet(tmp_path, monkeypatch):
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def talk(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return str(path)


# ------------------------------------------------------------------------------------------------ sources


def test_rows_in_memory_survive_unchanged():
    """A table would give every call the keys of all others, filled with None, and make 1 of 1.5's column a float."""
    dataset = Dataset(CALLS)
    assert list(dataset) == CALLS
    assert [dataset[0], dataset[-1], *dataset[0:2]] == [*CALLS, *CALLS]
    assert len(dataset) == 2
    with pytest.raises(IndexError):
        dataset[2]


@pytest.mark.parametrize("name", ["out.jsonl", "out.json", "out.parquet", "folder"])
def test_what_save_as_writes_is_read_back_the_same(name, tmp_path):
    path = Dataset(CALLS).save_as(tmp_path / "new" / name)
    assert list(Dataset(path)) == CALLS


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet", "folder"])
def test_encoded_rows_are_saved_too(name, tmp_path):
    dataset = Dataset([talk("hi", "yo"), talk("ok", "go")])
    dataset.set_template("chat", model_id=toy_t_tokenizer())
    dataset.encode()
    assert list(Dataset(dataset.save_as(tmp_path / name))) == list(dataset)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": {"x": 1}}\n\n{"a": {"y": 2}}\n',
        '[{"a": {"x": 1}}, {"a": {"y": 2}}]',
        '{"data": [{"a": {"x": 1}}, {"a": {"y": 2}}]}',
    ],
)
def test_json_in_its_forms(text, tmp_path):
    (tmp_path / "rows.json").write_text(text)
    assert list(Dataset(tmp_path / "rows.json")) == [{"a": {"x": 1}}, {"a": {"y": 2}}]


def test_compressed_json_and_typed_files(tmp_path):
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.write('{"a": 1}\n')
    assert list(Dataset(tmp_path / "rows.jsonl.gz")) == [{"a": 1}]
    (tmp_path / "rows.csv").write_text("q,a\nhi,yo\n")
    (tmp_path / "rows.tsv").write_text("q\ta\nhi, you\tyo\n")
    assert list(Dataset(tmp_path / "rows.csv")) == [{"q": "hi", "a": "yo"}]
    assert list(Dataset(tmp_path / "rows.tsv")) == [{"q": "hi, you", "a": "yo"}]
    plain = datasets.Dataset.from_list([{"q": "hi"}, {"q": "yo"}])
    plain.to_parquet(str(tmp_path / "rows.parquet"))
    plain.save_to_disk(str(tmp_path / "disk"))
    datasets.DatasetDict({"train": plain, "test": plain.select([1])}).save_to_disk(str(tmp_path / "splits"))
    assert list(Dataset(tmp_path / "rows.parquet")) == list(Dataset(tmp_path / "disk")) == [{"q": "hi"}, {"q": "yo"}]
    assert list(Dataset(DatasetMeta(str(tmp_path / "splits"), split="test"))) == [{"q": "yo"}]
    arrow = next((tmp_path / "disk").glob("*.arrow"))
    assert list(Dataset(arrow)) == [{"q": "hi"}, {"q": "yo"}]


def test_a_folder_with_splits_and_subsets(tmp_path):
    write(tmp_path / "train.jsonl", [{"a": {"x": 1}}, {"a": {"y": 1}}])
    write(tmp_path / "test.jsonl", [{"a": {"z": 1}}])
    assert list(Dataset(tmp_path)) == [{"a": {"x": 1}}, {"a": {"y": 1}}]
    assert list(Dataset(DatasetMeta(str(tmp_path), split="test"))) == [{"a": {"z": 1}}]
    with pytest.raises(DataError, match="no split 'dev'; it has 'train', 'test'"):
        Dataset(DatasetMeta(str(tmp_path), split="dev"))
    with pytest.raises(DataError, match="no subset 'zh'; it has 'default'"):
        Dataset(DatasetMeta(str(tmp_path), subset_name="zh"))


@pytest.mark.parametrize("kind", [Dataset, LazyDataset, IterableDataset])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "saved", "memory"])
@pytest.mark.parametrize(
    ("part", "told"), [({"split": "test"}, "no split 'test'; it has 'train' alone"), ({"subset_name": "zh"}, "no subset 'zh'")]
)
def test_what_has_one_part_has_no_other(kind, name, part, told, tmp_path):
    """All rows in place of a split that is not there would evaluate on what was trained on."""
    rows = [{"a": 1}, {"a": 2}]
    if name != "memory":
        Dataset(rows).save_as(tmp_path / name)
    source = {"data": rows} if name == "memory" else {"dataset_id": str(tmp_path / name)}
    assert list(kind(DatasetMeta(**source, split="train", subset_name="default"))) == rows
    with pytest.raises(DataError, match=rf"{told}[\s\S]*data_slice"):
        list(kind(DatasetMeta(**source, **part)))


@pytest.mark.parametrize("split", ["train[:1]", "train[:10%]", "train+test", "[1:]"])
def test_a_part_of_a_split_is_refused_with_the_way_to_it(split, tmp_path):
    for path in (write(tmp_path / "a" / "x.jsonl", [{"a": 1}]), tmp_path / "a", "hf://org/name"):
        with pytest.raises(DataError, match=r"a split is one name, such as 'train'[\s\S]*data_slice=range"):
            DatasetMeta(str(path), split=split)


def test_subsets_are_those_of_the_data_sets_card(tmp_path):
    write(tmp_path / "zh.jsonl", [{"a": "你"}])
    write(tmp_path / "en.jsonl", [{"a": "you"}])
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: zh\n  data_files: zh.jsonl\n- config_name: en\n  data_files: en.jsonl\n---\n"
    )
    assert list(Dataset(DatasetMeta(str(tmp_path), subset_name="en"))) == [{"a": "you"}]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda p: "org/name", BareId, "'hf://org/name'"),
        (lambda p: p / "none.jsonl", NoSuchPath, "does not exist"),
        (lambda p: p, NoSuchPath, "holds no data"),
        (lambda p: write(p / "a.xlsx", []), DataError, "unknown format of data; the known ones are json"),
        (lambda p: write(p / "a.jsonl", [{"a": 1}, 7]), DataError, "a.jsonl, line 2: not a JSON object"),
    ],
)
def test_bad_sources_are_told(make, error, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=text):
        Dataset(make(tmp_path))


def test_broken_json_names_file_and_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: not a JSON object"):
        Dataset(tmp_path / "a.jsonl")
    (tmp_path / "a.json").write_text('[{"a": 1},\n}]')
    with pytest.raises(DataError, match=r"a\.json, line 2"):
        Dataset(tmp_path / "a.json")
    with pytest.raises(DataError, match="row 1 is a int"):
        Dataset([{"a": 1}, 2])


def test_a_slice_beyond_the_end_repeats_with_a_warning(caplog):
    rows = [{"i": i} for i in range(3)]
    assert [r["i"] for r in Dataset(DatasetMeta(data=rows, data_slice=[2, 0, -1]))] == [2, 0, 2]
    repeated = Dataset(DatasetMeta(data=rows, data_slice=range(5)))
    assert "2 rows beyond the 3 of the data in memory" in caplog.text
    assert [r["i"] for r in repeated] == [0, 1, 2, 0, 1]
    with pytest.raises(DataError, match="has no rows"):
        Dataset(DatasetMeta(data=[], data_slice=range(1)))
    with pytest.raises(DataError, match="dataset_id"):
        DatasetMeta()


# ------------------------------------------------------------------------------------------------ mapping


def test_map_drops_counts_and_logs_once(caplog):
    dataset = Dataset([{"i": i} for i in range(6)])

    def even(row):
        return {"j": row["i"]} if row["i"] % 2 == 0 else None

    with caplog.at_level(logging.INFO, logger="twinkle"):
        dataset.map(even)
    assert list(dataset) == [{"j": 0}, {"j": 2}, {"j": 4}]
    assert dataset.dropped == {"even": 3}
    assert [r.getMessage() for r in caplog.records] == ["even dropped 3 of 6 rows"]


@pytest.mark.parametrize("count", [0, -1, True, "2", 1.5])
def test_a_number_of_processes_that_is_none(count):
    dataset = Dataset([{"i": 1}])
    with pytest.raises(DataError, match=r"num_proc=.*at least 1, or None"):
        dataset.map(lambda row: row, num_proc=count)
    assert list(dataset) == [{"i": 1}]


@pytest.mark.parametrize("kind", [Dataset, IterableDataset])
def test_interleave_is_true_or_false(kind):
    """A text that says "false" would count as true."""
    with pytest.raises(DataError, match="interleave='false': True or False"):
        kind([{"i": 1}]).mix_dataset("false")


def test_map_and_encode_in_processes_give_the_same():
    rows = [{"query": f"hi {i}", "response": "I am {{NAME}}"} for i in range(20)]
    made = []
    for processes in (None, 2):
        dataset = Dataset(rows)
        dataset.set_template("chat", model_id=chatml_tokenizer())
        dataset.map("self_cognition", model_name="Twinkle", model_author="us", num_proc=processes).encode(num_proc=processes)
        made.append(list(dataset))
    assert made[0] == made[1]
    assert len(made[0]) == 20


def test_preprocessors_are_names_classes_or_objects():
    rows = [{"instruction": "hi", "output": "yo"}]
    from twinkle_core.data.preprocessors import AlpacaProcessor

    made = [list(Dataset(rows).map(p)) for p in ("alpaca", AlpacaProcessor, AlpacaProcessor())]
    assert made[0] == made[1] == made[2] == [talk("hi", "yo")]
    with pytest.raises(UnknownName, match="alpacca"):
        Dataset(rows).map("alpacca")
    with pytest.raises(WrongArgument, match="sistem"):
        Dataset(rows).map("alpaca", sistem="x")


def test_a_row_that_fails_is_named_and_nothing_changes():
    dataset = Dataset([{"instruction": "hi", "output": "yo"}, {"instruction": "hi", "answer": "yo"}])
    with pytest.raises(DataError, match=r"AlpacaProcessor, row 1: AlpacaProcessor needs 'output'.*has 'instruction', 'answer'"):
        dataset.map("alpaca")
    with pytest.raises(DataError, match="returned a int"):
        dataset.map(lambda row: 5)
    assert len(dataset) == 2
    assert "instruction" in dataset[0]


def test_sets_are_added_mapped_apart_and_mixed():
    one, two = DatasetMeta("one", data=[{"i": i} for i in range(4)]), DatasetMeta("two", data=[{"k": "a"}, {"k": "b"}])
    dataset = Dataset(one)
    dataset.add_dataset(two)
    dataset.map(lambda row: {"v": row["k"]}, dataset_meta=two)
    dataset.map(lambda row: {"v": row["i"]}, dataset_meta=one)
    assert [r["v"] for r in dataset] == [0, 1, 2, 3, "a", "b"]
    dataset.mix_dataset()
    assert [r["v"] for r in dataset] == [0, "a", 1, 2, "b", 3]
    assert [r["v"] for r in dataset.filter(lambda row: isinstance(row["v"], str))] == ["a", "b"]


def test_typed_tables_and_others_join(tmp_path):
    datasets.Dataset.from_list([{"q": "hi", "a": 1}]).to_parquet(str(tmp_path / "rows.parquet"))
    dataset = Dataset(tmp_path / "rows.parquet")
    dataset.add_dataset([{"q": None, "z": {"y": 1}}])
    assert list(dataset) == [{"q": "hi", "a": 1}, {"q": None, "z": {"y": 1}}]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.dictionaries(st.text(max_size=4), JSON, max_size=3), min_size=1, max_size=4))
def test_any_rows_survive_loading_and_mapping(rows):
    dataset = Dataset(rows)
    assert list(dataset) == rows
    assert list(dataset.map(lambda row: row)) == rows


# ------------------------------------------------------------------------------------------------ encoding


def test_encode_is_the_template_of_each_row():
    rows = [talk("hi", "yo"), talk("ok", "go go")]
    template = ChatTemplate(toy_t_tokenizer())
    dataset = Dataset(rows)
    dataset.set_template(template)
    dataset.encode()
    assert list(dataset) == [template.encode(row) for row in rows]
    lazy = LazyDataset(rows)
    lazy.set_template(ChatTemplate, model_id=toy_t_tokenizer())
    lazy.encode()
    assert [lazy[i] for i in range(2)] == list(lazy) == list(dataset)
    with pytest.raises(DataError, match="encoded already"):
        dataset.map(lambda row: row)


def test_dropped_and_split_rows_are_counted(caplog):
    rows = [talk("hi", "yo"), talk("hi " * 30, "yo"), talk("ok", "go")]
    dataset = Dataset(rows)
    dataset.set_template("chat", model_id=toy_t_tokenizer(), max_length=10, truncation_strategy="delete")
    with caplog.at_level(logging.INFO, logger="twinkle"):
        dataset.encode()
    assert len(dataset) == 2
    assert dataset.dropped == {"encode": 1}
    assert [r.getMessage() for r in caplog.records] == ["encode dropped 1 of 3 rows"]
    split = Dataset([talk("hi", "yo " * 20)])
    split.set_template("chat", model_id=toy_t_tokenizer(), max_length=10, truncation_strategy="split")
    split.encode()
    assert [row["length"] for row in split] == [10, 10, 6]
    assert split.dropped == {}
    lazy = LazyDataset(rows)
    lazy.set_template("chat", model_id=toy_t_tokenizer(), truncation_strategy="delete")
    with pytest.raises(DataError, match="'delete' changes the number of rows"):
        lazy.encode()


def test_check_says_which_rows_and_why():
    dataset = Dataset([talk("hi", "yo"), {"messages": [{"role": "user", "content": "hi"}]}, {"text": "x"}])
    with pytest.raises(DataError, match="set_template"):
        dataset.check()
    dataset.set_template("chat", model_id=toy_t_tokenizer())
    found = dataset.check()
    assert list(found) == [1, 2]
    assert "no assistant turn" in found[1]
    assert "'messages'" in found[2]
    for processes in (None, 2):
        with pytest.raises(DataError, match=r"encode, row 1: .*no assistant turn"):
            dataset.encode(num_proc=processes)
    assert dataset[0] == talk("hi", "yo")


def test_a_template_of_ones_own():
    class Letters(Template):
        def encode(self, trajectory, *, add_generation_prompt=False):
            return {"input_ids": [ord(c) for c in trajectory["text"]], "labels": 1.5, "tag": {"a": trajectory["text"]}}

        def check(self, trajectory):
            return None

        def decode(self, ids, **kwargs):
            return "".join(map(chr, ids))

        def parse(self, text):
            return {"role": "assistant", "content": text}

    dataset = Dataset([{"text": "ab"}, {"text": "c"}])
    dataset.set_template(Letters())
    dataset.encode()
    assert list(dataset) == [
        {"input_ids": [97, 98], "labels": 1.5, "tag": {"a": "ab"}},
        {"input_ids": [99], "labels": 1.5, "tag": {"a": "c"}},
    ]


# ------------------------------------------------------------------------------------------------ nothing is lost or guessed


def test_a_folder_never_loses_files_in_silence(tmp_path, caplog):
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    write(mixed / "a.jsonl", [{"a": 1}])
    (mixed / "b.csv").write_text("a\n2\n")
    with pytest.raises(DataError, match=r"several formats \(json: a\.jsonl; csv: b\.csv\)[\s\S]*Give the file"):
        Dataset(mixed)
    (mixed / "b.csv").rename(mixed / "test.csv")
    (mixed / "a.jsonl").rename(mixed / "train.jsonl")
    with pytest.raises(DataError, match=r"several formats"):
        Dataset(mixed)
    for named, other in (("train.jsonl", "more.jsonl"), ("train-0.jsonl", "broken.jsonl")):
        folder = tmp_path / named
        folder.mkdir()
        write(folder / named, [{"a": 1}])
        write(folder / other, [{"a": 2}])
        assert list(Dataset(folder)) == [{"a": 1}]
        assert f"left out ({other}); the split 'train' is {named}" in caplog.text


@pytest.mark.parametrize("ending", ["bak", "orig", "2024"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_backup_beside_the_data_is_no_data(kind, ending, tmp_path, caplog):
    folder = tmp_path / "data"
    Dataset([{"a": 1}]).save_as(folder / f"x.{kind}")
    (folder / f"x.{kind}.{ending}").write_text("junk")
    assert list(Dataset(folder)) == [{"a": 1}]
    assert f"left out (x.{kind}.{ending}); the split 'train' is x.{kind}." in caplog.text
    (folder / f"x.{kind}").unlink()
    with pytest.raises(NoSuchPath, match="holds no data"):
        Dataset(folder)


def test_a_folder_that_cant_be_read_names_cause_and_file(tmp_path):
    (tmp_path / "x.parquet").write_text("junk")
    with pytest.raises(DataError, match=r"x\.parquet\) could not be read: (?!An error occurred)"):
        Dataset(tmp_path)


def test_a_folder_of_alike_files_is_read_whole_without_a_warning(tmp_path, caplog):
    write(tmp_path / "a.jsonl", [{"a": 1}])
    write(tmp_path / "b.jsonl", [{"a": 2}])
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / "README.md").write_text("about")
    assert list(Dataset(tmp_path)) == [{"a": 1}, {"a": 2}]
    assert "left out" not in caplog.text


@pytest.mark.parametrize("inside", [False, True], ids=["file", "folder"])
def test_values_of_csv_stay_as_they_are_written(inside, tmp_path):
    text = 'q,a\n007,NA\nnull,12\n1.50,\n"two\nlines",1e5\n\n'
    (tmp_path / "rows.csv").write_text(text)
    assert list(Dataset(tmp_path if inside else tmp_path / "rows.csv")) == [
        {"q": "007", "a": "NA"},
        {"q": "null", "a": "12"},
        {"q": "1.50", "a": ""},
        {"q": "two\nlines", "a": "1e5"},
    ]


def test_csv_holds_long_texts_and_faults_are_named(tmp_path):
    import csv

    limit = csv.field_size_limit()
    path = tmp_path / "rows.csv"
    path.write_text("q\n" + "x" * (limit + 1) + "\n")
    assert len(Dataset(path)[0]["q"]) == limit + 1
    for text, told in (
        ("q,a\n1,2\n1,2,3\n", "line 3 .*3 values for the 2 columns"),
        ("q,q\n1,2\n", "one name"),
        ('q\n"x\n', "line 2"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=told.replace(" .*", ".*")):
            Dataset(path)
    assert csv.field_size_limit() == limit


def test_saving_that_fails_leaves_what_was_there(tmp_path):
    import datetime

    plain = datasets.Dataset.from_dict({"when": [datetime.datetime(2020, 1, 2)], "b": [datetime.timedelta(seconds=1)]})
    plain.select_columns("when").to_parquet(str(tmp_path / "ok.parquet"))
    plain.to_parquet(str(tmp_path / "bad.parquet"))
    out = tmp_path / "x.jsonl"
    Dataset(tmp_path / "ok.parquet").save_as(out)
    assert list(Dataset(out)) == [{"when": "2020-01-02T00:00:00"}]
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(DataError, match=r"row 0: .*something that JSON can hold"):
        Dataset(tmp_path / "bad.parquet").save_as(out)
    assert list(Dataset(out)) == [{"when": "2020-01-02T00:00:00"}]
    assert sorted(p.name for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["out.jsonl", "out.json", "out.parquet", "folder"])
def test_a_data_set_is_saved_over_its_own_source(name, tmp_path):
    path = Dataset([{"i": i} for i in range(4)]).save_as(tmp_path / name)
    Dataset(path).filter(lambda row: row["i"] % 2).save_as(path)
    Dataset(path).save_as(path)
    assert list(Dataset(path)) == [{"i": 1}, {"i": 3}]
    assert [p.name for p in tmp_path.iterdir() if p.name != "cache"] == [name]


def test_saving_replaces_nothing_but_what_it_writes(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a").write_text("keep")
    (tmp_path / "d.jsonl").mkdir()
    for name in ("photos", "d.jsonl"):
        with pytest.raises(DataError, match="was not written by save_as"):
            Dataset([{"i": 1}]).save_as(tmp_path / name)
    assert (tmp_path / "photos" / "a").read_text() == "keep"


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": "é"}\n'.encode("latin1"), r"a\.jsonl, line 2: not UTF-8"),
        ("a.json", '[{"a": "é"}]'.encode("latin1"), r"a\.json: not UTF-8"),
        ("a.csv", "a\né\n".encode("latin1"), r"a\.csv: not UTF-8"),
        ("a.jsonl", b'{"a": 1}\n{"a": "x \\ud83d"}\n', r"row 1: it holds half a character"),
        ("a.jsonl.gz", b"no gzip", r"a\.jsonl\.gz could not be read"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 99)[:-12], r"a\.jsonl\.gz could not be read"),
        ("a.jsonl.xz", b"no xz", r"a\.jsonl\.xz could not be read"),
        ("a.jsonl", b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", r"a\.jsonl could not be read: .*too deep"),
    ],
    ids=["jsonl", "json", "csv", "surrogate", "gzip", "cut", "xz", "deep"],
)
def test_damaged_files_are_told_with_the_place(name, content, told, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=told):
        Dataset(tmp_path / name)


def test_rows_that_are_no_json_are_told():
    circle: dict = {}
    circle["a"] = circle
    for row in ({(1, 2): "a"}, circle, {"a": {1}}, {"a": "\ud83d"}):
        with pytest.raises(DataError, match="a data set, row 1: "):
            Dataset([{"a": 1}, row])
    with pytest.raises(DataError, match="a data set, row 1: it holds half a character"):
        Dataset([{"a": "x"}, {"a": "y"}]).map(lambda row: {"a": "\ud83d" if row["a"] == "y" else "x"})


@pytest.mark.parametrize(
    "row",
    [{1: "a"}, {"a": {2: "b"}}, {"a": [{"b": ({1.5: "c"},)}]}, {None: 1}, {"a": {True: 1}}, {"a": [1, "x", {3: 1}]}],
    ids=str,
)
def test_keys_that_are_no_texts_are_told_with_their_row(row):
    """JSON would make texts of them in silence."""
    with pytest.raises(DataError, match=r"a data set, row 1: its key .* is of type .*keys are texts"):
        Dataset([{"a": 1}, row])
    with pytest.raises(DataError, match=r"row 1: its key"):
        Dataset([{"a": 0}, {"a": 1}]).map(lambda given: row if given["a"] else given)


@pytest.mark.parametrize(
    ("kwargs", "told"),
    [
        ({"data_slice": slice(0, 2)}, r"data_slice=slice\(0, 2, None\): give a range or a list"),
        ({"split": 5}, "split=5: it is a name"),
        ({"split": ""}, "split='': it is a name"),
        ({"subset_name": None}, "subset_name=None: it is a name"),
        ({"data_slice": 3}, "data_slice=3: give a range or a list"),
        ({"data_slice": "0:2"}, "data_slice='0:2': give a range or a list"),
        ({"data_slice": [0, 1, "2"]}, r"data_slice\[2\]='2': give a range or a list"),
        ({"data_slice": [0, 1.0]}, r"data_slice\[1\]=1.0: give a range or a list"),
        ({"data_slice": [True, False]}, r"data_slice\[0\]=True: give a range or a list"),
        ({"data_slice": range(5, 2)}, r"data_slice=range\(5, 2\): it takes no row"),
        ({"data_slice": []}, r"data_slice=\[\]: it takes no row"),
        ({"data": 5}, "give rows"),
        ({"data": "text"}, "give rows"),
        ({"data": {"a": 1}}, "give rows"),
        ({"data": iter([{"a": 1}])}, "empty after its first pass"),
        ({"data": ({"a": i} for i in range(2))}, "empty after its first pass"),
    ],
)
def test_metas_that_cant_be_are_told(kwargs, told):
    with pytest.raises(DataError, match=told):
        DatasetMeta(**{"data": [{"a": 1}], **kwargs})


@pytest.mark.parametrize("kind", [Dataset, IterableDataset])
def test_what_cant_be_called_is_told(kind):
    assert list(kind({"a": i} for i in range(2))) == [{"a": 0}, {"a": 1}]
    for wrong in (5, {"a": 1}):
        with pytest.raises(DataError, match="give rows"):
            kind(wrong)
    with pytest.raises(WrongType, match="preprocessor=5"):
        kind([{"a": 1}]).map(5)
    with pytest.raises(DataError, match="function='x'"):
        kind([{"a": 1}]).filter("x")


def test_without_the_library_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(NeedsLibrary, match=r"pip install 'twinkle-core\[data\]'"):
        Dataset([{"a": 1}])
