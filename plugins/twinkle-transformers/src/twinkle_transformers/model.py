"""TransformersModel: all verbs of twinkle over a transformers model (full-parameter, or adapters of peft's)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from twinkle_core import arguments
from twinkle_core.contracts.adapters import BASE
from twinkle_core.errors import UnknownOption
from twinkle_core.log import get_logger
from twinkle_core.names import closest
from twinkle_core.runtime.dispatch import remote_class
from twinkle_core.train.verbs import SessionModel
from twinkle_transformers import fsdp, load, tensor
from twinkle_transformers.adapters import PeftAdapters
from twinkle_transformers.engine import TransformersEngine
from twinkle_transformers.layout import Layout, lay_over
from twinkle_transformers.parallel import Meeting, check_ddp_config, mesh_of
from twinkle_transformers.patches.fast_lora import FastLora
from twinkle_transformers.precision import Mixed, Precision
from twinkle_transformers.store import ModelStore

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from twinkle_core.contracts.patch import Patch
    from twinkle_core.mesh import DeviceMesh

STRATEGIES = ("accelerate", "native_fsdp")
#: torch's 2**16 is meant for means; losses here are sums, and a usual micro-batch has some 2**10 tokens
FP16_INIT_SCALE = 2.0**6


@remote_class(execute="all")
class TransformersModel(SessionModel):
    """A transformers model with the state of its training.

    Without adapters the whole model is trained; after ``add_adapter_to_model`` an adapter is. Several models may live in one
    process and differ in everything.

    Args:
        model_cls: a class, or the name of one in transformers (``'AutoModelForCausalLM'``, ``'LlamaForCausalLM'``).
        model_id: ``ms://org/name``, ``hf://org/name`` or a local folder (also a checkpoint that ``save`` wrote); a ``.gguf``
            file is read too. None: random weights from ``config``.
        config: a PretrainedConfig to use in place of the folder's.
        device_mesh: how processes share the work; None: that of ``initialize(global_device_mesh=...)``, else data ranks. Its
            ``device_type`` says where the model lives; without one, this process's accelerator, else the CPU.
        mixed_precision: ``bf16``, ``fp16`` (with a gradient scaler by itself), ``no`` (fp32), ``fp8``. Trained weights,
            gradients and optimizer state are fp32 in all of them; what an adapter leaves frozen is held in the compute type
            from the first forward on.
        strategy: ``accelerate`` or ``native_fsdp``: how the model is wrapped in several processes; without effect in one.
        ddp_config, fsdp_config, memory_efficient_init: as ``strategy``.
        grad_scaler_config: arguments of ``torch.amp.GradScaler`` under ``fp16``; ``init_scale`` is 64 if it isn't said.
        gradient_checkpointing: True trades time for memory; None and False leave it off.
        on_nonfinite: what NaN or infinite gradients do: ``raise``, or ``skip`` the update. The fp16 scaler always skips.
        fast: compute plain LoRA layers leaner than peft does, equal to rounding (the patch ``fast_lora``); False leaves peft's
            own code at work.
        remote_group: where the model lives under a remote runtime; without effect in local mode.
        kwargs: for ``from_pretrained`` or ``from_config``, and single values of the config. ``trust_remote_code`` is off by
            default.

    Raises:
        NoModel, UnknownModelClass, UnknownOption, WrongArgument, WrongType, HoldsAdapter, ManyProcesses, Fp8Unavailable,
        ModelNotLoaded, and what ``hub.resolve`` raises.
    """

    adapters: ModelStore
    engine: TransformersEngine
    engine_cls: ClassVar[type[TransformersEngine]] = TransformersEngine
    #: what ``fast`` applies; a subclass whose layers are lean by themselves has none
    fast_patches: ClassVar[tuple[type[Patch], ...]] = (FastLora,)

    def __init__(
        self,
        model_cls: type[PreTrainedModel] | type | str | None = "AutoModelForCausalLM",
        model_id: str | Path | None = None,
        config: PretrainedConfig | None = None,
        device_mesh: DeviceMesh | None = None,
        mixed_precision: Mixed = "bf16",
        strategy: Literal["accelerate", "native_fsdp"] = "accelerate",
        ddp_config: Mapping[str, Any] | None = None,
        fsdp_config: Mapping[str, Any] | None = None,
        grad_scaler_config: Mapping[str, Any] | None = None,
        memory_efficient_init: bool = False,
        *,
        gradient_checkpointing: bool | None = None,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        fast: bool = True,
        remote_group: str | None = None,
        **kwargs: Any,
    ) -> None:
        owner = type(self).__name__
        for parameter, value, known in (("strategy", strategy, STRATEGIES), ("on_nonfinite", on_nonfinite, ("raise", "skip"))):
            if value not in known:
                raise UnknownOption(parameter, value, closest(str(value), known), known)
        load.check_types(owner, _types(locals()))
        mesh = mesh_of(owner, device_mesh)
        precision = Precision(mixed_precision)
        device = load.pick_device(mesh)
        fsdp.check_config(fsdp_config or {}, mesh)
        tensor.check_mesh(owner, mesh)
        if mesh.world_size > 1 and (known := load.peek(model_id, config, kwargs)) is not None:
            tensor.check(owner, known, mesh)  # before what can't be laid is read
        precision.narrows = mesh.sizes["fsdp"] == 1
        scaler = _scaler(precision, device, grad_scaler_config)

        def read(place: torch.device) -> Any:
            own = {p for cls in (TransformersModel, type(self)) for p in inspect.signature(cls).parameters} - {"kwargs"}
            what: dict[str, Any] = {"model_cls": model_cls, "model_id": model_id, "config": config}
            return load.load_model(owner, frozenset(own), **what, precision=precision, device=place, options=kwargs)

        module, layout = lay_over(
            Layout(owner, Meeting(mesh, device, check_ddp_config(ddp_config or {}))),
            read,
            functools.partial(load.from_config, model_cls, options=kwargs),
            lambda module: load.set_checkpointing(module, gradient_checkpointing),
            by_one=memory_efficient_init,
            compute=precision.compute,
            fsdp_config=fsdp_config or {},
        )
        module.train()  # at rest; only ``forward_only`` and ``generate`` leave it, and come back
        load.warn_slow_precision(precision, device)
        facts = _facts(model_id, mixed_precision, f"{strategy} ({layout.describe()})", gradient_checkpointing)
        engine = self.engine_cls(
            module,
            precision=precision,
            device=device,
            mesh=mesh,
            layout=layout,
            scaler=scaler,
            on_nonfinite=on_nonfinite,
            facts=facts,
        )
        adapters = self.make_adapters(module, precision, lambda: _writer(self.sessions[BASE].template))
        adapters.layout = layout
        super().__init__(engine, adapters)
        for patch in self.fast_patches if fast else ():
            self.apply_patch(patch)

    def make_adapters(self, module: torch.nn.Module, precision: Precision, tokenizer: Callable[[], Any]) -> ModelStore:
        """The store of adapters over a model that has just been loaded. A subclass may have one of another kind."""
        return PeftAdapters(module, precision, tokenizer)

    @property
    def module(self) -> Any:
        """The transformers model itself, peft's layers inside; in training mode at rest (call ``eval()`` to use it by hand)."""
        return self.adapters.module


