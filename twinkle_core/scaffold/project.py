"""The files of a new plugin: a distribution that works before its first change (L0)."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template

from twinkle_core import api, names
from twinkle_core.errors import FolderExists, NotWritable, UnknownKind
from twinkle_core.scaffold.names import check_free, package_of
from twinkle_core.version import __version__

HOOKS = "hooks"
SUITE = """
# how `twinkle check` builds it
[project.entry-points."twinkle.testing"]
"$group.$package" = "$package.testing:${stem}Suite"
"""


@dataclass(frozen=True, slots=True)
class Kind:
    """What the files of a kind differ in, besides their modules."""

    summary: str
    usage: str
    extra: str = ""  # of twinkle-core, that its module needs
    suite: bool = False  # whether it says itself how it is built for its checks: arguments alone would not do


KINDS = {
    "model": Kind("A model", "from twinkle.model import $cls\n\nmodel = $cls()", suite=True),
    "loss": Kind("A loss", 'model.set_loss("$package")  # or: from twinkle.loss import $cls'),
    "metric": Kind("A metric", 'model.add_metric("$package", is_training=True)  # or: from twinkle.metric import $cls'),
    "template": Kind("A template", 'model.set_template("$package", model_id="ms://Qwen/Qwen3.5-4B")', "[data]"),
    "patch": Kind("A patch", 'model.apply_patch("$package")  # or: from twinkle.patch import $cls'),
    "processor": Kind("A processor", 'model.set_processor("$package")  # or: from twinkle.processor import $cls'),
    HOOKS: Kind("Hooks", "from $package.$module import updates  # it listens because it is installed"),
}


@dataclass(frozen=True, slots=True)
class Project:
    """The names of a new distribution. For ``twinkle new loss acme-soft``: loss, acme-soft, acme_soft, AcmeSoft."""

    kind: str
    distribution: str
    package: str
    stem: str

    @property
    def cls(self) -> str:
        """The class; it ends in its kind."""
        return self.stem if self.stem.lower().endswith(self.kind) else self.stem + self.kind.capitalize()

    @property
    def module(self) -> str:
        """The module with the code."""
        return self.kind

    @property
    def value(self) -> str:
        """Of the entry point."""
        return f"{self.package}.{self.module}" + ("" if self.kind == HOOKS else f":{self.cls}")


def plan(kind: str, name: str) -> Project:
    """The names that follow from a name. Nothing is written.

    Raises:
        UnknownKind: nothing of that kind can be begun. BadPluginName: it can't be called so.
    """
    singular = names.KINDS.get(kind, kind)
    if singular not in KINDS:
        raise UnknownKind(kind, names.closest(kind, KINDS), KINDS)
    package = package_of(name)
    check_free(name, package, None if singular == HOOKS else singular)
    return Project(singular, names.normalise(package), package, "".join(map(str.capitalize, package.split("_"))))


def files(project: Project) -> dict[str, str]:
    """Path below the new folder -> text."""
    kind = KINDS[project.kind]
    values = {
        "kind": project.kind,
        "distribution": project.distribution,
        "package": project.package,
        "module": project.module,
        "cls": project.cls,
        "stem": project.stem,
        "summary": kind.summary,
        "group": "plugins" if project.kind == HOOKS else names.PLURAL[project.kind],
        "value": project.value,
        "api": str(api.API),
        "core": ".".join(__version__.split(".")[:2]),
        "extra": kind.extra,
    }
    values["usage"] = Template(kind.usage).substitute(values)
    values["testing"] = Template(SUITE if kind.suite else "").substitute(values)
    places = {
        "pyproject.toml": "common/pyproject.toml",
        "README.md": "common/README.md",
        ".github/workflows/test.yml": "common/test.yml",
        f"src/{project.package}/__init__.py": "common/init.py",
        f"src/{project.package}/{project.module}.py": f"{project.kind}/module.py",
        f"tests/test_{project.package}.py": f"{project.kind}/test.py",
    }
    if kind.suite:
        places[f"src/{project.package}/testing.py"] = f"{project.kind}/testing.py"
    texts = {place: Template(_read(source)).substitute(values) for place, source in places.items()}
    return texts | {f"src/{project.package}/py.typed": ""}


def write(project: Project, parent: Path) -> Path:
    """Write the files into ``parent / distribution``, all or none.

    Returns:
        The new folder.

    Raises:
        FolderExists: something of that name is there; it is left as it is. NotWritable: the system's own reason.
    """
    folder, texts = parent / project.distribution, files(project)
    try:
        if folder.exists() or folder.is_symlink():
            raise FolderExists(folder)
    except OSError as error:  # a name that the file system can't have
        if isinstance(error, FolderExists):
            raise
        raise NotWritable(folder, error.strerror or str(error)) from error
    try:
        folder.mkdir(parents=True)
        for place, text in texts.items():
            path = folder / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise NotWritable(folder, error.strerror or str(error)) from error
    return folder


def _read(name: str) -> str:
    """The text of a file of this package; stored as .txt, since it is no module before its names are filled in."""
    return (resources.files(__package__) / "files" / f"{name}.txt").read_text(encoding="utf-8")
