"""Who may import whom."""

from __future__ import annotations

import subprocess
import sys

from twinkle_core.cli.main import COMMANDS

#: third parties that a layer may import when it is imported itself, besides those of the layers below
THIRD_PARTY = {
    0: {"pluggy", "importlib_metadata"},
    1: {"pydantic", "pydantic_core", "yaml"},
    2: {"torch", "safetensors", "tqdm"},
}
LAYER_1 = {"config", "data", "templates"}
LAYER_2 = {"train", "ops", "losses", "metrics", "processors", "patches", "testing"}
#: modules in another layer than their package
APART = dict.fromkeys((f"twinkle_core.testing.{name}" for name in ("distributions", "declared", "has_pytest")), 0)
#: what only the compliance suites import: they are asked for by who has pytest
SUITES_MAY = {"pytest"}
SUITES = ("twinkle_core.testing.suites.", "twinkle_core.cli.check_worker")


def layer(module: str) -> int:
    if module in APART:
        return APART[module]
    room = module.split(".")[1] if "." in module else ""
    return 2 if room in LAYER_2 else 1 if room in LAYER_1 else 0


def layers_of_the_command_line(sources, imports_of):
    """module -> layer: 0 for what every call loads, 1 for what a command's own help needs, 2 for what comes with its work."""
    modules = {s.module: s for s in sources if s.module.startswith("twinkle_core.cli.")}
    layers = dict.fromkeys(modules, 2)
    starts = {1: [f"twinkle_core.cli.{command}" for command in COMMANDS], 0: ["twinkle_core.cli.main"]}
    for number, ahead in starts.items():
        while ahead:
            module = ahead.pop()
            if layers.get(module, number) > number:
                layers[module] = number
                ahead += [core_module(name, set(modules)) for name in imports_of(modules[module], everywhere=False)]
    return layers


def core_module(name: str, modules: set[str]) -> str:
    """The module that an imported name lives in: ``twinkle_core.errors.Broken`` -> ``twinkle_core.errors``."""
    while name not in modules and "." in name:
        name = name.rpartition(".")[0]
    return name


def test_imports_go_only_downward(sources, imports_of):
    modules = {s.module for s in sources}
    command_line = layers_of_the_command_line(sources, imports_of)
    wrong = []
    for source in sources:
        if not source.module.startswith("twinkle_core"):
            continue
        mine = command_line.get(source.module, layer(source.module))
        allowed = set().union(*(THIRD_PARTY[n] for n in range(mine + 1)))
        allowed |= SUITES_MAY if source.module.startswith(SUITES) else set()
        for name in imports_of(source, everywhere=False):
            top = name.partition(".")[0]
            if top == "twinkle_core":
                theirs = core_module(name, modules)
                other = command_line.get(theirs, layer(theirs))
                if other > mine:
                    wrong.append(f"{source.path} (L{mine}) imports {theirs} (L{other})")
            elif top not in sys.stdlib_module_names and top not in allowed:
                wrong.append(f"{source.path} (L{mine}) imports {top} at module level")
    assert not wrong, "\n".join(wrong)


def test_core_imports_no_plugin_and_not_the_facade(sources, imports_of):
    """Not even inside functions. The command line is what users run, so it may use the facade as they do, in functions."""
    own = {"twinkle_core"}
    wrong = []
    for source in sources:
        if source.module.partition(".")[0] != "twinkle_core":
            continue
        for name in imports_of(source, everywhere=True):
            top = name.partition(".")[0]
            facade = top == "twinkle" and source.module.startswith("twinkle_core.cli.")
            if top.startswith("twinkle") and top not in own and not facade:
                wrong.append(f"{source.path} imports {top}")
    assert not wrong, "\n".join(wrong)


def test_plugins_do_not_import_one_another(sources, imports_of):
    packages = {s.module.partition(".")[0] for s in sources if s.path.startswith("plugins/")}
    wrong = []
    for source in sources:
        mine = source.module.partition(".")[0]
        if mine not in packages:
            continue
        # its models are subclasses of the backends', which it imports when one is asked for
        everywhere = mine != "twinkle_multilora"
        others = {name.partition(".")[0] for name in imports_of(source, everywhere=everywhere)} & packages - {mine}
        wrong += [f"{source.path} imports {other}" for other in sorted(others)]
    assert not wrong, "\n".join(wrong)


def test_contrib_stands_on_core_alone(contrib, imports_of):
    wrong = []
    for source in contrib:
        own = {"twinkle_core", source.module.partition(".")[0]}
        for name in imports_of(source, everywhere=True):
            if name.startswith("twinkle") and name.partition(".")[0] not in own:
                wrong.append(f"{source.path} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_nothing_needs_contrib(sources, tests, contrib, imports_of):
    """It may be removed: neither the product nor its tests import from it."""
    packages = {s.module.partition(".")[0] for s in contrib}
    wrong = []
    for source in [*sources, *tests]:
        names = {name.partition(".")[0] for name in imports_of(source, everywhere=True)}
        wrong += [f"{source.path} imports {name}" for name in sorted(names & packages)]
    assert not wrong, "\n".join(wrong)


def test_the_facade_holds_nothing_itself(sources, imports_of):
    for source in sources:
        if source.module.partition(".")[0] == "twinkle" and source.module != "twinkle.__main__":
            assert imports_of(source, everywhere=True) == ["twinkle_core.lazy.attach"], source.path


BUDGET = """
import sys
before = set(sys.modules)
import twinkle
new = sorted(set(sys.modules) - before)
foreign = [m for m in new if m.partition(".")[0] not in sys.stdlib_module_names and not m.startswith("twinkle")]
print(len(new), *foreign)
"""


def test_importing_twinkle_is_light():
    """Fewer than 30 modules beyond the interpreter's, none of a third party."""
    # -S: what site-packages' .pth files import is not twinkle's; the path is handed over instead
    code = f"import sys; sys.path[:] = {sys.path!r}\n{BUDGET}"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    count, *foreign = done.stdout.split()
    assert int(count) < 30
    assert foreign == []