def _facts(model_id: str | Path | None, mixed: str, strategy: str, checkpointing: bool | None) -> dict[str, Any]:
    """What ``get_train_configs`` tells of how a model was made."""
    return {
        "model_id": str(model_id) if model_id is not None else "none (random weights)",
        "mixed_precision": mixed,
        "strategy": strategy,
        "gradient_checkpointing": bool(checkpointing),
    }


def _writer(template: Any) -> Any:
    """What writes the files that belong beside a whole model's weights: a processor's, where the model sees."""
    return template if hasattr(template, "save_pretrained") else getattr(template, "tokenizer", None)


def _types(given: Mapping[str, Any]) -> dict[str, tuple[Any, type | tuple[type, ...], str]]:
    """What the arguments of the constructor must be."""
    from transformers import PretrainedConfig

    from twinkle_core.mesh import DeviceMesh

    mapping, flag = (Mapping, "a dict, or None"), (bool, "True or False")
    wanted: dict[str, tuple[Any, str]] = {
        "model_id": ((str, Path), "a folder or a hub's id"),
        "config": (PretrainedConfig, "a config of transformers (PretrainedConfig)"),
        "device_mesh": (DeviceMesh, "a twinkle DeviceMesh"),
        "ddp_config": mapping,
        "fsdp_config": mapping,
        "grad_scaler_config": mapping,
        "memory_efficient_init": flag,
        "gradient_checkpointing": flag,
        "fast": flag,
    }
    return {name: (given[name], types, words) for name, (types, words) in wanted.items()}


def _scaler(precision: Precision, device: torch.device, config: Mapping[str, Any] | None) -> torch.amp.GradScaler | None:
    options = dict(config or {})
    arguments.check(torch.amp.GradScaler, options, "grad_scaler_config")
    if precision.mixed != "fp16":
        if options:
            get_logger("transformers").warning("grad_scaler_config is without effect: mixed_precision is '%s'", precision.mixed)
        return None
    return torch.amp.GradScaler(**{"device": device.type, "init_scale": FP16_INIT_SCALE, **options})
