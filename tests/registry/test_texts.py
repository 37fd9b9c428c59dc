"""Every error about names, as users read it."""

from __future__ import annotations

import sys

import pytest

from twinkle_core import arguments, errors, registry
from twinkle_core.contracts.loss import Loss

PREFIX = sys.prefix


def text(error: type[BaseException], call) -> str:
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    return str(caught.value)


def test_unknown_name(site):
    names = ("cross_entropy", "dpo", "focal", "grpo", "infonce")
    site.add("many", entry_points={"losses": {n: f"many:{n.title()}Loss" for n in names}})
    assert text(errors.UnknownName, lambda: site.registry().resolve("loss", "infonse")) == (
        "unknown loss 'infonse'. Did you mean 'infonce'?\n"
        "    installed: cross_entropy, dpo, focal, grpo, infonce\n"
        "    list them with: twinkle plugins --kind losses"
    )


def test_unknown_name_without_a_near_one(site):
    assert text(errors.UnknownName, lambda: site.registry().resolve("patch", "zzz")) == (
        "unknown patch 'zzz'.\n    installed: none\n    list them with: twinkle plugins --kind patches"
    )


def test_unknown_kind(site):
    assert text(errors.UnknownKind, lambda: site.registry().resolve("los", "x")) == (
        "unknown kind of component 'los'. Did you mean 'loss'?\n"
        "    kinds: losses, metrics, models, optimizers, patches, preprocessors, processors, runtimes, schedulers, templates"
    )


def test_not_installed(site):
    assert text(errors.NotInstalled, lambda: site.registry().resolve("model", "megatron")) == (
        f"model 'megatron' (MegatronModel) is provided by twinkle-megatron, which is not installed in {PREFIX}\n"
        "    pip install twinkle-megatron"
    )


def test_not_installed_because_too_old(site):
    site.add("twinkle-megatron", "0.0.1", entry_points={"models": {"other": "m:Other"}})
    assert text(errors.NotInstalled, lambda: site.registry().resolve("model", "MegatronModel")) == (
        f"model 'megatron' (MegatronModel) is provided by twinkle-megatron since 0.1.0; 0.0.1 is installed in {PREFIX}\n"
        "    pip install -U twinkle-megatron"
    )


def test_broken(site):
    site.add(
        "bad-losses",
        "0.3",
        entry_points={"losses": {"bad": "bad_losses:B"}},
        modules={"bad_losses.py": "import does_not_exist"},
    )
    assert text(errors.Broken, lambda: site.registry().resolve("loss", "bad")) == (
        "loss 'bad' from bad-losses 0.3 could not be imported (bad_losses:B).\n"
        "    ModuleNotFoundError: No module named 'does_not_exist'\n"
        "    The fault is in bad-losses or what it needs; other plugins are not affected.\n"
        "    Update it, or switch it off: TWINKLE_DISABLE_PLUGINS=bad-losses"
    )


def test_ambiguous(site):
    site.add("beta-losses", "2.0", entry_points={"losses": {"focal": "beta_losses:F"}})
    site.add("acme-losses", "1.2", entry_points={"losses": {"focal": "acme_losses:F"}})
    assert text(errors.Ambiguous, lambda: site.registry().resolve("loss", "focal")) == (
        "loss 'focal' is provided by 2 distributions; say which one:\n"
        "    acme-losses/focal   1.2   acme_losses:F\n"
        "    beta-losses/focal   2.0   beta_losses:F"
    )


@pytest.mark.parametrize(("wants", "update"), [(2, "twinkle-core"), (0, "new-losses")])
def test_api_mismatch(site, wants, update):
    site.add("new-losses", "9.0", entry_points={"losses": {"novel": "new_losses:N"}}, api=wants)
    assert text(errors.ApiMismatch, lambda: site.registry().resolve("loss", "novel")) == (
        f"loss 'novel' from new-losses 9.0 was written for plugin API {wants}; this twinkle-core has API 1.\n"
        f"    pip install -U {update}"
    )


def test_disabled(site, monkeypatch):
    site.add("acme-losses", "1.2", entry_points={"losses": {"focal": "acme_losses:F"}})
    monkeypatch.setenv("TWINKLE_DISABLE_PLUGINS", "Acme_Losses")
    assert text(errors.Disabled, lambda: site.registry().resolve("loss", "focal")) == (
        "loss 'focal' from acme-losses 1.2 is installed but switched off by TWINKLE_DISABLE_PLUGINS or TWINKLE_PLUGINS."
    )


