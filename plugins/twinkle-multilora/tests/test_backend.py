"""Without the backend, a model that needs it says what to install; nothing else of the distribution does."""

from __future__ import annotations

import subprocess
import sys

import pytest

from twinkle_core import registry
from twinkle_core.errors import NeedsLibrary
from twinkle_multilora.backend import needed

WITHOUT = """
import sys
from importlib import import_module

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name in ("twinkle_transformers", "twinkle_megatron"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
for name in ("pool", "options", "layers", "manager", "backend", "many"):
    import_module(f"twinkle_multilora.{name}")
from twinkle_core import registry
from twinkle_core.errors import NeedsLibrary

for name, module in (("multi_lora_transformers", "model"), ("multi_lora_megatron", "megatron")):
  for ask in (registry.resolve, lambda kind, name: import_module(f"twinkle_multilora.{module}")):
    try:
        ask("model", name)
    except NeedsLibrary as error:
        print(str(error).replace(sys.prefix, "PREFIX"))
"""


def test_what_to_install_is_told():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    texts = [
        f"{what} needs 'twinkle_{backend}', which is not installed in PREFIX\n    pip install 'twinkle-multilora[{backend}]'\n"
        for what, backend in (("SlotAdapters", "transformers"), ("MultiLoraMegatronModel", "megatron"))
    ]
    assert done.stdout == 2 * texts[0] + 2 * texts[1]


def test_a_backend_that_is_broken_is_not_missing(monkeypatch, tmp_path):
    (tmp_path / "half_a_backend.py").write_text("import does_not_exist_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="does_not_exist_at_all") as caught:
        needed("half_a_backend", "half", "this")
    assert not isinstance(caught.value, NeedsLibrary)


def test_it_is_found_by_its_names():
    from twinkle.model import MultiLoraTransformersModel

    for name in ("multi_lora_transformers", "MultiLoraTransformersModel", "multilora-transformers"):
        assert registry.resolve("model", name) is MultiLoraTransformersModel
