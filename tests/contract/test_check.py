"""``twinkle check``: distributions and classes, without a test file."""

from __future__ import annotations

import json
import sys
import time

import pytest

from twinkle_core import registry
from twinkle_core.cli import check as check_command
from twinkle_core.cli.check import Row
from twinkle_core.cli.main import main
from twinkle_core.errors import NeedsLibrary, UnknownCheck
from twinkle_core.testing import LossSuite, has_pytest
from twinkle_core.testing.distributions import write_distribution

RIGHT = """
from twinkle_core import Loss, LossOutput

class AcmeLoss(Loss):
    token_local = True

    def __call__(self, inputs, outputs):
        mask = inputs["labels"] != -100
        return LossOutput(-(outputs.logps * mask).sum(), mask.sum())

class MeanLoss(AcmeLoss):
    def __call__(self, inputs, outputs):
        right = super().__call__(inputs, outputs)
        return LossOutput(right.sum / right.weight.clamp(min=1), (right.weight > 0).float())

class GammaLoss(AcmeLoss):
    def __init__(self, gamma):
        self.gamma = gamma

class HangingLoss(AcmeLoss):
    def __call__(self, inputs, outputs):
        import time
        time.sleep(600)

class ExitingLoss(AcmeLoss):
    def __call__(self, inputs, outputs):
        import os
        print("noise", flush=True)
        os._exit(3)

class OpenLoss(Loss):
    pass

def entropy(inputs, outputs):
    return -outputs.logits.log_softmax(-1)[inputs["labels"] != -100].max(-1).values.mean().nan_to_num()

class Plain:
    pass

class Callable:
    __call__ = AcmeLoss.__call__
"""
SUITES = """
import pytest
from twinkle_core.testing import LossSuite
from acme_check import GammaLoss, MeanLoss

class GammaSuite(LossSuite):
    component = GammaLoss
    arguments = {"gamma": 2.0}

class MeanSuite(LossSuite):
    component = MeanLoss
    expected_failures = {
        "test_halves_add_up_as_its_scope_says": "a mean, for comparison only",
        "test_slices_of_rows_add_up_where_it_is_token_local": "the same",
    }
"""


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """Installs the distribution acme with these groups of entry points."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(modules=None, **groups):
        write_distribution(
            tmp_path, "acme", "1.2", groups, {"acme_check.py": RIGHT, "acme_suites.py": SUITES, **(modules or {})}
        )
        registry.refresh()

    yield install
    registry.refresh()
    for name in ("acme_check", "acme_suites"):
        sys.modules.pop(name, None)


@pytest.fixture
def check(capsys):
    """Status and text of ``twinkle check …``."""

    def run(*words):
        status = main(["check", *words])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return run


def line(text, label):
    (found,) = [row for row in text.splitlines() if row.startswith(f"{label} ")]
    return [int(word) for word in found.removeprefix(label).split()]


def test_a_right_distribution_is_green(acme, check):
    acme(losses={"acme": "acme_check:AcmeLoss"}, optimizers={"acme_sgd": "torch.optim:SGD"})
    status, text = check("acme")
    assert status == 0, text
    passed, failed, expected, _ = line(text, "loss acme")
    assert passed > 15 and failed == expected == 0
    assert line(text, "optimizer acme_sgd")[1] == 0
    assert "all passed" in text


def test_a_fault_is_in_the_table_and_told_below(acme, check):
    acme(losses={"acme": "acme_check:AcmeLoss", "mean": "acme_check:MeanLoss"})
    status, text = check("Acme")
    assert status == 1
    assert line(text, "loss mean")[1] == 2 and line(text, "loss acme")[1] == 0
    assert "failed: loss mean: test_halves_add_up_as_its_scope_says\n    its scope is 'token', but its halves do not" in text


def test_suites_in_the_metadata_are_used(acme, check):
    names = {"gamma": "acme_check:GammaLoss", "mean": "acme_check:MeanLoss"}
    acme(losses=names)
    status, text = check("acme")
    assert status == 1
    assert text.count("can't be built for its checks: missing a required argument: 'gamma'") == 1, text
    acme(losses=names, testing={"losses.gamma": "acme_suites:GammaSuite", "loss.Mean": "acme_suites:MeanSuite"})
    status, text = check("acme")
    assert status == 0, text
    assert line(text, "loss mean")[2] == 2
    assert "expected: loss mean: test_halves_add_up_as_its_scope_says\n    a mean, for comparison only" in text


def test_a_suite_for_nothing_or_of_another_kind_is_a_fault(acme, check):
    acme(
        losses={"acme": "acme_check:AcmeLoss"},
        metrics={"gone": "acme_check:Gone"},
        testing={"losses.acmee": "acme_suites:GammaSuite", "metrics.gone": "acme_suites:GammaSuite"},
    )
    status, text = check("acme")
    assert status == 1
    assert "[twinkle.testing] names 'losses.acmee', which acme does not provide. Did you mean 'losses.acme'?" in text
    assert "failed: metric gone: loads" in text


def test_a_component_that_ends_the_process_or_hangs_costs_its_own_row(acme, check):
    acme(
        losses={"a_exits": "acme_check:ExitingLoss", "b_hangs": "acme_check:HangingLoss", "c_good": "acme_check:AcmeLoss"},
        patches={"exits": "acme_exits:P"},
        modules={"acme_exits.py": "import os; os._exit(5)"},
    )
    began = time.monotonic()
    status, text = check("acme", "--timeout", "15")
    assert status == 1 and time.monotonic() - began < 150
    assert "failed: loss a_exits: runs\n    it ended the process (exit status 3)" in text
    assert "failed: loss b_hangs: runs\n    it took longer than 15 s, at " in text and "acme_check.py:" in text
    assert line(text, "loss c_good")[1] == 0
    assert "failed: patch exits: runs\n    it ended the process (exit status 5)" in text


def test_what_does_not_load_or_is_none_of_its_kind(acme, check):
    hooks = "from twinkle_core import hookimpl\n@hookimpl\ndef twinkle_aftr_step(): ...\n"
    acme(
        losses={"open": "acme_check:OpenLoss", "none": "acme_check:Callable", "function": "acme_check:entropy"},
        models={"broken": "acme_broken:Model"},
        plugins={"bad": "acme_hooks"},
        preprocessors={"plain": "acme_check:Plain"},
        modules={"acme_broken.py": "raise ImportError('libfoo missing')", "acme_hooks.py": hooks},
    )
    status, text = check("acme", "--json")
    assert status == 1
    rows = {row["component"]: row["checks"] for row in json.loads(text)["components"]}
    failed = {name: [c for c in checks if c["outcome"] == "failed"] for name, checks in rows.items()}
    assert "it lacks __call__(inputs, outputs)" in failed["loss open"][0]["text"]
    assert "it does not derive from twinkle_core.Loss" in failed["loss none"][0]["text"]
    assert "ImportError: libfoo missing" in failed["model broken"][0]["text"]
    assert "Did you mean 'twinkle_after_step'" in failed["hooks bad"][0]["text"]
    assert "can't be called with a row" in failed["preprocessor plain"][0]["text"]
    assert failed["loss function"] == []


def test_a_group_that_does_not_exist_is_told(acme, check):
    acme(losses={"acme": "acme_check:AcmeLoss"}, metrcs={"acme": "acme_check:Gone"})
    status, text = check("acme")
    assert status == 1
    assert "there is no group [twinkle.metrcs]; did it mean [twinkle.metrics]?" in text


def test_an_unknown_distribution(acme, check):
    acme(losses={"acme": "acme_check:AcmeLoss"})
    status, text = check("acmee")
    assert status == 2
    assert "'acmee' is not installed. Did you mean 'acme'?" in text
    status, text = check("numpy")
    assert status == 2
    assert "'numpy' is installed, but provides no component of twinkle." in text


def test_a_class_or_a_suite_that_is_not_installed(acme, check, tmp_path, monkeypatch):
    acme()
    assert check("acme_check:AcmeLoss")[0] == 0
    status, text = check("acme_check:MeanLoss")
    assert status == 1 and "Return the sum over items, not their mean" in text
    assert check("acme_suites:GammaSuite")[0] == 0
    status, text = check("acme_check:Plain")
    assert status == 2 and "'acme_check:Plain' can't be checked: it is the class Plain" in text
    assert check("acme_gone:Loss")[0] == 1
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "local_metric.py").write_text("from twinkle_core.metrics.accuracy import AccuracyMetric as Mine\n")
    monkeypatch.chdir(tmp_path / "here")
    assert check("local_metric:Mine")[0] == 0


def test_without_pytest_it_says_what_to_install(monkeypatch, check):
    monkeypatch.delitem(sys.modules, has_pytest.__name__)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, text = check("twinkle-core")
    assert status == 1
    assert text.startswith("NeedsLibrary: a compliance suite needs 'pytest'")
    assert "pip install 'twinkle-core[testing]'" in text
    with pytest.raises(NeedsLibrary):
        __import__(has_pytest.__name__)


def test_an_expected_failure_of_no_test_is_refused():
    with pytest.raises(UnknownCheck, match="Did you mean 'test_row_order_changes_nothing'"):
        type("TestMine", (LossSuite,), {"expected_failures": {"test_row_order": "by its nature"}})


@pytest.mark.parametrize(("outcomes", "told"), [(1, "all passed: 1 check"), (2, "all passed: 2 checks")])
def test_the_last_line_counts_rightly(outcomes, told):
    row = Row("loss x", (("test_x", "passed", ""),) * outcomes)
    assert check_command.text([row], []).splitlines()[-1] == told


def test_a_child_that_ends_at_its_own_imports_tells_why(acme, check, tmp_path, monkeypatch):
    """Damaged metadata of a stranger ends the import of torch, before any component is looked at."""
    acme(optimizers={"acme_sgd": "torch.optim:SGD"})
    home = write_distribution(tmp_path, "stranger", "1")
    (home / "entry_points.txt").write_text("[console_scripts]\nhello\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    status, text = check("acme")
    assert status == 1
    assert "it ended the process (exit status 1); the last that it wrote: TypeError: " in text


@pytest.mark.parametrize("seconds", ["inf", "nan", "0", "-1", "1e300", "soon"])
def test_a_time_that_is_none_is_refused(seconds, capsys):
    with pytest.raises(SystemExit) as end:
        main(["check", "twinkle-core", f"--timeout={seconds}"])
    assert end.value.code == 2 and f"must be seconds, more than 0 and at most 86400, not '{seconds}'" in capsys.readouterr().err
