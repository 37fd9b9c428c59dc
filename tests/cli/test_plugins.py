"""``twinkle plugins``, ``show`` and ``doctor``."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import time

import pytest

from twinkle_core import Loss, plugins, registry
from twinkle_core.cli import doctor, probe, show
from twinkle_core.cli.main import COMMANDS, main
from twinkle_core.errors import BadReference, NotA
from twinkle_core.index import Entry
from twinkle_core.names import CONTRACTS
from twinkle_core.testing.distributions import write_distribution

PATCH = """
from twinkle_core import Patch as Contract
class Patch(Contract):
    def apply(self, model): pass
    def undo(self, model): pass
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Add distributions to what this process has."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def add(name, version="0.3", **kwargs):
        write_distribution(tmp_path, name, version, **kwargs)
        registry.refresh()

    yield add
    registry.refresh()


def shown(capsys, *arguments):
    status = main(["plugins", "--json", *arguments])
    document = json.loads(capsys.readouterr().out)
    return status, {(row["kind"], row["name"]): row for row in document["components"] + document["hook_modules"]}, document


def test_the_table(capsys):
    assert main(["plugins", "--kind", "optimizers"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["kind", "name", "class", "distribution", "version", "state"]
    assert any(line.split()[:4] == ["optimizer", "adamw", "AdamW", "twinkle-core"] for line in lines)
    assert not any(line.startswith("loss") for line in lines)


def test_without_load_nothing_is_imported_here_or_elsewhere(installed, capsys, tmp_path):
    """Not even hook modules in a child process; and the list says so, and how to check."""
    entries = {"losses": {"shiny": "acme_unimported:ShinyLoss"}, "plugins": {"acme": "acme_unimported"}}
    source = f"open({str(tmp_path / 'imported')!r}, 'w')"
    installed("acme", entry_points=entries, modules={"acme_unimported.py": source})
    status, rows, _ = shown(capsys)
    assert (status, rows["loss", "shiny"]["state"], rows["plugins", "acme"]["state"]) == (0, "installed", "installed")
    main(["plugins"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("Nothing was imported") and "twinkle plugins --load" in last
    assert not (tmp_path / "imported").exists()


def test_what_nobody_can_install_yet_is_not_advertised(capsys):
    main(["plugins"])
    assert "pip install" not in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_speaks_to_users(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert not re.search(r"\(L[0-9]|``|:\w+:`", text)
    if command == "plugins":
        assert f"longer than {probe.TIMEOUT:.0f} s" in " ".join(text.split())


def test_load_compares_each_class_with_its_kinds_contract(installed, capsys):
    """As the registry does when it is built; a loss may be a plain function."""
    source = (
        "from twinkle_core import Loss\nclass Half(Loss): pass\nclass Foreign: pass\n"
        "class Whole(Loss):\n    def __call__(self, inputs, outputs): pass\ndef plain(inputs, outputs): pass\n"
    )
    names = ("Half", "Foreign", "Whole", "plain")
    installed("acme", entry_points={"losses": {n: f"acme_kinds:{n}" for n in names}}, modules={"acme_kinds.py": source})
    status, rows, _ = shown(capsys, "--kind", "loss", "--load")
    states = {name: rows["loss", name]["state"] for name in names}
    assert status == 0 and states == {"Half": "broken", "Foreign": "broken", "Whole": "ok", "plain": "ok"}
    with pytest.raises(NotA) as told:
        registry.build("loss", "acme/Half", {}, contract=Loss)
    assert rows["loss", "Half"]["why"] == str(told.value) and "it lacks __call__(inputs, outputs)" in str(told.value)
    first_party = [row for (_, _), row in rows.items() if row["distribution"] == "twinkle-core"]
    assert first_party and all(row["state"] == "ok" for row in first_party)


@pytest.mark.parametrize("kind", sorted(CONTRACTS))
def test_all_of_twinkles_own_keep_their_contracts(kind, capsys):
    _, rows, _ = shown(capsys, "--kind", kind, "--load")
    own = [e for e in registry.index().of(kind) if e.first_party]
    why = {e.name: rows[kind, e.name]["why"] for e in own}
    assert not any(why.values()), why


def test_a_terminal_is_told_what_is_waited_for(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    main(["plugins", "--kind", "runtime", "--load"])
    assert "checking 1 of " in capsys.readouterr().err


def test_load_tells_what_is_broken(installed, capsys):
    installed(
        "acme",
        entry_points={"patches": {n: f"acme_{n}:Patch" for n in ("exits", "fine", "loud", "raises")}},
        modules={
            "acme_raises.py": "raise ImportError('libfoo missing')",
            "acme_exits.py": "import os; os._exit(3)",
            "acme_loud.py": f"import os; os.write(1, b'noise\\n'); print('more')\n{PATCH}",
            "acme_fine.py": PATCH,
        },
    )
    status, rows, _ = shown(capsys, "--kind", "patches", "--load")
    assert status == 0
    assert {name: row["state"] for (_, name), row in rows.items() if row["distribution"] == "acme"} == {
        "raises": "broken", "exits": "broken", "loud": "ok", "fine": "ok",
    }  # fmt: skip
    assert "ImportError: libfoo missing" in rows["patch", "raises"]["why"]
    assert rows["patch", "exits"]["why"] == "its import ended the process (exit status 3)"
    main(["plugins", "--kind", "patches", "--load"])
    text = capsys.readouterr().out
    assert "patch 'exits' from acme 0.3: its import ended the process" in text
    assert text.count("patch 'raises' from acme 0.3") == 1


def test_states_that_need_no_import(installed, capsys, monkeypatch):
    installed("acme", entry_points={"patches": {"same": "acme:P", "odd": "acme:Q"}})
    installed("beta", entry_points={"patches": {"Same": "beta:P"}})
    installed("off", entry_points={"patches": {"off": "off:P"}})
    installed("future", entry_points={"patches": {"later": "future:P"}}, api=2)
    monkeypatch.setenv("TWINKLE_DISABLE_PLUGINS", "off")
    status, rows, _ = shown(capsys, "--kind", "patch")
    assert status == 0
    states = {row["distribution"] + "/" + row["name"]: row["state"] for row in rows.values()}
    states = {name: state for name, state in states.items() if not name.startswith("twinkle-")}
    assert states == {
        "acme/same": "shared name",
        "beta/Same": "shared name",
        "acme/odd": "installed",
        "off/off": "off",
        "future/later": "other API",
    }
    assert rows["patch", "same"]["why"] == "beta has this name too; ask for 'acme/same'"
    assert "plugin API 2" in rows["patch", "later"]["why"]


def test_a_hook_module_with_a_fault_is_shown(installed, capsys):
    installed(
        "bad-hooks", entry_points={"plugins": {"bad": "bad_hooks_mod"}}, modules={"bad_hooks_mod.py": "raise ValueError('no')"}
    )
    source = "from twinkle_core import hookimpl\n@hookimpl\ndef twinkle_aftr_step(): ...\n"
    installed("odd-hooks", entry_points={"plugins": {"odd": "odd_hooks_mod"}}, modules={"odd_hooks_mod.py": source})
    status, rows, _ = shown(capsys, "--kind", "runtime", "--load")
    assert status == 0
    assert "ValueError: no" in rows["plugins", "bad"]["why"]
    assert "Did you mean 'twinkle_after_step'" in rows["plugins", "odd"]["why"]


def test_damaged_metadata_is_shown(installed, capsys, tmp_path):
    home = write_distribution(tmp_path, "bad", "1", {"losses": {"bad": "bad:B"}})
    (home / "METADATA").write_text("Metadata-Version: 2.1\n")
    registry.refresh()
    status, _, document = shown(capsys)
    assert status == 0
    assert len(document["faults"]) == 1 and str(home) in document["faults"][0]


def test_a_child_that_hangs_is_ended(tmp_path, monkeypatch):
    (tmp_path / "hangs_mod.py").write_text("import time; time.sleep(60)")
    (tmp_path / "fine_mod.py").write_text("A = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    entries = [
        Entry("optimizer", name, f"{name}_mod:{attribute}", "d", "1") for name, attribute in (("fine", "A"), ("hangs", "A"))
    ]
    began = time.monotonic()
    before, hung, after = probe.probe([*entries, entries[0]], timeout=3.0)
    assert before == after == probe.Tried()
    why = hung.why
    assert why.startswith("its import took longer than 3 s, at ") and why.endswith("hangs_mod.py:1")
    assert time.monotonic() - began < 20


def test_the_listing_is_quick():
    """Under 0.3 s of CPU, interpreter included; the best of three, since others may run."""
    import resource

    def cpu():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "twinkle", "plugins"], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(cpu() for _ in range(3)) < 0.3


ENDS = {"entry_points": {"plugins": {"acme": "acme_ends"}}, "modules": {"acme_ends.py": "import os; os._exit(3)"}}


@pytest.mark.parametrize(
    ("words", "status", "shows"),
    [
        (["--help"], 0, "commands:"),
        ([], 0, "commands:"),
        (["plugins"], 0, "acme_ends"),
        (["plugins", "--load"], 0, "ended the process"),
        (["show", "loss/mse"], 0, "MSELoss"),
        (["show", "loss/msee"], 1, "Did you mean 'mse'?"),
        (["train", "--help"], 0, "--resume"),
    ],
)
def test_a_hook_module_that_ends_its_process_ends_no_command_that_looks_around(tmp_path, words, status, shows):
    write_distribution(tmp_path, "acme", "1", **ENDS)
    command = [sys.executable, "-m", "twinkle", *words]
    there = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=there, check=False, timeout=120)
    assert (done.returncode, shows in done.stdout + done.stderr) == (status, True), done


class TestShow:
    def test_a_class_without_a_text_shows_none_of_its_bases(self, installed, capsys):
        source = "from twinkle_core import Loss\nclass Mute(Loss):\n    def __call__(self, inputs, outputs): pass\n"
        installed("acme", entry_points={"losses": {"mute": "acme_mute:Mute"}}, modules={"acme_mute.py": source})
        assert main(["show", "loss/mute"]) == 0
        assert capsys.readouterr().out.endswith("\n\n    no documentation\n")

    def test_a_third_partys_loss(self, installed, capsys):
        source = (
            "from twinkle_core import Loss\nclass ShinyLoss(Loss):\n    '''Shines.\n\n    More of it.'''\n"
            "    needs = frozenset({'logps', 'entropies'})\n    scope = 'row'\n"
            "    def __init__(self, gamma: float = 2.0, *, soft: bool = False): pass\n"
            "    def __call__(self, inputs, outputs): pass\n"
        )
        installed("acme", entry_points={"losses": {"shiny": "acme_shown:ShinyLoss"}}, modules={"acme_shown.py": source})
        assert main(["show", "losses/acme/Shiny"]) == 0
        assert capsys.readouterr().out == (
            "loss 'shiny'\n"
            "    from         acme 0.3\n"
            "    class        acme_shown:ShinyLoss\n"
            "    needs        entropies, logps\n"
            "    scope        row\n"
            "    token_local  False\n"
            "    parameters   gamma: float = 2.0\n"
            "                 soft: bool = False\n"
            "\n    Shines.\n\n    More of it.\n"
        )

    def test_an_optimizer(self):
        text = show.describe("optimizer", "AdamW")
        assert "torch.optim:AdamW" in text and "weight_decay: float" in text

    @pytest.mark.parametrize("reference", ["loss", "loss/", "los/x", "/x"])
    def test_a_reference_that_is_none(self, reference):
        with pytest.raises(BadReference, match="is not KIND/NAME"):
            main(["show", reference, "--traceback"])


class TestDoctor:
    def test_the_report(self, installed, capsys, monkeypatch, tmp_path):
        monkeypatch.setenv("TWINKLE_CACHE", str(tmp_path / "not" / "there"))
        hook = "@hookimpl\ndef twinkle_report_header():\n    return ['acme is well', 'and so']\n"
        source = "from twinkle_core import hookimpl\n" + hook
        installed("acme", entry_points={"plugins": {"acme": "acme_reporting"}}, modules={"acme_reporting.py": source})
        monkeypatch.setattr(doctor, "plugin_faults", lambda: ([], []))
        assert main(["doctor"]) == 0
        plugins.unregister("acme/acme")
        text = capsys.readouterr().out
        for word in (
            "twinkle-core",
            "python",
            "torch",
            "TWINKLE_CACHE",
            str(tmp_path / "not" / "there"),
            "GiB",
            "acme is well",
            "and so",
        ):
            assert word in text

    def test_faults_are_listed(self, installed):
        installed(
            "acme", entry_points={"losses": {"bad": "acme_bad_one:L"}}, modules={"acme_bad_one.py": "raise OSError('disk')"}
        )
        assert any("OSError: disk" in fault for fault in doctor.plugin_faults()[0])

    def test_an_extra_that_is_not_installed_is_no_fault(self, installed, capsys):
        modules = {"acme_fast.py": "import absent_kernels", "acme_needs.py": "import absent_base"}
        requires = ["absent-kernels; extra == 'fast'", "absent-base"]
        names = {"fast": "acme_fast:L"}
        installed("acme", entry_points={"losses": names}, modules=modules, requires=requires)
        assert main(["doctor"]) == 0
        extras = capsys.readouterr().out.partition("\nextras\n")[2].partition("\nfaults\n")[0]
        assert "loss 'fast' from acme 0.3 needs 'absent_kernels'" in extras and "pip install 'acme[fast]'" in extras
        _, rows, _ = shown(capsys, "--kind", "losses", "--load")
        assert rows["loss", "fast"]["state"] == "lacks an extra"
        installed("acme", entry_points={"losses": names | {"needs": "acme_needs:L"}}, modules=modules, requires=requires)
        assert main(["doctor"]) == 1  # what it can't do without
        assert "needs 'absent_base'" in capsys.readouterr().out.partition("\nfaults\n")[2]

    def test_a_hook_module_that_ends_the_process_does_not_end_the_report(self, installed, capsys):
        installed(
            "acme", entry_points={"plugins": {"acme": "acme_ending"}}, modules={"acme_ending.py": "import os; os._exit(3)"}
        )
        assert main(["doctor"]) == 1
        text = capsys.readouterr().out
        assert "its import ended the process (exit status 3)" in text and "twinkle-core" in text

    def test_a_header_that_is_no_text(self, installed, capsys, monkeypatch):
        source = "from twinkle_core import hookimpl\n@hookimpl\ndef twinkle_report_header():\n    return 5\n"
        installed("acme", entry_points={"plugins": {"five": "acme_five"}}, modules={"acme_five.py": source})
        monkeypatch.setattr(doctor, "plugin_faults", lambda: ([], []))
        assert main(["doctor"]) == 0
        plugins.unregister("acme/five")
        assert capsys.readouterr().out.split("from plugins")[1].strip() == "5"
