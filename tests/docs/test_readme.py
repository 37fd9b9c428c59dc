"""What the README says is what happens: its loop runs, its loss installs, its paths and commands exist."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


def test_the_loop_is_short_and_does_what_it_says(page, read, tmp_path):
    (loop,) = [b for b in read("README.md", "python") if "forward_backward" in b.text]
    assert len([line for line in loop.text.splitlines() if line.strip()]) <= 22
    page.run(loop)
    model = page.namespace["model"]
    assert model.sessions["default"].cur_step == 2  # 20 rows of batch 8 are 3 backwards: a window of 2, and a short one
    state = json.loads((tmp_path / "output" / "last" / "trainer_state.json").read_text("utf-8"))
    assert state["consumed_train_samples"] == 20


def test_the_loss_of_the_readme_installs_and_answers_by_name(page, read, tmp_path):
    project, module = [b for b in read("README.md") if b.file]
    assert (project.file, module.file) == ("pyproject.toml", "acme_losses.py")
    assert len([line for line in module.text.splitlines() if line.strip()]) <= 20
    page.run(project)
    page.run(module)
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(tmp_path)], check=True, timeout=120)
    program = (
        "import torch; from twinkle_core import registry, ModelOutput\n"
        "from twinkle.loss import FocalLoss\n"
        "loss = registry.build('loss', 'focal', {'gamma': 0.0})\n"
        "assert type(loss) is FocalLoss\n"
        "logps = torch.tensor([[-0.5, 0.0, -1.5]]); labels = torch.tensor([[4, -100, 2]])\n"
        "out = loss({'labels': labels}, ModelOutput(logps=logps))\n"
        "print(float(out.sum), int(out.weight))"
    )
    # contrib has a loss of this name too, which may be installed beside it
    there = {**os.environ, "PYTHONPATH": str(site), "TWINKLE_PLUGINS": "acme-losses"}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=there)
    assert run.stdout.split() == ["2.0", "2"], run.stderr


def test_every_path_and_command_of_the_readme_exists(read):
    for path in re.findall(r"^\| `?\[?([\w./-]+)\]?", README.read_text("utf-8"), re.M):
        if path not in ("place", "---"):
            assert (ROOT / path).exists(), path
    from twinkle_core.cli.main import COMMANDS

    told = set(re.findall(r"^twinkle (\w+)", "\n".join(b.text for b in read("README.md", "text")), re.M))
    assert told == set(COMMANDS)


def test_continuous_integration_runs_the_command_of_the_readme(read):
    commands = [line for block in read("README.md", "bash") for line in block.text.splitlines()]
    assert [c for c in commands if "tox run" in c] == [
        "python -m pip install tox && tox run -e quickstart",
        "python -m pip install tox && tox run -e tests",
    ]
    assert "python -m pip install tox && tox run -e tests" in (ROOT / ".ci/run").read_text("utf-8")


def test_one_page_tells_how_an_index_will_name_what_is_installed_from_a_clone():
    """No distribution is on an index yet: a page that says `pip install twinkle-…` sends its reader to a stranger's package."""
    ours = re.compile(r"pip install (?:-U )?'?twinkle-[a-z]")
    pages = [
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("*.md"),
        *ROOT.glob("plugins/*/README.md"),
        *ROOT.glob("contrib/**/README.md"),
    ]
    pages += ROOT.glob("cookbook/**/*.py")
    told = {page.relative_to(ROOT).as_posix() for page in pages if ours.search(page.read_text("utf-8"))}
    assert told == {"docs/quickstart.md", "docs/errors.md"}  # errors.md: the texts of errors as they are
    table = (ROOT / "docs/quickstart.md").read_text("utf-8")
    named = {
        name
        for line in table.splitlines()
        if line.startswith("| `pip")
        for name in re.findall(r"twinkle-[a-z-]+", line.split("|")[1])
    }
    assert named == {"twinkle-core", *(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml")), "twinkle-focal"}
    for folder in re.findall(r"-e ((?:plugins|contrib)/[\w-]+)", table):
        assert (ROOT / folder / "pyproject.toml").is_file(), folder
    assert "\n## Install it\n" in table  # what the other pages link to
