"""A host full of plugins that are broken in every way: training goes on, and each fault has its owner's name."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from twinkle_core.testing.distributions import write_distribution

HOOKS_THAT_RAISE = """
from twinkle_core import hookimpl

@hookimpl
def twinkle_after_step(session, result):
    raise RuntimeError("no step for you")
"""
GOOD = """
from twinkle_core import Loss, LossOutput

class GoodLoss(Loss):
    def __call__(self, inputs, outputs):
        return LossOutput(-outputs.logps.sum(), (inputs["labels"] != -100).sum())
"""
TRAIN = """
import torch
from twinkle_core.testing.engines import session_model
from twinkle_core.testing.toys import TinyLM, random_rows

torch.set_num_threads(1)
torch.manual_seed(0)
model = session_model(TinyLM())
model.set_loss("good")
model.set_optimizer("sgd", lr=0.1)
model.add_metric("loss", is_training=True)
for step in range(4):
    model.forward_backward(inputs=random_rows([5, 3]))
    model.clip_grad_and_step()
    print(model.sessions[""].cur_step, float(model.calculate_metric()["loss"]).hex())
"""
#: distribution and version -> its fault
FAULTS = {
    "import-error 0.1": "ImportError: libfoo missing",
    "syntax-error 0.2": "SyntaxError",
    "no-attribute 0.3": "has no attribute 'Missing'",
    "raising-module 0.4": "RuntimeError: not today",
    "exits 0.6": "its import ended the process (exit status 3)",
}


@pytest.fixture
def site(tmp_path):
    """The good plugin alone."""
    write_distribution(tmp_path, "good", "1.0", {"losses": {"good": "good_mod:GoodLoss"}}, {"good_mod.py": GOOD})
    return tmp_path


@pytest.fixture
def run(site):
    """Runs the interpreter with the site on its path: (standard output, standard error)."""

    def call(*words):
        there = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run([sys.executable, *words], env=there, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout, done.stderr

    return call


def break_everything(site):
    """Five broken plugins, and one whose hook raises while a model is trained."""
    write_distribution(site, "import-error", "0.1", {"losses": {"one": "bad_one:L"}},
                       {"bad_one.py": "raise ImportError('libfoo missing')"})  # fmt: skip
    write_distribution(site, "syntax-error", "0.2", {"metrics": {"two": "bad_two:M"}}, {"bad_two.py": "def ("})
    write_distribution(site, "no-attribute", "0.3", {"patches": {"three": "bad_three:Missing"}}, {"bad_three.py": ""})
    write_distribution(site, "raising-module", "0.4", {"plugins": {"four": "bad_four"}},
                       {"bad_four.py": "raise RuntimeError('not today')"})  # fmt: skip
    write_distribution(site, "raising-hook", "0.5", {"plugins": {"five": "bad_five"}}, {"bad_five.py": HOOKS_THAT_RAISE})
    write_distribution(site, "exits", "0.6", {"processors": {"six": "bad_six:P"}}, {"bad_six.py": "import os; os._exit(3)"})


@pytest.mark.slow
def test_training_goes_on_among_broken_plugins_and_each_is_named(site, run):
    """The losses are those of a host without them, bit for bit; ``twinkle plugins`` tells whose the faults are."""
    alone, _ = run("-c", TRAIN)
    assert len(alone.splitlines()) == 4
    break_everything(site)
    among, warned = run("-c", TRAIN)
    assert among == alone
    warnings = [line for line in warned.splitlines() if re.search(r"raising-(module|hook) 0\.", line)]
    assert len(warnings) == 2  # one line each, however many steps
    assert "RuntimeError: not today" in warned and "RuntimeError: no step for you" in warned

    listed, _ = run("-m", "twinkle", "plugins", "--load")
    table, *texts = listed.split("\n\n")
    for owner, fault in FAULTS.items():
        (text,) = [text for text in texts if f"from {owner}" in text]
        assert fault in text
        name, version = owner.split()
        assert re.search(rf"\s{name}\s+{version}\s+broken", listed)
    assert re.search(r"GoodLoss\s+good\s+1\.0\s+ok", table)

    quick, _ = run("-m", "twinkle", "plugins")
    assert "not today" not in quick and "libfoo" not in quick and "Nothing was imported for this list" in quick
    for owner in FAULTS:
        assert re.search(rf"\s{owner.split()[0]}\s+{owner.split()[1]}\s", quick)


LIGHT = """
import sys
for name in ("transformers", "accelerate", "peft", "ray", "megatron", "vllm", "datasets"):
    sys.modules[name] = None
import twinkle
try:
    from twinkle.model import TransformersModel
except ImportError as error:
    print(error)
"""


@pytest.mark.slow
def test_B53_the_backend_says_what_to_install_for_it(run):
    """Where the libraries of a backend that is installed are absent, asking for it names one and the command."""
    told, _ = run("-c", LIGHT)
    words = r"model 'transformers' from twinkle-transformers [\d.]+ needs '(\w+)[\w.]*', which is not installed"
    library = re.search(words, told)
    assert library is not None, told
    assert library[1] in ("transformers", "peft", "accelerate")
    assert f"    pip install {library[1]}" in told
