"""The order in which a spec resolves."""

from __future__ import annotations

import sys

import pytest

from twinkle_core import errors, loading
from twinkle_core.contracts.loss import Loss
from twinkle_core.registry import Registry

FOCAL = "class FocalLoss:\n    def __init__(self, gamma=2.0):\n        self.gamma = gamma\n"


def focal(site, dist="acme-losses", module="acme_losses", name="focal", **kwargs):
    site.add(dist, entry_points={"losses": {name: f"{module}:FocalLoss"}}, modules={f"{module}.py": FOCAL}, **kwargs)


def test_an_object_is_taken_as_it_is(site):
    for thing in (object(), print, int):
        assert site.registry().resolve("loss", thing) is thing


def test_every_spelling_gives_the_same_class(site):
    focal(site)
    names = site.registry()
    found = {
        names.resolve("loss", s)
        for s in ("focal", "Focal", "FOCAL_LOSS", "FocalLoss", "acme-losses/focal", "Acme_Losses/FocalLoss")
    }
    assert found == {sys.modules["acme_losses"].FocalLoss}
    assert names.resolve("losses", "focal") in found


def test_nothing_is_imported_before_it_is_asked_for(site):
    focal(site)
    names = site.registry()
    assert names.find("loss", "focal").cls == "FocalLoss"
    assert [e.name for e in names.entries("loss")] == ["focal"]
    assert "acme_losses" not in sys.modules
    names.resolve("loss", "focal")
    assert "acme_losses" in sys.modules


def test_a_class_name_differs_from_the_entry_name(site):
    site.add("acme-losses", entry_points={"losses": {"smooth": "acme_losses:FocalLoss"}}, modules={"acme_losses.py": FOCAL})
    names = site.registry()
    assert names.resolve("loss", "smooth") is names.resolve("loss", "focal")


def test_a_first_party_name_can_not_be_taken_over(site):
    focal(site, "acme-losses", "acme_losses", name="InfoNCE")
    focal(site, "twinkle-core", "own_losses", name="infonce")
    names = site.registry()
    for spelling in ("infonce", "InfoNCE", "InfoNCELoss"):
        assert names.find("loss", spelling).dist == "twinkle-core"
    assert names.find("loss", "acme-losses/InfoNCE").dist == "acme-losses"


def test_of_one_distribution_the_exact_spelling_wins(site):
    site.add("acme", entry_points={"losses": {"a_b": "m:One", "ab": "m:Two"}})
    names = site.registry()
    assert [names.find("loss", n).value for n in ("a_b", "ab")] == ["m:One", "m:Two"]
    with pytest.raises(errors.Ambiguous, match="1 distribution under 2 spellings"):
        names.find("loss", "A-B")


def test_two_names_of_one_class_are_no_quarrel(site):
    site.add("acme", entry_points={"losses": {"one": "m:ThingLoss", "two": "m:ThingLoss"}})
    assert site.registry().find("loss", "ThingLoss").value == "m:ThingLoss"


def test_register(site):
    focal(site)
    names = site.registry()
    names.register("loss", "mine", FocalLike)
    assert names.resolve("loss", "MineLoss") is FocalLike
    for taken in ("mine", "focal", "FocalLoss"):
        with pytest.raises(errors.NameTaken):
            names.register("loss", taken, int)
    assert names.resolve("loss", "mine") is FocalLike
    names.register("loss", "focal", int, override=True)
    assert names.resolve("loss", "focal") is int
    assert names.resolve("loss", "acme-losses/focal").__name__ == "FocalLoss"
    names.register("loss", "later", "acme_losses:FocalLoss")
    assert names.resolve("loss", "later") is sys.modules["acme_losses"].FocalLoss


class FocalLike:
    pass


def test_import_path(site):
    focal(site)
    assert site.registry().resolve("loss", "acme_losses:FocalLoss") is sys.modules["acme_losses"].FocalLoss
    for wrong in ("acme_losses:Nothing", "acme_losses:", ":FocalLoss"):
        with pytest.raises(errors.BadImportPath):
            site.registry().resolve("loss", wrong)


