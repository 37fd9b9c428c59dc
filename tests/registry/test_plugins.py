"""Hook modules: loaded and called in isolation."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
import threading

import pytest

from twinkle_core import hookimpl, hookspecs
from twinkle_core.errors import BadHook, HookFailed
from twinkle_core.registry import Registry

IMPORT = "from twinkle_core import hookimpl\n"


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.fixture
def warned(caplog):
    caplog.set_level(logging.WARNING, logger="twinkle")
    return lambda: warnings_of(caplog)


def hook_module(site, dist, source, module=None):
    module = module or dist.replace("-", "_") + "_hooks"
    site.add(dist, "0.3", entry_points={"plugins": {dist: module}}, modules={f"{module}.py": IMPORT + source})


def states(names):
    return {r.entry.dist: r.state for r in names.plugins().records()}


def test_hooks_get_any_subset_of_the_parameters(site):
    source = "seen = []\n@hookimpl\ndef twinkle_after_step(result):\n    seen.append(result)\n    return 'a'\n"
    hook_module(site, "alpha", source)
    hook_module(site, "beta", "@hookimpl\ndef twinkle_after_step(session, result):\n    return (session, result)\n")
    names = site.registry()
    answers = names.plugins().hooks().twinkle_after_step(session="s", result="r")
    assert sorted(answers, key=str) == [("s", "r"), "a"]
    assert states(names) == {"alpha": "loaded", "beta": "loaded"}


def test_one_broken_module_is_one_warning(site, warned):
    hook_module(site, "bad", "import no_such_lib\n")
    hook_module(site, "good", "@hookimpl\ndef twinkle_report_header():\n    return 'good'\n")
    names = site.registry()
    for _ in range(3):
        assert names.plugins().hooks().twinkle_report_header() == ["good"]
    assert warned() == [
        "plugin 'bad' from bad 0.3 could not be loaded: ModuleNotFoundError: No module named 'no_such_lib' "
        "(switch it off: TWINKLE_DISABLE_PLUGINS=bad)"
    ]
    assert states(names) == {"bad": "failed", "good": "loaded"}
    assert "no_such_lib" in next(r.why for r in names.plugins().records() if r.state == "failed")


def test_a_repaired_module_is_loaded_after_refresh(site, warned):
    hook_module(site, "bad", "raise RuntimeError('not yet')\n")
    names = site.registry()
    assert names.plugins().hooks().twinkle_report_header() == []
    site.write("bad_hooks.py", IMPORT + "@hookimpl\ndef twinkle_report_header():\n    return 'well'\n")
    assert names.plugins().hooks().twinkle_report_header() == []
    names.refresh()
    assert names.plugins().hooks().twinkle_report_header() == ["well"]
    assert states(names) == {"bad": "loaded"}
    assert len(warned()) == 1


def test_a_loaded_module_is_not_loaded_twice(site):
    hook_module(site, "good", "import builtins\n@hookimpl\ndef twinkle_report_header():\n    return 'good'\n")
    names = site.registry()
    for _ in range(2):
        assert names.plugins().hooks().twinkle_report_header() == ["good"]
        names.refresh()


def test_switched_off(site, monkeypatch):
    hook_module(site, "acme-hooks", "@hookimpl\ndef twinkle_report_header():\n    return 'here'\n")
    monkeypatch.setenv("TWINKLE_DISABLE_PLUGINS", "acme_hooks")
    names = site.registry()
    assert names.plugins().hooks().twinkle_report_header() == []
    assert states(names) == {"acme-hooks": "off"}


def test_an_allow_list_keeps_other_hook_modules_from_being_imported(site, monkeypatch):
    hook_module(site, "wanted", "@hookimpl\ndef twinkle_report_header():\n    return 'wanted'\n")
    hook_module(site, "other-hooks", "raise SystemError('imported')\n")
    monkeypatch.setenv("TWINKLE_PLUGINS", "wanted")
    monkeypatch.setenv("TWINKLE_STRICT_PLUGINS", "1")  # else a failing import would be only a warning
    names = site.registry()
    assert names.plugins().hooks().twinkle_report_header() == ["wanted"]
    assert states(names) == {"wanted": "loaded", "other-hooks": "off"}
    monkeypatch.setenv("TWINKLE_DISABLE_PLUGINS", "wanted")  # deny wins over allow
    assert states(again := site.registry()) == {} and again.plugins().hooks().twinkle_report_header() == []


def test_strict(site, monkeypatch):
    hook_module(site, "bad", "raise RuntimeError('no')\n")
    monkeypatch.setenv("TWINKLE_STRICT_PLUGINS", "1")
    names = site.registry()
    for _ in range(2):  # a failure is not taken for done
        with pytest.raises(HookFailed, match=r"plugin 'bad' from bad 0\.3 could not be loaded: RuntimeError: no"):
            names.plugins().hooks()


def test_a_hook_that_raises_is_one_warning_and_the_others_answer(site, warned, monkeypatch):
    hook_module(site, "bad", "@hookimpl\ndef twinkle_after_step(result):\n    raise ValueError('in step')\n")
    hook_module(site, "good", "@hookimpl\ndef twinkle_after_step(result):\n    return result\n")
    names = site.registry()
    for step in range(3):
        assert names.plugins().hooks().twinkle_after_step(session=None, result=step) in ([step],)
    assert warned() == [
        "plugin 'bad' from bad 0.3 failed in twinkle_after_step: ValueError: in step "
        "(switch it off: TWINKLE_DISABLE_PLUGINS=bad)"
    ]
    assert states(names)["bad"] == "failed"
    monkeypatch.setenv("TWINKLE_STRICT_PLUGINS", "1")
    with pytest.raises(HookFailed, match="in step"):
        names.plugins().hooks().twinkle_after_step(session=None, result=1)


@pytest.mark.parametrize("hook", hookspecs.NAMES)
def test_each_hook_keeps_failures_apart(hook, warned):
    """One listener fails before, and one after, one that answers."""
    plugins = Registry(path=()).plugins()

    def listener(function):
        return type("Listens", (), {hook: staticmethod(hookimpl(function))})

    def fails():
        raise ValueError("no")

    plugins.register(listener(fails), "last")
    plugins.register(listener(lambda: "well"), "good")
    plugins.register(listener(fails), "first")
    arguments = dict.fromkeys(inspect.signature(getattr(hookspecs, hook)).parameters)
    for _ in range(2):
        assert getattr(plugins.hooks(), hook)(**arguments) == ("well" if hook == "twinkle_resolve" else ["well"])
    asked = ["first"] if hook == "twinkle_resolve" else ["first", "last"]  # an answer ends the asking
    assert warned() == [f"listener '{name}' of this process failed in {hook}: ValueError: no" for name in asked]


def test_half_registered_names_are_gone(site, warned):
    source = (
        "from twinkle_core.registry import Registry\nimport half_target\n"
        "half_target.names.register('loss', 'half', int)\nhalf_target.names.register('loss', 'half', int)\n"
    )
    names = site.registry()
    hook_module(site, "half", source)
    site.write("half_target.py", "names = None\n")
    import half_target

    half_target.names = names
    names.register("loss", "kept", str)
    names.plugins().hooks()
    assert [e.name for e in names.entries("loss")] == ["kept"]
    assert "is taken by" in warned()[0]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("@hookimpl\ndef twinkle_aftr_step(result): ...\n", "there is no such hook. Did you mean 'twinkle_after_step'?"),
        (
            "@hookimpl\ndef twinkle_after_step(resalt): ...\n",
            "the hook has no parameter 'resalt'; it has session, result. Did you mean 'result'?",
        ),
        ("@hookimpl\ndef twinkle_shutdown(zzz): ...\n", "the hook has no parameter 'zzz'; it has none."),
        ("@hookimpl\nasync def twinkle_after_step(result): ...\n", "it is an async function"),
        ("@hookimpl\nasync def twinkle_after_step(result):\n    yield\n", "it is an async function"),
        ("@hookimpl\ndef twinkle_after_step(result):\n    yield\n", "it is a generator"),
        (
            "@hookimpl(wrapper=True)\ndef twinkle_after_step(result):\n    return (yield)\n",
            "wrappers of hooks are not supported",
        ),
    ],
    ids=["unknown hook", "unknown parameter", "no parameters", "async", "async generator", "generator", "wrapper"],
)
def test_a_module_with_a_wrong_hook_does_not_listen(site, warned, source, why):
    hook_module(site, "bad", source + "@hookimpl\ndef twinkle_report_header():\n    return 'half'\n")
    names = site.registry()
    assert names.plugins().hooks().twinkle_report_header() == []
    assert why in warned()[0]


def test_a_module_of_this_process():
    class Watch:
        def __init__(self):
            self.seen = []

        @hookimpl
        def twinkle_checkpoint_saved(self, path):
            self.seen.append(path)

        @hookimpl
        def twinkle_shutdown(self):
            self.seen.append("end")

    watch, plugins = Watch(), Registry(path=()).plugins()
    plugins.register(watch, "watch")
    plugins.hooks().twinkle_checkpoint_saved(path="a", session=None)
    with pytest.raises(BadHook, match="another listener of this process has that name"):
        plugins.register(Watch(), "watch")
    assert plugins.components("loss") == []
    plugins.hooks().twinkle_checkpoint_saved(path="b", session=None)
    for _ in range(2):
        plugins.unregister("watch")
    plugins.hooks().twinkle_checkpoint_saved(path="c", session=None)
    assert watch.seen == ["a", "b", "end"]


class Told:
    """Notes what it hears."""

    def __init__(self, fails=False):
        self.heard, self.fails = [], fails

    @hookimpl
    def twinkle_checkpoint_saved(self, path):
        self.heard.append(path)

    @hookimpl
    def twinkle_components(self, kind):
        return {"given": int}

    @hookimpl
    def twinkle_shutdown(self):
        self.heard.append("end")
        if self.fails:
            raise OSError("disk full")


def test_listening_inside_a_block(warned):
    plugins = Registry(path=()).plugins()
    one, two, outer = Told(), Told(fails=True), Told()
    plugins.register(outer, "Told")
    with pytest.raises(ZeroDivisionError), plugins.listening(one, two):
        plugins.hooks().twinkle_checkpoint_saved(path="a", session=None)
        raise ZeroDivisionError
    plugins.hooks().twinkle_checkpoint_saved(path="b", session=None)
    assert (one.heard, two.heard, outer.heard) == (["a", "end"], ["a", "end"], ["a", "b"])
    assert warned() == ["listener 'Told 3' of this process failed in twinkle_shutdown: OSError: disk full"]
    assert plugins.records() == []  # of those that left
    for _ in range(2):  # who fails in another block is told of again
        with plugins.listening(two):
            pass
    assert len(warned()) == 3
    assert len(plugins.components("loss")) == 1


def test_who_is_refused_keeps_the_others_from_listening():
    class Dumb: ...

    one, plugins = Told(), Registry(path=()).plugins()
    with pytest.raises(BadHook, match=r"no function of .*Dumb.* is marked with @hookimpl"), plugins.listening(one, Dumb()):
        raise AssertionError("unreachable")
    assert one.heard == ["end"] and plugins.hooks().twinkle_checkpoint_saved(path="a", session=None) == []
    assert one.heard == ["end"]


def test_a_class_and_an_object_that_listens_already_are_refused():
    one, plugins = Told(), Registry(path=()).plugins()
    with (
        pytest.raises(BadHook, match=r"Told is a class; give an object of it: Told\(\.\.\.\)"),
        plugins.listening(Told),
    ):
        raise AssertionError("unreachable")
    with pytest.raises(BadHook, match="listens already, as 'Told'"), plugins.listening(one, one):
        raise AssertionError("unreachable")
    assert one.heard == ["end"]
    plugins.register(one, "mine")
    with pytest.raises(BadHook, match="listens already, as 'mine'"):
        plugins.register(one, "again")
    plugins.unregister("mine")
    with plugins.listening(one):  # and is free again
        plugins.hooks().twinkle_checkpoint_saved(path="a", session=None)
    assert one.heard == ["end", "end", "a", "end"]


def test_a_strict_failure_at_the_end_of_a_block_leaves_nobody_listening(monkeypatch):
    monkeypatch.setenv("TWINKLE_STRICT_PLUGINS", "1")
    plugins, bad, good = Registry(path=()).plugins(), Told(fails=True), Told()
    with pytest.raises(HookFailed, match="disk full"), plugins.listening(good, bad):
        pass
    plugins.hooks().twinkle_checkpoint_saved(path="a", session=None)
    assert good.heard == bad.heard == ["end"]


def test_a_refused_object_leaves_nothing_behind():
    class Wrong:
        @hookimpl
        def twinkle_shutdown(self, no_such): ...

    plugins = Registry(path=()).plugins()
    for _ in range(2):  # the name is free again
        with pytest.raises(BadHook):
            plugins.register(Wrong(), "wrong")
    assert plugins.hooks().twinkle_shutdown() == []


def test_a_hook_module_may_ask_for_names_while_it_loads(site):
    source = (
        "from twinkle_core.registry import Registry\nimport sys\n"
        f"found = Registry(path=[{str(site.folder)!r}]).entries('loss')\n"
        "@hookimpl\ndef twinkle_report_header():\n    return str(len(found))\n"
    )
    hook_module(site, "asks", source)
    site.add("acme", entry_points={"losses": {"a": "acme:A"}})
    assert site.registry().plugins().hooks().twinkle_report_header() == ["1"]


def test_nobody_listening_costs_next_to_nothing():
    import timeit

    plugins = Registry(path=()).plugins()
    plugins.hooks()
    best = (
        min(timeit.repeat(lambda: plugins.hooks().twinkle_after_step(session=None, result=None), number=1000, repeat=5)) / 1000
    )
    assert best < 50e-6  # about 2 µs where nothing else runs


def test_every_hook_of_the_specification_is_documented():
    assert len(hookspecs.NAMES) == 12
    assert all(getattr(hookspecs, name).__doc__ for name in hookspecs.NAMES)


def test_a_module_that_two_entries_name_hears_each_hook_once(site):
    source = IMPORT + "calls = []\n@hookimpl\ndef twinkle_shutdown():\n    calls.append(1)\n"
    site.add("one", entry_points={"plugins": {"a": "shared_hooks", "b": "shared_hooks"}}, modules={"shared_hooks.py": source})
    site.add("two", entry_points={"plugins": {"c": "shared_hooks"}})
    names = site.registry()
    for count in (1, 2):
        names.plugins().hooks().twinkle_shutdown()
        names.refresh()
        import shared_hooks

        assert len(shared_hooks.calls) == count
    assert states(names) == {"one": "loaded", "two": "loaded"}


def test_listeners_are_told_of_the_end_of_the_process(tmp_path):
    program = """
