"""From nothing to an installed, checked plugin, as a stranger would go."""

from __future__ import annotations

import re
import time

import pytest

KINDS = ("model", "loss", "metric", "template", "patch", "processor", "hooks")
TRAIN = """
import torch
from twinkle.loss import AcmeLoss
from twinkle_core.testing.engines import session_model
from twinkle_core.testing.toys import TinyLM, random_rows

torch.set_num_threads(1)
torch.manual_seed(0)
model = session_model(TinyLM())
model.set_loss("acme")
assert type(model.sessions[""].loss) is AcmeLoss
model.set_optimizer("adamw", lr=0.03)
model.add_metric("loss", is_training=True)
rows, losses = random_rows([5, 8, 3, 6]), []
for step in range(30):
    model.forward_backward(inputs=rows, micro_batch_size=2)
    model.clip_grad_and_step()
    losses.append(model.calculate_metric()["loss"])
assert losses[-1] < 0.5 * losses[0], losses
"""


def test_a_fresh_environment_has_libraries_and_nothing_of_twinkles(new_environment, tmp_path):
    """Else the tests of this folder would prove nothing."""
    environment = new_environment(tmp_path / "environment")
    program = (
        "import importlib.util as u\n"
        "from importlib.metadata import distributions\n"
        "assert u.find_spec('torch') and u.find_spec('hatchling')\n"
        "assert not [e for d in distributions() for e in d.entry_points if e.group.startswith('twinkle.')]\n"
        "assert not u.find_spec('twinkle') and not u.find_spec('twinkle_core') and not u.find_spec('twinkle_focal')\n"
    )
    environment.run("-c", program)


@pytest.mark.slow
def test_a_stranger_publishes_a_loss_in_a_minute(new_environment, core_wheel, tmp_path):
    """A fresh environment, ``twinkle new``, build, install, a training loop, ``twinkle check``, its own tests."""
    began = time.monotonic()
    environment = new_environment(tmp_path / "environment")
    environment.install(core_wheel)
    environment.run("twinkle", "new", "loss", "acme", cwd=tmp_path)
    (wheel,) = environment.wheels(tmp_path / "dist", tmp_path / "acme")
    environment.install(wheel)
    environment.run("-c", TRAIN)
    checked = environment.run("twinkle", "check", "acme")
    environment.run("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=tmp_path / "acme")
    seconds = time.monotonic() - began
    print(f"\n{seconds:.1f} s from nothing to a checked plugin\n{checked.stdout}")
    assert seconds < 60


@pytest.mark.slow
def test_all_kinds_begin_as_plugins_that_pass(fresh, tmp_path):
    """Generated, built, installed side by side; each is checked as installed, and its own tests pass."""
    names = {kind: f"acme-{kind}" for kind in KINDS}
    for kind, name in names.items():
        fresh.run("twinkle", "new", kind, name, "--dir", tmp_path / "new")
    wheels = fresh.wheels(tmp_path / "dist", *(tmp_path / "new" / name for name in names.values()))
    assert len(wheels) == len(KINDS)
    fresh.install(*wheels)
    for name in names.values():
        fresh.run("twinkle", "check", name)
    # their own tests; the suites in these files have just run, and the loss's runs as a test file above
    folders = [tmp_path / "new" / name / "tests" for name in names.values()]
    done = fresh.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not TestAcme", *folders, cwd=tmp_path)
    assert re.search(rf"^{len(KINDS)} passed", done.stdout, re.M), done.stdout
    listed = fresh.run("twinkle", "plugins", "--load").stdout
    assert all(name in listed for name in names.values()) and "broken" not in listed