def test_names_known_only_at_run_time(site):
    site.add(
        "acme-hooks",
        "1.2",
        entry_points={"plugins": {"acme": "acme_hooks"}},
        modules={
            "acme_hooks.py": "from twinkle_core import hookimpl\n"
            "class Made: pass\n"
            "MADE = {'made': Made, 'path': 'acme_hooks:Made'}\n"
            "@hookimpl\ndef twinkle_components(kind):\n    return MADE if kind == 'loss' else None\n"
            "@hookimpl\ndef twinkle_resolve(kind, name):\n    return Made if name == 'anything' else None\n"
        },
    )
    names = site.registry()
    made = names.resolve("loss", "made")
    assert made.__name__ == "Made"
    assert {names.resolve("loss", s) for s in ("path", "acme-hooks/made", "anything")} == {made}
    assert names.find("loss", "made").label == "loss 'made' from acme-hooks 1.2"
    with pytest.raises(errors.UnknownName, match=r"Did you mean 'made'\?\n    installed: made, path"):
        names.resolve("loss", "mode")


def test_an_installed_name_comes_before_one_of_a_hook(site):
    focal(site)
    hook = "from twinkle_core import hookimpl\n@hookimpl\ndef twinkle_components(kind):\n    return {'focal': int}\n"
    site.add("zeta", entry_points={"plugins": {"z": "zeta_hooks"}}, modules={"zeta_hooks.py": hook})
    assert site.registry().resolve("loss", "focal").__name__ == "FocalLoss"


def test_hints(site):
    focal(site)
    for wrong, meant in (("acme-loses/focal", "acme-losses/focal"), ("FocalLos", "FocalLoss"), ("foc", "focal")):
        with pytest.raises(errors.UnknownName, match=f"Did you mean '{meant}'"):
            site.registry().resolve("loss", wrong)
    with pytest.raises(errors.UnknownName, match="Did you mean 'megatron'"):
        site.registry().resolve("model", "megatorn")


def test_allow_list_spares_first_party(site, monkeypatch):
    focal(site, "acme-losses", "acme_losses", name="a")
    focal(site, "beta-losses", "beta_losses", name="b")
    focal(site, "twinkle-core", "own_losses", name="c")
    monkeypatch.setenv("TWINKLE_PLUGINS", "beta_losses")
    names = site.registry()
    assert [e.name for e in names.entries("loss")] == ["b", "c"]
    with pytest.raises(errors.Disabled):
        names.resolve("loss", "a")
    monkeypatch.setenv("TWINKLE_DISABLE_PLUGINS", "beta-losses, twinkle-core")
    assert names.entries("loss") == []  # read at each look-up, no new scan


def test_a_switched_off_rival_makes_a_name_plain(site, monkeypatch):
    focal(site, "acme-losses", "acme_losses")
    focal(site, "beta-losses", "beta_losses")
    monkeypatch.setenv("TWINKLE_DISABLE_PLUGINS", "acme-losses")
    assert site.registry().resolve("loss", "focal").__module__ == "beta_losses"


def test_either_version_of_the_api_will_do(site):
    home = site.add("acme", entry_points={"losses": {"focal": "acme:FocalLoss"}}, modules={"acme.py": FOCAL}, api=2)
    with (home / "entry_points.txt").open("a") as file:
        file.write("v1 = acme\n")
    assert site.registry().resolve("loss", "focal").__name__ == "FocalLoss"


def test_a_third_version_does_not_help(site):
    focal(site, api=None)
    entry = site.registry().find("loss", "focal")
    assert entry.api == (1,)
    with pytest.raises(errors.ApiMismatch, match="has API 2, 3"):
        loading.load(entry, (2, 3))


def test_extras_and_nested_attributes_of_an_entry(site):
    source = "class Outer:\n    class Inner:\n        pass\n"
    site.add("acme", entry_points={"losses": {"in": "acme_nested:Outer.Inner [gpu]"}}, modules={"acme_nested.py": source})
    assert site.registry().resolve("loss", "in").__qualname__ == "Outer.Inner"
    assert site.registry().find("loss", "Inner").name == "in"


def test_sys_exit_in_a_plugin_is_only_a_broken_plugin(site):
    site.add("bad", entry_points={"losses": {"bad": "bad_exit:B"}}, modules={"bad_exit.py": "import sys; sys.exit(3)"})
    with pytest.raises(errors.Broken, match="SystemExit: 3"):
        site.registry().resolve("loss", "bad")


def test_an_attribute_that_came_later_is_found(site):
    focal(site)
    site.write("acme_losses.py", "")
    names = site.registry()
    with pytest.raises(errors.Broken, match="has no attribute 'FocalLoss'"):
        names.resolve("loss", "focal")
    site.write("acme_losses.py", FOCAL)
    assert names.resolve("loss", "focal").__name__ == "FocalLoss"


