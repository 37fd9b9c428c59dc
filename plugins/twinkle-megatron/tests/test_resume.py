"""A checkpoint of one layout goes on under another, and bit for bit under its own."""

from __future__ import annotations

import pytest

from twinkle_core.testing.ranks import run
from twinkle_megatron.testing import Layouts

OF_TWO = [{"tp_size": 2}, {"tp_size": 2}, {"pp_size": 2}, {"dp_size": 2}]


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "adapter"])
def test_a_checkpoint_of_two_tensor_ranks_goes_on_anywhere(llama, tmp_path, adapter):
    """Adam counts its updates once for each parameter: where they share one counter after a load, losses are off by 1e-3."""
    given = {"folder": llama, "home": str(tmp_path), "adapter": adapter}
    unbroken, same, stages, data = run(Layouts, "resume", 2, {**given, "layouts": OF_TWO}, timeout=400)[0]
    assert same == unbroken
    (one,) = run(Layouts, "resume", 1, {**given, "layouts": [{}]}, timeout=200)[0]
    for found in (stages, data, one):
        for what in ("losses", "norms"):
            assert found[what] == pytest.approx(unbroken[what], rel=1e-5), what