def test_needs_library_of_an_extra(site):
    site.add(
        "twinkle-megatron",
        "0.3",
        entry_points={"models": {"megatron": "fake_megatron_backend:MegatronModel"}},
        modules={"fake_megatron_backend.py": "def load():\n    from megatron.energon import WorkerConfig\nload()"},
        requires=["megatron-core; extra == 'mcore'", "megatron-energon>=6; extra == 'data'"],
    )
    assert text(errors.NeedsLibrary, lambda: site.registry().resolve("model", "megatron")) == (
        f"model 'megatron' from twinkle-megatron 0.3 needs 'megatron.energon', which is not installed in {PREFIX}\n"
        "    pip install 'twinkle-megatron[data]'"
    )


def test_needs_library_of_a_plain_dependency(site):
    site.add(
        "acme-losses",
        "1.2",
        entry_points={"losses": {"focal": "acme_losses:F"}},
        modules={"acme_losses.py": "import absent_kernels.fast"},
        requires=["absent-kernels (>=1)"],
    )
    assert text(errors.NeedsLibrary, lambda: site.registry().resolve("loss", "focal")) == (
        f"loss 'focal' from acme-losses 1.2 needs 'absent_kernels.fast', which is not installed in {PREFIX}\n"
        "    pip install absent-kernels"
    )


def test_not_a(site):
    site.add(
        "acme-losses",
        "1.2",
        entry_points={"losses": {"focal": "acme_losses:Focal"}},
        modules={"acme_losses.py": "class Focal:\n    pass"},
    )
    assert text(errors.NotA, lambda: site.registry().build("loss", "focal", {}, contract=Loss)) == (
        "loss 'focal' from acme-losses 1.2 is not a twinkle Loss: it lacks __call__(inputs, outputs).\n"
        "    check it with: twinkle check acme-losses"
    )


def test_not_a_without_a_distribution(site):
    class Duck:
        def __call__(self, inputs, outputs):
            return None

    where = f"{__name__}.{Duck.__qualname__}"
    for spec in (Duck, Duck()):
        assert text(errors.NotA, lambda spec=spec: site.registry().build("loss", spec, {}, contract=Loss)) == (
            f"loss {where} is not a twinkle Loss: it does not derive from twinkle_core.Loss."
        )


def test_wrong_argument():
    class InfoNCELoss:
        def __init__(self, temperature=0.1, margin=0.0):
            pass

    assert text(errors.WrongArgument, lambda: arguments.check(InfoNCELoss, {"temperatur": 1})) == (
        "InfoNCELoss has no parameter 'temperatur'. Did you mean 'temperature'?"
    )
    assert text(errors.WrongArgument, lambda: arguments.check(InfoNCELoss, {"zzz": 1})) == (
        "InfoNCELoss has no parameter 'zzz'.\n    it has: temperature, margin"
    )


def test_worker_mismatch():
    driver = [{"kind": "loss", "name": "focal", "distribution": "acme-losses", "version": "1.2", "value": "acme:F"}]
    other = [dict(driver[0], version="1.1")]
    assert text(errors.WorkerMismatch, lambda: registry.compare_snapshots(driver, other, rank=3, host="node-7")) == (
        "worker 3 (node-7) has acme-losses 1.1; the driver has 1.2.\n    pip install 'acme-losses==1.2' on the workers"
    )
    assert text(errors.WorkerMismatch, lambda: registry.compare_snapshots(driver, [], rank=3, host="node-7")) == (
        "worker 3 (node-7) has no acme-losses; the driver has 1.2.\n    pip install 'acme-losses==1.2' on the workers"
    )
    registry.compare_snapshots(driver, [*driver, dict(driver[0], name="more", version="9")])


def test_name_taken(site):
    site.add("acme-losses", "1.2", entry_points={"losses": {"focal": "acme_losses:F"}})
    assert text(errors.NameTaken, lambda: site.registry().register("loss", "Focal", object)) == (
        "loss 'Focal' is taken by loss 'focal' from acme-losses 1.2.\n"
        "    choose another name, or register(..., override=True) to use yours in this process"
    )


def test_frozen(site):
    site.add("acme-losses", "1.2", entry_points={"losses": {"focal": "acme_losses:F", "other": "acme_losses:G"}})
    names = site.registry()
    names.freeze({"loss": ["focal"]})
    assert text(errors.FrozenRegistry, lambda: names.resolve("loss", "os:system")) == (
        "loss 'os:system' is not allowed here: the registry is frozen.\n    allowed: acme-losses/focal\n"
        "    import paths, repositories and new registrations are refused in a frozen registry"
    )


