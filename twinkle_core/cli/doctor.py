"""``twinkle doctor``: this machine, its libraries, the settings and the plugins' faults (L0)."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twinkle_core import hardware, plugins, registry, settings
from twinkle_core.cli.plugins import BROKEN, LACKS, rows, set_aside
from twinkle_core.cli.tables import pairs
from twinkle_core.index import HOOK_MODULES, distribution
from twinkle_core.isolation import attempt
from twinkle_core.names import PLURAL
from twinkle_core.version import __version__

LIBRARIES = (
    "torch", "transformers", "peft", "accelerate", "datasets", "modelscope", "huggingface-hub", "safetensors", "pydantic",
    "pluggy", "numpy",
)  # fmt: skip
GIB = 2**30
_TEXT = (
    "Report this machine, the versions of the libraries that matter, the settings, the room for downloads, and what is broken "
    "among the installed plugins (tried in a child process) and the settings. The exit status is 1 where anything is. What "
    "lacks only an extra of its distribution is not broken; it is named, with what to install."
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("doctor", help="this machine, its libraries and settings", description=_TEXT)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report. Returns 1 when an installed plugin is broken, or a setting has a value that can't be."""
    broken, lacking = plugin_faults()
    faults = [*settings.faults(), *registry.index().unknown(), *broken]
    sections = {
        "twinkle": [("version", __version__), ("plugins", ", ".join(_providers()) or "none")],
        "system": system(),
        "libraries": libraries(),
        "device": device(),
        "settings": [(s.variable, f"{value or '(empty)'}   {s.meaning}") for s, value in settings.shown()],
        "space": space(settings.cache_dir()),
        **({"extras": [("", why) for why in lacking]} if lacking else {}),
        "faults": [("", fault) for fault in faults] or [("", "none")],
    }
    for title, facts in sections.items():
        _print(title, facts)
    sys.stdout.flush()  # a hook that ends the process takes nothing of this with it
    header = [line for answer in plugins.hooks().twinkle_report_header() for line in _lines(answer)]
    if header:
        _print("from plugins", [("", line) for line in header])
    return int(bool(faults))


def _print(title: str, facts: Sequence[tuple[str, str]]) -> None:
    print(f"{title}\n{pairs(facts)}\n")


def system() -> list[tuple[str, str]]:
    """Python and the machine."""
    return [
        ("python", f"{platform.python_version()} in {sys.prefix}"),
        ("platform", platform.platform()),
        ("processor", f"{os.cpu_count()} cores"),
    ]


def libraries() -> list[tuple[str, str]]:
    """Versions, from metadata."""
    found = ((name, distribution(name)) for name in LIBRARIES)
    return [(name, str(dist.version) if dist is not None else "not installed") for name, dist in found]


def device() -> list[tuple[str, str]]:
    """What torch sees. Imports torch."""
    got = attempt(_torch)
    if got.value is None:
        return [("torch", f"can't be imported: {got.why}")]
    torch = got.value
    facts = [("cpu", f"{torch.get_num_threads()} threads, bf16 {_in_hardware(hardware.cpu_has_bf16())}"), *_matmuls(torch)]
    if not torch.cuda.is_available():
        return [*facts, ("cuda", "not available")]
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        memory = f"{properties.total_memory / GIB:.0f} GiB"
        facts.append((f"cuda:{number}", f"{properties.name}, {memory}, CUDA {torch.version.cuda}"))
    return [*facts, ("cuda", f"bf16 {_in_hardware(torch.cuda.is_bf16_supported(including_emulation=False))}")]


def _matmuls(torch: Any) -> list[tuple[str, str]]:
    """What computes them, and whether tenants can share one: tried with the shape of a small model's layer."""
    from twinkle_core.ops.matmul import kernel
    from twinkle_core.ops.row_invariance import rows_invariant

    by = ("matmuls", f"of adapters' base layers and output layers in float32: by {kernel()}")
    kinds = [torch.float32, torch.bfloat16]
    free = [str(k).removeprefix("torch.") for k in kinds if rows_invariant(1536, 576, k, "cpu", (16, 23, 64, 200, 512))]
    if len(free) == len(kinds):
        return [by, ("rows", "of a matmul do not depend on their company: tenants share passes on the fast path")]
    where = f" (but in {free[0]})" if free else ""
    return [by, ("rows", f"of a matmul depend on their company{where}: tenants share passes with one matmul each")]


def _in_hardware(yes: bool) -> str:
    return "in hardware" if yes else "emulated"


def _torch() -> Any:
    import torch

    return torch


def space(folder: Path) -> list[tuple[str, str]]:
    """Room for downloads."""
    there = next(p for p in (folder, *folder.parents) if p.exists())
    usage = shutil.disk_usage(there)
    return [("cache", str(folder)), ("free", f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB")]


def plugin_faults() -> tuple[list[str], list[str]]:
    """Damaged metadata, and third parties' components and hook modules that do not load (tried in a child process); apart from
    these, those that lack only an extra."""
    index = registry.index()
    others = [e for kind in PLURAL for e in index.of(kind) if e.dist != "twinkle-core"]
    found = rows([*others, *index.of(HOOK_MODULES)], load=True)
    set_aside(found)  # their hooks are called next
    broken, lacking = ([row.why for row in found if row.state == state] for state in (BROKEN, LACKS))
    return [*index.faults, *broken], lacking


def _providers() -> list[str]:
    return sorted({f"{e.dist} {e.version}" for e in registry.index().entries})


def _lines(answer: Any) -> list[str]:
    """A text, or several; what else a plugin answers is shown as it prints itself."""
    many = answer if isinstance(answer, list | tuple) else [answer]
    return [attempt(lambda line=line: str(line)).value or "" for line in many]  # type: ignore[misc]
