"""A third party's loss answers alike from a wheel and from an editable install."""

from __future__ import annotations

from pathlib import Path

import pytest

FOCAL = Path(__file__).resolve().parents[2] / "contrib" / "twinkle-focal"
USE = """
import sys
import torch
from twinkle.loss import FocalLoss
from twinkle_core.testing.engines import session_model
from twinkle_core.testing.toys import TinyLM, random_rows

torch.set_num_threads(1)
torch.manual_seed(0)
model = session_model(TinyLM())
model.set_loss("focal", gamma=1.5)
loss = model.sessions[""].loss
assert type(loss) is FocalLoss and loss.gamma == 1.5
model.set_optimizer("sgd", lr=0.1)
model.add_metric("hard_tokens", is_training=True)
for _ in range(3):
    model.forward_backward(inputs=random_rows([5, 3]))
    model.clip_grad_and_step()
print(sys.modules["twinkle_focal"].__file__)
print(model.calculate_metric())
"""


@pytest.mark.slow
def test_from_a_wheel_and_as_an_editable(fresh, tmp_path):
    (wheel,) = fresh.wheels(tmp_path / "dist", FOCAL)
    fresh.install(wheel)
    place, numbers = fresh.run("-c", USE).stdout.splitlines()
    assert Path(place).is_relative_to(fresh.folder)
    assert "hard_tokens" in numbers
    fresh.run("-m", "pip", "uninstall", "-q", "-y", "twinkle-focal")
    gone = fresh.run("-c", USE, status=1).stderr
    assert "unknown loss 'FocalLoss'" in gone

    fresh.install("-e", FOCAL)
    place, same = fresh.run("-c", USE).stdout.splitlines()
    assert Path(place) == FOCAL / "src" / "twinkle_focal" / "__init__.py"
    assert same == numbers
    listed = fresh.run("twinkle", "plugins", "--kind", "loss", "--load").stdout
    assert [line.split()[-1] for line in listed.splitlines() if "FocalLoss" in line] == ["ok"]
