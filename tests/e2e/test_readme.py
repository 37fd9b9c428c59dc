"""What the README says is what happens: its loop runs, its loss installs, its paths and commands exist."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_the_loop_runs_as_written(tiny, tmp_path, monkeypatch):
    (loop,) = [b for b in blocks("python") if "forward_backward" in b]
    assert len([line for line in loop.splitlines() if line.strip()]) <= 22
    with (tmp_path / "conversations.jsonl").open("w", encoding="utf-8") as file:
        for i in range(20):
            turns = [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "yes" * (i + 1)}]
            file.write(json.dumps({"messages": turns}) + "\n")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    program, count = re.subn(r'^MODEL = "[^"]+"', f"MODEL = {str(tiny)!r}", loop, flags=re.M)
    assert count == 1
    exec(compile(program, "README.md", "exec"), namespace)
    model = namespace["model"]
    assert model.sessions["default"].cur_step == 2  # 20 rows of batch 8 are 3 backwards: a window of 2, and a short one
    state = json.loads((tmp_path / "output" / "last" / "trainer_state.json").read_text("utf-8"))
    assert state["consumed_train_samples"] == 20


def test_the_loss_of_the_readme_installs_and_answers_by_name(tmp_path):
    (project,) = blocks("toml")
    (module,) = [b for b in blocks("python") if "class FocalLoss" in b]
    assert len([line for line in module.splitlines() if line.strip()]) <= 20
    (tmp_path / "pyproject.toml").write_text(project, "utf-8")
    (tmp_path / "acme_losses.py").write_text(module, "utf-8")
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


def test_every_path_and_command_of_the_readme_exists():
    for path in re.findall(r"^\| `?\[?([\w./-]+)\]?", README, re.M):
        if path not in ("place", "---"):
            assert (ROOT / path).exists(), path
    from twinkle_core.cli.main import COMMANDS

    told = set(re.findall(r"^twinkle (\w+)", "\n".join(blocks("text")), re.M))
    assert told == set(COMMANDS)


def test_continuous_integration_runs_the_command_of_the_readme():
    commands = [line for block in blocks("bash") for line in block.splitlines()]
    assert [c for c in commands if "tox run" in c] == [
        "python -m pip install tox && tox run -e quickstart",
        "python -m pip install tox && tox run -e tests",
    ]
    assert "python -m pip install tox && tox run -e tests" in (ROOT / ".ci/run").read_text("utf-8")