def test_a_newly_installed_plugin_is_found_after_refresh(site):
    names = site.registry()
    with pytest.raises(errors.UnknownName):
        names.resolve("loss", "focal")
    focal(site)
    with pytest.raises(errors.UnknownName):
        names.resolve("loss", "focal")
    names.refresh()
    assert names.resolve("loss", "focal").__name__ == "FocalLoss"


class TestBuild:
    def test_a_class_is_built_with_its_arguments(self, site):
        focal(site)
        names = site.registry()
        assert names.build("loss", "focal", {"gamma": 1.0}).gamma == 1.0
        assert names.build("loss", "focal").gamma == 2.0
        with pytest.raises(errors.WrongArgument, match="Did you mean 'gamma'"):
            names.build("loss", "focal", {"gama": 1.0})

    def test_what_has_no_default_must_be_given(self, site):
        class Warm:
            def __init__(self, steps, *, end, start=0):
                pass

        with pytest.raises(errors.MissingArgument, match="Warm needs 'end'"):
            site.registry().build("scheduler", Warm, {"steps": 3})

    def test_an_instance_is_taken_as_it_is(self, site):
        thing = FocalLike()
        assert site.registry().build("loss", thing, {}) is thing
        with pytest.raises(errors.AlreadyBuilt):
            site.registry().build("loss", thing, {"gamma": 1})

    def test_the_contract_is_kept(self, site):
        class Half(Loss):
            pass

        class Whole(Loss):
            def __call__(self, inputs, outputs):
                raise AssertionError("only built here, never called")

        names = Registry(path=())
        assert isinstance(names.build("loss", Whole, contract=Loss), Whole)
        assert isinstance(names.build("loss", Whole(), contract=Loss), Whole)
        with pytest.raises(errors.NotA, match=r"it lacks __call__\(inputs, outputs\)"):
            names.build("loss", Half, contract=Loss)

    def test_a_registered_one_is_named_in_the_error(self):
        names = Registry(path=())
        names.register("loss", "mine", FocalLike)
        with pytest.raises(errors.NotA, match="loss 'mine' registered in this process is not a twinkle Loss") as caught:
            names.build("loss", "mine", contract=Loss)
        assert "twinkle check" not in str(caught.value)


class TestNamesOfTwinklesOwn:
    """Nobody else answers them, whether their distribution is here or not."""

    def test_an_absent_distribution_keeps_its_names(self, site):
        focal(site, "acme", "acme_models", name="megatron")
        site.add("acme", entry_points={"models": {"megatron": "acme_models:FocalLoss"}})
        names = site.registry()
        for spelling in ("megatron", "Megatron", "MegatronModel"):
            with pytest.raises(errors.NotInstalled, match="pip install twinkle-megatron"):
                names.resolve("model", spelling)
        assert names.resolve("model", "acme/megatron").__name__ == "FocalLoss"

    def test_no_hook_answers_them(self, site):
        hook = (
            "from twinkle_core import hookimpl\n"
            "@hookimpl\ndef twinkle_components(kind):\n    return {'megatron': int}\n"
            "@hookimpl\ndef twinkle_resolve(kind, name):\n    return str\n"
        )
        site.add("zeta", entry_points={"plugins": {"z": "zeta_takes"}}, modules={"zeta_takes.py": hook})
        names = site.registry()
        for spelling in ("megatron", "twinkle-megatron/megatron"):
            with pytest.raises(errors.NotInstalled):
                names.resolve("model", spelling)
        assert names.resolve("model", "zeta/megatron") is int
        assert names.resolve("model", "free") is str

    def test_they_are_registered_only_on_purpose(self, site):
        names = site.registry()
        with pytest.raises(errors.NameTaken, match="twinkle-megatron, installed or not"):
            names.register("model", "MegatronModel", int)
        names.register("model", "megatron", int, override=True)
        assert names.resolve("model", "megatron") is int

    def test_a_switched_off_owner_keeps_them(self, site, monkeypatch):
        focal(site, "acme-losses", "acme_losses", name="mse")
        focal(site, "twinkle-core", "own_losses", name="mse")
        monkeypatch.setenv("TWINKLE_DISABLE_PLUGINS", "twinkle-core")
        with pytest.raises(errors.Disabled, match="from twinkle-core"):
            site.registry().resolve("loss", "mse")
