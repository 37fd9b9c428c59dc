"""Megatron-Core on a machine without CUDA: what it asks of a GPU is answered by the CPU. Nothing of Megatron is edited on disk.

Megatron names its accelerator in four ways, and each has one answer here:

1. ``device="cuda"``, ``.cuda()``, ``.to("cuda")``: a TorchFunctionMode says CPU instead.
2. ``torch.cuda.current_device()``, streams, random states: replacements on ``torch.cuda``.
3. ``x.type() == "torch.cuda.FloatTensor"``: the mode answers as CUDA would.
4. Transformer Engine and CUDA-only helpers: ``transformer_engine.py`` and ``megatron.py`` beside this file.

1 to 3 hold inside of ``active()`` alone: other code of the process sees torch as it is. 4 is put into ``sys.modules`` once,
before Megatron is imported. Where CUDA is there, all of it is inert.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch.overrides import TorchFunctionMode

from twinkle_core import settings
from twinkle_core.errors import LoadedTooEarly, NeedsLibrary
from twinkle_core.log import get_logger

CPU = torch.device("cpu")
#: what mcore-bridge imports, which may not be there where it was installed without what it declares
UNDECLARED = {"datasets": "datasets", "PIL": "pillow", "modelscope": "modelscope"}
F = TypeVar("F", bound=Callable[..., Any])


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


class CudaToCpu(TorchFunctionMode):
    """Every torch call that names a CUDA device gets the CPU instead."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(args[0]).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.record_stream:
            return None
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": CPU}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


class Stream:
    """Stands for a CUDA stream or event: work on a CPU is in order already."""

    stream_id = device_index = cuda_stream = 0
    device = CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Whatever a stream is made of."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def record_event(self, event: Any = None) -> Any:
        return event or Stream()

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to wait for."""

    wait = synchronize = wait_stream = wait_event = record

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


def _replacements() -> dict[str, Any]:
    """What ``torch.cuda`` has inside of ``active()``."""
    seed: Any = torch.default_generator.manual_seed
    given = {
        "current_device": lambda: CPU,
        "set_device": _nothing,
        "device_count": lambda: 1,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "ipc_collect": _nothing,
        "current_stream": lambda *a, **k: Stream(),
        "default_stream": lambda *a, **k: Stream(),
        "stream": lambda s=None: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed": seed,
        "manual_seed_all": seed,
        "memory_allocated": _zero,
        "max_memory_allocated": _zero,
        "memory_reserved": _zero,
        "max_memory_reserved": _zero,
        "reset_peak_memory_stats": _nothing,
    }
    # each a function of its own: dynamo keeps a table of torch's functions, and takes one under two names for a fault
    return {**{name: _own(function) for name, function in given.items()}, "Stream": Stream, "Event": Stream}


def _own(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs)


class Runtime:
    """Whether this process computes on the CPU, and how deep it is inside of ``active()``."""

    def __init__(self) -> None:
        self.installed: bool | None = None  # None: not asked yet; False: inert, CUDA is there
        self.depth = 0
        self.has_te = False  # whether the real Transformer Engine is installed

    def install(self) -> None:
        """Before Megatron's first import. A second call does nothing.

        Raises:
            NeedsLibrary: Megatron-Core, mcore-bridge, what that imports, or (on CUDA) Transformer Engine. LoadedTooEarly.
        """
        if self.installed is not None:
            return
        on_cpu = settings.megatron_cpu() or not torch.cuda.is_available()
        self.has_te = _is_there("transformer_engine.pytorch")  # asked before anything stands in for it
        needed = {"megatron.core": "twinkle-megatron[mcore]", "mcore_bridge": "twinkle-megatron[mcore]", **UNDECLARED}
        needed |= {} if on_cpu else {"transformer_engine.pytorch": "transformer-engine[pytorch]"}
        for library, requirement in needed.items():
            if not _is_there(library):
                raise NeedsLibrary("MegatronModel", library, requirement, sys.prefix)
        if on_cpu:
            if "megatron.core" in sys.modules:
                raise LoadedTooEarly("megatron.core", "twinkle_megatron's stand-ins for CUDA")
            self._install()
        self.installed = on_cpu

    def _install(self) -> None:
        from twinkle_megatron.cpu import transformer_engine, triton

        settings.one_device_connection()
        transformer_engine.install()
        self.installed = True
        with self.active(), triton.named(), warnings.catch_warnings(), _quiet():
            warnings.simplefilter("ignore")  # of libraries that are not for CPUs
            from twinkle_megatron.cpu import megatron, recurrent

            megatron.mend()
            importlib.import_module("mcore_bridge.model")
            recurrent.mend()
        get_logger("megatron").info("no CUDA in use: Megatron-Core runs on the CPU over gloo (slow; for tests and learning)")

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, Megatron may be called; without CUDA, CUDA is the CPU. Nests; on leaving the outermost, all is as it was."""
        if self.depth:
            yield
            return
        self.depth += 1
        try:
            with _rope_as_found(), _without_cuda() if self.installed else contextlib.nullcontext():
                yield
        finally:
            self.depth -= 1


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Inside, what libraries say below an error is not shown: what they could not patch is not there."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(disabled)


@contextlib.contextmanager
def _rope_as_found() -> Iterator[None]:
    """mcore-bridge replaces functions of transformers', with which newer models can't be made any more."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    found = dict(ROPE_INIT_FUNCTIONS)
    try:
        yield
    finally:
        ROPE_INIT_FUNCTIONS.clear()
        ROPE_INIT_FUNCTIONS.update(found)


@contextlib.contextmanager
def _without_cuda() -> Iterator[None]:
    import torch._dynamo

    cuda: Any = torch.cuda
    given = _replacements()
    found = {name: getattr(cuda, name) for name in given}
    states = (cuda.random.get_rng_state, cuda.random.set_rng_state, cuda.nvtx.range_push, cuda.nvtx.range_pop)
    compiled = torch._dynamo.config.disable
    try:
        vars(cuda).update(given)
        cuda.random.get_rng_state, cuda.random.set_rng_state = given["get_rng_state"], given["set_rng_state"]
        cuda.nvtx.range_push = cuda.nvtx.range_pop = _nothing
        torch._dynamo.config.disable = True  # there may be no compiler, and small kernels gain nothing here
        with CudaToCpu():
            yield
    finally:
        vars(cuda).update(found)
        cuda.random.get_rng_state, cuda.random.set_rng_state, cuda.nvtx.range_push, cuda.nvtx.range_pop = states
        torch._dynamo.config.disable = compiled


def _is_there(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except (ModuleNotFoundError, RuntimeError):  # not even its parent; or that is the bare meta package, which raises
        return False


#: of this process: Megatron's own state is of the process too
RUNTIME = Runtime()


def computes(method: F) -> F:
    """For a method that calls Megatron: it runs inside of ``active()``."""

    @functools.wraps(method)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with RUNTIME.active():
            return method(*args, **kwargs)

    return cast(F, inside)
