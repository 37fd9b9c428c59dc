"""``twinkle new``: names, files, and modules that work as they are."""

from __future__ import annotations

import importlib.util
import math
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import yaml

from twinkle_core import IGNORE_INDEX, ModelOutput, api, registry
from twinkle_core.cli.main import main
from twinkle_core.errors import BadPluginName, FolderExists, NotWritable, UnknownKind
from twinkle_core.metrics.loss import LossMetric
from twinkle_core.names import CONTRACTS, PLURAL
from twinkle_core.processors.input import InputProcessor
from twinkle_core.scaffold import project
from twinkle_core.testing.distributions import write_distribution
from twinkle_core.testing.tokenizers import chat_tokenizer
from twinkle_core.testing.toys import random_rows

KINDS = list(project.KINDS)


@pytest.fixture
def generated(tmp_path):
    """Writes a plugin of a kind and imports its module."""

    def make(kind):
        new = project.plan(kind, f"acme-{kind}")
        folder = project.write(new, tmp_path)
        path = folder / "src" / new.package / f"{new.module}.py"
        spec = importlib.util.spec_from_file_location(f"{new.package}_{new.module}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, new.cls, None), module, new, folder

    return make


# ---------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("given", "distribution", "package", "cls"),
    [
        ("acme", "acme", "acme", "AcmeLoss"),
        ("acme-losses", "acme-losses", "acme_losses", "AcmeLossesLoss"),
        ("Acme_Soft", "acme-soft", "acme_soft", "AcmeSoftLoss"),
        ("AcmeSoft", "acme-soft", "acme_soft", "AcmeSoftLoss"),
        ("MyNCELoss", "my-nce-loss", "my_nce_loss", "MyNceLoss"),
        (" acme.soft ", "acme-soft", "acme_soft", "AcmeSoftLoss"),
    ],
)
def test_names_are_folded(given, distribution, package, cls):
    new = project.plan("loss", given)
    assert (new.distribution, new.package, new.cls, new.value) == (distribution, package, cls, f"{package}.loss:{cls}")


@pytest.mark.parametrize("kind", ["losses", "loss"])
def test_a_kind_may_be_plural(kind):
    assert project.plan(kind, "acme").kind == "loss"


def test_an_unknown_kind_is_told():
    with pytest.raises(UnknownKind, match=r"'los'. Did you mean 'loss'\?\n    kinds: model, loss, metric, .*, hooks"):
        project.plan("los", "acme")
    with pytest.raises(UnknownKind):
        project.plan("optimizer", "acme")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("class", "'class' is a word of Python's language"),
        ("Import", "'import' is a word of Python's language"),
        ("json", "'json' is a module of Python's standard library"),
        ("3d", "a letter first"),
        ("a/b", "letters of a to z"),
        ("../up", "letters of a to z"),
        ("über", "letters of a to z"),
        ("", "holds no letter"),
        ("--", "holds no letter"),
        ("torch", r"torch \S+ is installed in"),
        ("yaml", "a package 'yaml' can be imported here already"),
        ("twinkle", "twinkle is a distribution of twinkle's own"),
        ("twinkle-ray", "twinkle-ray is a distribution of twinkle's own"),
        ("CrossEntropy", "twinkle-core has a loss of this name"),
    ],
)
def test_a_name_that_can_not_be_is_told_before_anything_is_written(tmp_path, capsys, name, why):
    assert main(["new", "loss", "--dir", str(tmp_path), "--", name]) == 1
    told = capsys.readouterr().err
    assert re.search(why, told) and repr(name) in told and "Choose another name" in told
    assert list(tmp_path.iterdir()) == []


def test_a_name_is_taken_for_its_kind_alone():
    assert project.plan("metric", "cross-entropy").package == "cross_entropy"
    with pytest.raises(BadPluginName, match="twinkle-core has a metric of this name"):
        project.plan("metric", "accuracy")