def test_refused_repository(site):
    assert text(errors.RemoteCodeRefused, lambda: site.registry().resolve("loss", "hf://acme/losses#Focal")) == (
        "loss 'hf://acme/losses#Focal' is code in a repository, and running it is off.\n"
        "    read that code; if you trust it: TWINKLE_TRUST_REMOTE_CODE=1"
    )


def test_import_path_that_leads_nowhere(site):
    assert text(errors.BadImportPath, lambda: site.registry().resolve("loss", "no_such_module:Loss")) == (
        "loss 'no_such_module:Loss' could not be imported.\n    ModuleNotFoundError: No module named 'no_such_module'\n"
        "    the form is module:Class"
    )


def test_arguments_for_what_is_built(site):
    def ready(inputs, outputs):
        return 0.0

    assert text(errors.AlreadyBuilt, lambda: site.registry().build("loss", ready, {"temperature": 1})) == (
        "loss ready is built already and takes no arguments (temperature).\n"
        "    give its class or its name with them, or the object without"
    )


NASTY = "e\x1b[2J\u202eX" + "y" * 300


def test_names_from_elsewhere_do_nothing_to_a_terminal_and_are_cut(site):
    """A name from a network with an escape, or a line end that would forge a line of a log; and one from metadata."""
    site.add("acme", entry_points={"losses": {NASTY: "acme:F\x1b[2J"}})
    names = site.registry()
    for name in ("z" + NASTY, "a\nERROR forged\r\udc80", "acme/" + NASTY[:5] + "z"):
        for kind in ("loss", f"x{name}"):
            with pytest.raises((errors.UnknownName, errors.UnknownKind)) as caught:
                names.find(kind, name)
            lines = str(caught.value).split("\n")
            assert len(lines) <= 3 and all(line.isprintable() and len(line) < 300 for line in lines)
    assert "'a\\nERROR forged\\r\\udc80'" in text_of(names, "a\nERROR forged\r\udc80")
    with pytest.raises(errors.Broken) as broken:
        names.resolve("loss", NASTY)
    assert "(acme:F\\x1b[2J)" in str(broken.value) and str(broken.value).replace("\n", "").isprintable()
    names.freeze({})
    with pytest.raises(errors.FrozenRegistry) as frozen:
        names.find("loss", NASTY)
    assert str(frozen.value).replace("\n", "").isprintable()


def text_of(names, name):
    with pytest.raises(errors.UnknownName) as caught:
        names.find("loss", name)
    return str(caught.value)


def test_a_long_list_of_names_is_cut(site):
    site.add("acme", entry_points={"losses": {f"loss_number_{i:03}": "acme:F" for i in range(100)}})
    (line,) = [line for line in text_of(site.registry(), "zzz").splitlines() if "installed:" in line]
    assert line.count("loss_number_") == 40 and line.endswith(", ... and 60 more")


def test_damaged_metadata_of_a_stranger_is_named_where_it_may_be_the_cause(site, another_site):
    """Libraries that ask for all entry points while they are imported, as torch does, fail by anybody's."""
    source = "from importlib.metadata import entry_points\nentry_points(group='acme.backends')\nclass F: ...\n"
    site.add("acme", entry_points={"losses": {"focal": "acme_all:F"}}, modules={"acme_all.py": source})
    names = site.registry()
    assert names.resolve("loss", "focal").__name__ == "F"
    sys.modules.pop("acme_all")
    home = site.add("stranger", api=None)
    (home / "entry_points.txt").write_text("[console_scripts]\nhello\n")
    with pytest.raises(errors.Broken) as caught:
        names.resolve("loss", "focal")
    told, where = str(caught.value).splitlines()[2:4]
    assert "metadata that is damaged" in told and str(home) in where
    (home / "entry_points.txt").unlink()
    assert names.resolve("loss", "focal").__name__ == "F"


def test_a_fault_of_an_option_names_its_key_once():
    fault = ("--dataloader.batch_size", "dataloader.batch_size: must be greater than 0, not 0")
    other = ("--optimizer.lr", "optimizer 'adamw': lr='abc'")
    assert str(errors.BadConfig("sft.yaml", [fault, other])).splitlines()[1:] == [
        "    --dataloader.batch_size: must be greater than 0, not 0",
        "    --optimizer.lr: optimizer 'adamw': lr='abc'",
    ]