from types import SimpleNamespace
from twinkle_core import hookimpl, registry
@hookimpl
def twinkle_shutdown():
    print("told")
registry.process().plugins().register(SimpleNamespace(twinkle_shutdown=twinkle_shutdown), "mine")
print("end")
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.stdout.split() == ["end", "told"], run.stderr


def test_a_second_thread_waits_for_the_modules_that_the_first_one_loads(site):
    source = "import time; time.sleep(0.3)\n@hookimpl\ndef twinkle_components(kind):\n    return {'late': int}\n"
    hook_module(site, "slow", source)
    names, found = site.registry(), []
    names.index()
    threads = [threading.Thread(target=lambda: found.append(names.resolve("loss", "late"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [int] * 3


def test_what_another_thread_registers_survives_a_failing_hook():
    names = Registry(path=())

    def other():
        names.register("loss", "theirs", str)

    class Fails:
        @hookimpl
        def twinkle_report_header(self):
            names.register("loss", "mine", int)
            names.register("loss", "before", int, override=True)
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            raise ValueError("no")

    names.register("loss", "before", float)
    names.plugins().register(Fails(), "fails")
    assert names.plugins().hooks().twinkle_report_header() == []
    assert {e.name: e.obj for e in names.entries("loss")} == {"before": float, "theirs": str}


def test_an_exception_beside_exception_is_a_failure_like_others(site, warned):
    hook_module(site, "panics", "class Panic(BaseException): pass\nraise Panic('from Rust')\n")
    hook_module(site, "good", "@hookimpl\ndef twinkle_report_header():\n    return 'good'\n")
    names = site.registry()
    assert names.plugins().hooks().twinkle_report_header() == ["good"]
    assert "Panic: from Rust" in warned()[0]


def test_ctrl_c_in_a_hook_module_passes_through(site):
    hook_module(site, "slow", "raise KeyboardInterrupt\n")
    names = site.registry()
    for _ in range(2):  # it is not taken for loaded
        with pytest.raises(KeyboardInterrupt):
            names.plugins().hooks()