def test_an_installed_distribution_keeps_its_name(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    write_distribution(tmp_path, "taken-name", "0.7", {})
    with pytest.raises(BadPluginName, match=r"taken-name 0\.7 is installed in"):
        project.plan("patch", "TakenName")


def test_a_folder_of_the_working_directory_is_no_package(tmp_path, monkeypatch):
    """``python -m twinkle`` has it on its path, and every folder looks like a package there."""
    (tmp_path / "some_notes").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert project.plan("loss", "some-notes").package == "some_notes"


# ---------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("kind", KINDS)
def test_the_metadata_says_what_is_there(generated, kind):
    cls, module, new, folder = generated(kind)
    data = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
    group = f"twinkle.{PLURAL.get(kind, 'plugins')}"
    points = {group: {new.package: new.value}, "twinkle.api": {f"v{api.API}": new.package}}
    if (folder / "src" / new.package / "testing.py").is_file():
        points["twinkle.testing"] = {f"{PLURAL[kind]}.{new.package}": f"{new.package}.testing:{new.stem}Suite"}
    assert data["entry-points"] == points
    assert ("twinkle.testing" in points) == (kind == "model")
    assert data["name"] == new.distribution and data["dependencies"][0].startswith("twinkle-core")
    home, _, attribute = new.value.partition(":")
    assert (folder / "src" / f"{home.replace('.', '/')}.py").is_file()
    if kind in CONTRACTS:
        home, name = CONTRACTS[kind]
        assert attribute == cls.__name__
        assert issubclass(cls, getattr(importlib.import_module(home), name)) and not cls.__abstractmethods__
    assert len(Path(module.__file__).read_text("utf-8").splitlines()) < 60
    written = [p for p in folder.rglob("*") if p.is_file() and p.suffix != ".pyc"]  # importing it has compiled it
    left = [p for p in written if re.search(r"\$[a-z]", p.read_text("utf-8"))]
    assert left == []  # no name was left to fill in
    job = yaml.safe_load((folder / ".github" / "workflows" / "test.yml").read_text("utf-8"))["jobs"]["test"]
    assert [step["run"] for step in job["steps"] if "run" in step][-2:] == [f"twinkle check {new.distribution}", "pytest"]
    readme = (folder / "README.md").read_text("utf-8")
    assert f"pip install {new.distribution}\n" in readme and f"twinkle check {new.distribution}\n" in readme
    (usage,) = re.findall(r"```python\n(.*?)```", readme, re.S)
    assert f'"{new.package}"' in usage or f" import {new.cls}" in usage or f"from {new.package}" in usage


def test_all_that_is_written_is_tidy(tmp_path):
    for kind in KINDS:
        project.write(project.plan(kind, f"acme-{kind}"), tmp_path)
    for words in (["check", "--select", "E,F,W,I,B,UP"], ["format", "--check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *words, "--no-cache", tmp_path], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_what_is_there_is_left_as_it_is(tmp_path):
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / "mine.txt").write_text("mine")
    with pytest.raises(FolderExists, match="acme is there already"):
        project.write(project.plan("loss", "acme"), tmp_path)
    assert [p.name for p in (tmp_path / "acme").iterdir()] == ["mine.txt"]


def test_half_a_plugin_is_not_left(tmp_path, monkeypatch):
    written = []
    write_text = Path.write_text

    def full(self, text, **kwargs):
        written.append(self)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        return write_text(self, text, **kwargs)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(NotWritable, match=r"acme can't be written \(No space left on device\)"):
        project.write(project.plan("loss", "acme"), tmp_path)
    assert len(written) == 3 and list(tmp_path.iterdir()) == []


OFFLINE = """
import socket, sys
for name in ("torch", "pydantic", "yaml", "transformers"):
    sys.modules[name] = None
def refused(*args, **kwargs): raise AssertionError("the network")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refused
from twinkle_core.cli.main import main
raise SystemExit(main(["new", "model", "acme"]))
"""


def test_it_needs_no_network_and_no_library(tmp_path):
    done = subprocess.run([sys.executable, "-c", OFFLINE], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "a model, ready to use" in done.stdout and "twinkle check acme" in done.stdout
    assert (tmp_path / "acme" / "src" / "acme" / "model.py").is_file()


# ---------------------------------------------------------------------------------------------------- what they do


def scored(rows, vocabulary=11):
    """A padded batch and log-probabilities of its labels, float64."""
    batch = InputProcessor().collate(rows)
    labels = batch["labels"]
    logps = torch.randn(*labels.shape, vocabulary, dtype=torch.float64).log_softmax(-1)
    taken = logps.gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    return batch, torch.where(labels != IGNORE_INDEX, taken, 0.0)


def test_the_loss_is_its_formula(generated):
    cls, *_ = generated("loss")
    batch, logps = scored(random_rows([5, 2, 7]))
    got = cls(epsilon=0.7)(batch, ModelOutput(logps=logps))
    pairs = zip(batch["labels"].flatten().tolist(), logps.flatten().tolist(), strict=True)
    items = [-x + 0.7 * (1 - math.exp(x)) for y, x in pairs if y != IGNORE_INDEX]
    assert got.sum.item() == pytest.approx(sum(items), rel=1e-12) and int(got.weight) == len(items)
    with pytest.raises(ValueError, match="epsilon=-2"):
        cls(epsilon=-2)


def test_the_metric_is_the_exponential_of_the_mean_loss(generated):
    cls, *_ = generated("metric")
    mine, theirs = cls(), LossMetric()
    for lengths in ([5, 2], [9], [3, 3, 4]):
        batch, logps = scored(random_rows(lengths))
        count = (batch["labels"] != IGNORE_INDEX).sum()
        mine.accumulate(batch, ModelOutput(logps=logps))
        theirs.accumulate(batch, ModelOutput(loss=-logps.sum() / count, num_items=count))
    assert mine.calculate()["acme_metric"] == pytest.approx(math.exp(theirs.calculate()["loss"]), rel=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_processor_pads_as_the_built_in_one(generated, side):
    cls, *_ = generated("processor")
    rows = random_rows([5, 2, 7])
    mine, theirs = cls(side).collate(rows), InputProcessor(padding_side=side).collate(rows)
    assert mine.keys() == theirs.keys()
    for key in theirs:
        assert torch.equal(mine[key], theirs[key]), key


def test_the_patch_can_be_taken_away_again(generated):
    cls, *_ = generated("patch")
    norm = torch.nn.Sequential(torch.nn.LayerNorm(8))
    x = torch.randn(4, 8)
    before, attributes = norm(x), {name: dict(vars(m)) for name, m in norm.named_modules()}
    first, second = cls(), cls()
    first.apply(norm)
    second.apply(norm)  # twice is once
    assert "forward" in vars(norm[0]) and torch.equal(norm(x), before)
    second.undo(norm)
    first.undo(norm)
    assert {name: dict(vars(m)) for name, m in norm.named_modules()} == attributes


def test_the_template_trains_the_answer_and_the_end_token_alone(generated):
    cls, *_ = generated("template")
    template = cls(chat_tokenizer(), default_system="Be brief.")
    turns = [("user", "One?"), ("assistant", "Two."), ("user", "Three?"), ("assistant", "Four.")]
    row = template.encode({"messages": [{"role": role, "content": text} for role, text in turns]})
    end = template.tokenizer.eos_token
    shown = [("system", "Be brief."), *turns]
    assert template.decode(row["input_ids"]) == "".join(
        f"### {role}\n{text}{end if role == 'assistant' else ''}\n" for role, text in shown
    )
    assert template.decode(row["labels"]) == f"Two.{end}Four.{end}"


def test_the_models_micro_batches_are_one_batch_packed_and_padded(generated):
    cls, *_ = generated("model")
    rows = random_rows([4, 7, 3, 6])

    def trained(processor, **how):
        torch.manual_seed(0)
        model = cls(vocab_size=11)
        model.set_processor(processor)
        model.set_optimizer("sgd", lr=1.0)
        model.forward_backward(inputs=rows, **how)
        model.clip_grad_and_step()
        return torch.cat([p.detach().flatten() for p in model.module.parameters()])

    whole = trained(InputProcessor())
    torch.manual_seed(0)
    start = torch.cat([p.detach().flatten() for p in cls(vocab_size=11).module.parameters()])
    assert not torch.allclose(whole, start)
    for other in (
        trained(InputProcessor(), micro_batch_size=1),
        trained(InputProcessor(padding_side="left")),
        trained(InputProcessor(padding_free=True)),
    ):
        assert torch.allclose(whole, other, atol=1e-6)


def test_the_hooks_are_hooks(generated):
    from twinkle_core import plugins
    from twinkle_core.index import Entry

    _, module, new, _ = generated("hooks")
    plugins.check(Entry("plugins", new.package, new.value, new.distribution, "0.1.0"), module)
    names = registry.Registry(path=())
    names.plugins().register(module, "acme")
    assert names.plugins().hooks().twinkle_report_header() == ["acme-hooks: counts updates and logs metrics"]
