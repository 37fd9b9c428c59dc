"""Settings whose values can't be: told, and what is used in their place."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from twinkle_core import settings
from twinkle_core.cli import doctor
from twinkle_core.cli.main import main


@pytest.mark.parametrize("variable", ["TWINKLE_STRICT_PLUGINS", "TWINKLE_TRUST_REMOTE_CODE"])
def test_a_switch_that_says_neither_is_off_and_a_fault(variable, monkeypatch):
    read = {"TWINKLE_STRICT_PLUGINS": settings.strict_plugins, "TWINKLE_TRUST_REMOTE_CODE": settings.trust_remote_code}[
        variable
    ]
    for value, on in (("1", True), ("YES", True), ("0", False), ("off", False), ("", False)):
        monkeypatch.setenv(variable, value)
        assert read() is on and settings.faults() == []
    monkeypatch.setenv(variable, "maybe")
    (fault,) = settings.faults()
    assert read() is False and fault.startswith(f"{variable}='maybe' is neither yes") and fault.endswith("it is off")


@pytest.mark.parametrize(("value", "used"), [("debug", "DEBUG"), ("WARNING", "WARNING"), ("debugg", "INFO"), ("", "INFO")])
def test_an_unknown_level_is_info_and_a_fault(value, used, monkeypatch):
    monkeypatch.setenv("TWINKLE_LOG_LEVEL", value)
    assert settings.log_level() == used and used in logging.getLevelNamesMapping()
    assert bool(settings.faults()) == (value in ("debugg", ""))


def test_the_log_says_once_what_can_not_be():
    program = "from twinkle_core.log import get_logger as g; g(); g('data').info('seen'); g('data').debug('unseen')"
    there = {**os.environ, "TWINKLE_LOG_LEVEL": "debugg", "TWINKLE_STRICT_PLUGINS": "maybe"}
    done = subprocess.run([sys.executable, "-c", program], env=there, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    assert [line.split("=")[0].split()[-1] for line in lines[:2]] == ["TWINKLE_STRICT_PLUGINS", "TWINKLE_LOG_LEVEL"]
    assert "INFO is used" in lines[1] and lines[2:] == ["[INFO twinkle.data] seen"]


@pytest.mark.parametrize("variable", ["TWINKLE_DISABLE_PLUGINS", "TWINKLE_PLUGINS"])
def test_a_distribution_that_is_not_there_is_a_line_and_one_that_is_there_is_none(variable, site, monkeypatch, caplog):
    site.add("acme-losses", entry_points={"losses": {"focal": "acme_losses:F"}})
    monkeypatch.setenv(variable, "Acme_Losses, acme-loses nothere")
    names = site.registry()
    for _ in range(2):
        names.plugins().hooks()
    told = [r.getMessage() for r in caplog.records if variable in r.getMessage()]
    assert [f"'{name}'" in line for name, line in zip(("acme-loses", "nothere"), told, strict=True)] == [True, True]
    assert "did you mean 'acme-losses'?" in told[0] and "did you mean" not in told[1]


def test_doctor_counts_them_as_faults(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "plugin_faults", lambda: ([], []))
    monkeypatch.setattr(doctor, "device", list)
    monkeypatch.setenv("TWINKLE_LOG_LEVEL", "debugg")
    monkeypatch.setenv("TWINKLE_DISABLE_PLUGINS", "nothere")
    assert main(["doctor"]) == 1
    faults = capsys.readouterr().out.split("\nfaults\n")[1]
    assert "TWINKLE_LOG_LEVEL='debugg' is none of DEBUG" in faults and "TWINKLE_DISABLE_PLUGINS names 'nothere'" in faults
