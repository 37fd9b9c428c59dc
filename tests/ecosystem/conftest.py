"""Fresh environments: what is installed in them is what a test installs, besides the libraries of this one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PIP = ["-m", "pip", "--disable-pip-version-check", "--no-input"]


class Environment:
    """A virtual environment; ``python`` is its interpreter."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.python = folder, folder / "bin" / "python"
        #: of the test's own process, without what would lead into this working tree or change how plugins load
        keep = {
            k: v for k, v in os.environ.items() if not k.startswith(("TWINKLE_", "PYTHON", "PYTEST", "PIP_", "VIRTUAL_ENV"))
        }
        self.variables = keep | {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        }

    def run(
        self, *words: object, cwd: Path | None = None, status: int = 0, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run the interpreter, or a program of the environment; its exit status must be ``status``."""
        first, *others = map(str, words)
        command = [str(self.python), first, *others] if first.startswith("-") else [str(self.folder / "bin" / first), *others]
        done = subprocess.run(
            command, cwd=cwd or self.folder, env=self.variables, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == status, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def install(self, *words: object) -> None:
        """``pip install`` of folders, wheels or ``-e folder``; never from an index."""
        self.run(*PIP, "install", "-q", "--no-index", "--no-deps", "--no-build-isolation", *words)

    def wheels(self, target: Path, *folders: Path) -> list[Path]:
        """Build a wheel of each folder into ``target``; those that are new there."""
        before = set(target.glob("*.whl"))
        self.run(*PIP, "wheel", "-q", "--no-index", "--no-deps", "--no-build-isolation", "-w", target, *folders)
        return sorted(set(target.glob("*.whl")) - before)


def _twinkles(folder: Path) -> set[str]:
    """Entries of a site-packages folder that belong to twinkle or a plugin of it, or lead elsewhere."""
    found = {p.name for p in folder.iterdir() if p.suffix == ".pth" or p.name.startswith(("__editable__", "twinkle"))}
    for dist in distributions(path=[str(folder)]):
        if any(entry.group.startswith("twinkle.") for entry in dist.entry_points):
            found |= {file.parts[0] for file in dist.files or () if file.parts[0] != ".."}
    return found


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Links to all that is installed here, without twinkle and its plugins: torch need not be installed again for each test."""
    target = tmp_path_factory.mktemp("libraries")
    for folder in dict.fromkeys(Path(p) for p in sys.path if Path(p).name in ("site-packages", "dist-packages")):
        leave = _twinkles(folder)
        for entry in folder.iterdir():
            link = target / entry.name
            if entry.name not in leave and not link.is_symlink():
                link.symlink_to(entry)
    return target


@pytest.fixture(scope="session")
def new_environment(libraries: Path) -> Callable[[Path], Environment]:
    """Makes an environment in a folder, with the libraries and nothing of twinkle's."""

    def make(folder: Path) -> Environment:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
        (site,) = (folder / "lib").glob("python*/site-packages")
        (site / "libraries.pth").write_text(f"{libraries}\n")
        return Environment(folder)

    return make


@pytest.fixture(scope="session")
def core_wheel(tmp_path_factory: pytest.TempPathFactory, new_environment: Callable[[Path], Environment]) -> Path:
    """A wheel of twinkle-core, built from this tree."""
    folder = tmp_path_factory.mktemp("core")
    (wheel,) = new_environment(folder / "builder").wheels(folder, ROOT)
    return wheel


@pytest.fixture
def fresh(tmp_path: Path, new_environment: Callable[[Path], Environment], core_wheel: Path) -> Iterator[Environment]:
    """An environment with twinkle-core from its wheel."""
    environment = new_environment(tmp_path / "environment")
    environment.install(core_wheel)
    yield environment
