"""Faults of plugin systems elsewhere."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
import textwrap
import time

import pytest

from twinkle_core.errors import Ambiguous, Broken, HookFailed, UnknownName
from twinkle_core.registry import Registry

HALF = """
from twinkle_core import hookimpl
import host_of_names
host_of_names.names.register("loss", "first_half", int)
raise RuntimeError("second half")
"""


def test_B49_one_broken_plugin_does_not_take_the_host_down(site, caplog, monkeypatch):
    """A broken component and a hook module that fails half-way leave the good plugin working, and a repair is seen."""
    caplog.set_level(logging.WARNING, logger="twinkle")
    site.add(
        "good", entry_points={"losses": {"good": "good_plugin:GoodLoss"}}, modules={"good_plugin.py": "class GoodLoss: pass"}
    )
    site.add("bad", "0.3", entry_points={"losses": {"bad": "bad_plugin:BadLoss"}},
             modules={"bad_plugin.py": "raise ImportError('libfoo missing')"})  # fmt: skip
    site.add("half", "2.0", entry_points={"plugins": {"half": "half_plugin"}},
             modules={"half_plugin.py": HALF, "host_of_names.py": "names = None"})  # fmt: skip
    import host_of_names

    names = host_of_names.names = site.registry()
    assert names.resolve("loss", "good").__name__ == "GoodLoss"
    with pytest.raises(Broken, match=r"loss 'bad' from bad 0\.3 .*\n    ImportError: libfoo missing"):
        names.resolve("loss", "bad")
    assert names.resolve("loss", "GoodLoss").__name__ == "GoodLoss"

    names.plugins().hooks().twinkle_shutdown()
    (warning,) = [r.getMessage() for r in caplog.records]
    assert all(part in warning for part in ("'half'", "half 2.0", "RuntimeError: second half"))
    with pytest.raises(UnknownName):
        names.resolve("loss", "first_half")

    site.write("bad_plugin.py", "class BadLoss: pass")
    assert names.resolve("loss", "bad").__name__ == "BadLoss"

    monkeypatch.setenv("TWINKLE_STRICT_PLUGINS", "1")
    names.refresh()
    with pytest.raises(HookFailed, match="second half"):
        names.plugins().hooks()


def test_B51_the_same_distribution_twice_counts_once(site, another_site):
    """dist-info here and egg-info there: one entry, one call, in both orders."""
    counted = "from twinkle_core import hookimpl\ncalls = []\n@hookimpl\ndef twinkle_shutdown():\n    calls.append(1)\n"
    points = {"plugins": {"acme": "acme_counted"}, "losses": {"mine": "acme_counted:MyLoss"}}
    site.add("acme", "1.0", entry_points=points, modules={"acme_counted.py": counted + "class MyLoss: pass\n"})
    another_site.add("Acme", "1.0", entry_points=points, egg=True)
    import acme_counted

    for count, folders in enumerate(itertools.permutations([site, another_site]), start=1):
        names = Registry(path=[str(s.folder) for s in folders])
        names.plugins().hooks().twinkle_shutdown()
        assert len(acme_counted.calls) == count
        assert len(names.entries("loss")) == 1
        assert names.resolve("loss", "MyLoss") is acme_counted.MyLoss


def test_B51_two_providers_of_one_name_do_not_depend_on_the_path(site, another_site):
    """The same error in both orders, that names both; other names and full paths work."""
    for where, dist in ((site, "acme"), (another_site, "beta")):
        points = {"losses": {"my": f"{dist}_two:MyLoss", dist: f"{dist}_two:Own"}}
        where.add(dist, entry_points=points, modules={f"{dist}_two.py": f"class MyLoss: who = '{dist}'\nclass Own: pass\n"})
    texts = set()
    for folders in itertools.permutations([site, another_site]):
        names = Registry(path=[str(s.folder) for s in folders])
        with pytest.raises(Ambiguous) as caught:
            names.resolve("loss", "MyLoss")
        texts.add(str(caught.value))
        assert names.resolve("loss", "acme").__module__ == "acme_two"
        for dist in ("acme", "beta"):
            assert names.resolve("loss", f"{dist}/MyLoss").who == names.resolve("loss", f"{dist}_two:MyLoss").who == dist
    (text,) = texts
    assert "acme/my" in text and "beta/my" in text


LIGHT = """
import sys, time
for name in ("transformers", "accelerate", "peft", "ray", "megatron", "vllm", "datasets", "torch"):
    sys.modules[name] = None
sys.path.insert(0, {site!r})
import twinkle, twinkle_core
from twinkle_core.known import KNOWN
KNOWN["model", "later"] = ("LaterModel", "twinkle-multilora", "99.0")
from twinkle_core import registry
from twinkle_core.cli.main import main
assert main(["plugins"]) == 0
assert main([]) == 0
assert registry.find("model", "demo").dist == "demo-engine"
assert "demo_engine" not in sys.modules and "twinkle_transformers" not in sys.modules
try:
    from twinkle.model import DemoModel
except ImportError as error:
    print("SHOWN", error)
try:
    from twinkle.model import LaterModel
except ImportError as error:
    print("SHOWN", error)
"""


def test_B53_importing_the_core_needs_no_heavy_package(site):
    """Import, listing and help work where every heavy library is absent; asking for a backend then says what to install."""
    site.add(
        "demo-engine",
        "0.1",
        entry_points={"models": {"demo": "demo_engine:DemoModel"}},
        modules={"demo_engine.py": "from transformers import AutoModel\nclass DemoModel: pass"},
        requires=["transformers>=4.57"],
    )
    began = time.monotonic()
    code = textwrap.dedent(LIGHT).format(site=str(site.folder))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 3
    assert (
        f"SHOWN model 'demo' from demo-engine 0.1 needs 'transformers', which is not installed in {sys.prefix}" in done.stdout
    )
    assert "    pip install transformers\n" in done.stdout
    assert "    pip install -U twinkle-multilora\n" in done.stdout
