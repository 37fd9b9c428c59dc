"""MegatronModel: all verbs of twinkle over Megatron-Core; the verbs are core's."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from twinkle_core import settings as environment
from twinkle_core.errors import BadArgument, NeedsLibrary, NoModel, OnlyOwn, UnknownOption, WrongType
from twinkle_core.mesh import DeviceMesh
from twinkle_core.names import closest
from twinkle_core.runtime.dispatch import remote_class
from twinkle_core.runtime.local import default_mesh
from twinkle_core.train.verbs import SessionModel
from twinkle_megatron.cpu.runtime import RUNTIME

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from twinkle_megatron.adapters import MegatronAdapters
    from twinkle_megatron.engine import MegatronEngine
    from twinkle_megatron.load import Built
    from twinkle_megatron.parallel import Layout

PRECISIONS = ("no", "fp16", "bf16")
#: formats of Transformer Engine's, and what the length of a sequence must be a multiple of for them
FP8, FP8_TILE = ("e4m3", "hybrid"), 16


@remote_class(execute="all")
class MegatronModel(SessionModel):
    """A language model in Megatron-Core, laid over tensor, pipeline, data, context and expert ranks.

    Weights are read from plain Hugging Face folders, and written as such. Without adapters the whole model is trained; after
    ``add_adapter_to_model`` an adapter is. All ranks of the mesh build it and call its verbs together; each gives the rows of
    its data rank.

    Args:
        model_id: ``ms://org/name``, ``hf://org/name`` or a local folder. None: random weights from ``config``.
        config: a PretrainedConfig to use in place of the folder's.
        device_mesh: ``tp_size``, ``pp_size``, ``vpp_size``, ``dp_size``, ``cp_size``, ``ep_size``, ``etp_size``,
            ``sequence_parallel``. Default: one rank, or torchrun's as data ranks.
        mixed_precision: ``bf16``, ``fp16`` (with Megatron's gradient scaler) or ``no`` (fp32). In 16 bits the optimizer holds
            fp32 weights, shared out over data ranks. Above ``bf16``, with Transformer Engine: ``fp8='hybrid'`` or
            ``'e4m3'``.
        on_nonfinite: what NaN or infinite gradients do: ``raise``, or ``skip`` the update. fp16 always skips.
        remote_group: where the model lives under a remote runtime; without effect in local mode.
        kwargs: Megatron's settings (fields of its ``TransformerConfig``), such as ``recompute_granularity='full'``.

    Raises:
        NeedsLibrary: megatron-core, mcore-bridge or (on CUDA) transformer-engine. WrongArgument, BadArgument: a setting.
        BadLayout, BadMesh, ManyLayouts, NoModel, UnsupportedFamily, ModelNotLoaded, UnknownOption, WrongType, and what
        ``hub.resolve`` raises.
    """

    def __init__(
        self,
        model_id: str | Path | None = None,
        config: PretrainedConfig | None = None,
        device_mesh: DeviceMesh | None = None,
        mixed_precision: Literal["no", "fp16", "bf16"] = "bf16",
        *,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        remote_group: str | None = None,
        **kwargs: Any,
    ) -> None:
        owner = type(self).__name__
        options = (("mixed_precision", mixed_precision, PRECISIONS), ("on_nonfinite", on_nonfinite, ("raise", "skip")))
        for parameter, value, known in options:
            if value not in known:
                raise UnknownOption(parameter, value, closest(str(value), known), known)
        if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
            raise WrongType(owner, "device_mesh", device_mesh, "a twinkle DeviceMesh")
        if model_id is None and config is None:
            raise NoModel(owner, kwargs)
        RUNTIME.install()
        mesh = device_mesh or default_mesh() or DeviceMesh.from_sizes()
        with RUNTIME.active():
            engine, adapters = _build(self, model_id, config, mesh, mixed_precision, on_nonfinite, kwargs)
        super().__init__(engine, adapters)

    def set_optimizer(self, optimizer_cls: Any = "default", *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """Megatron's distributed optimizer: ``default`` or ``MegatronDistributedOptimizer``.

        Args:
            kwargs: ``lr``, ``weight_decay``, ``optimizer`` (``adam`` or ``sgd``), and see ``MegatronDistributedOptimizer``.

        Raises:
            OnlyOwn: another optimizer. What core's ``set_optimizer`` raises.
        """
        from twinkle_megatron.optim import MegatronDistributedOptimizer as Own

        if optimizer_cls not in ("default", Own.__name__, Own):
            why = "weights, gradients and states lie in Megatron's buffers, shared out over ranks, where it would not find them"
            raise OnlyOwn(type(self).__name__, "optimizer", optimizer_cls, why, "optimizer('default', lr=…)")
        super().set_optimizer(Own, adapter_name=adapter_name, **kwargs)

    def set_lr_scheduler(self, scheduler_cls: Any = "default", *, adapter_name: str | None = None, **kwargs: Any) -> None:
        """Megatron's schedule: ``default`` or ``OptimizerParamScheduler``.

        Args:
            kwargs: ``lr_decay_steps``, ``lr_warmup_steps``, ``lr_decay_style``, …: see ``OptimizerParamScheduler``.

        Raises:
            OnlyOwn: another scheduler. What core's ``set_lr_scheduler`` raises.
        """
        from twinkle_megatron.optim import OptimizerParamScheduler as Own

        if scheduler_cls not in ("default", Own.__name__, Own):
            why = "Megatron's optimizer takes its rate and decay from Megatron's own schedule"
            raise OnlyOwn(type(self).__name__, "scheduler", scheduler_cls, why, "lr_scheduler('default', lr_decay_steps=…)")
        super().set_lr_scheduler(Own, adapter_name=adapter_name, **kwargs)

    def make_engine(self, built: Built, **facts: Any) -> MegatronEngine:
        """How it computes; a subclass may take another engine. Megatron is imported here."""
        from twinkle_megatron.engine import MegatronEngine

        return MegatronEngine(built, **facts)

    def make_adapters(self, built: Built, layout: Layout, engine: MegatronEngine) -> MegatronAdapters:
        """Whose weights; a subclass may take another store."""
        from twinkle_megatron.adapters import MegatronAdapters

        return MegatronAdapters(built, layout, engine.reload, engine.forget)


def _device(mesh: DeviceMesh) -> torch.device:
    if RUNTIME.installed:
        if mesh.device_type not in (None, "cpu"):
            raise BadArgument("device_type", mesh.device_type, "'cpu' where Megatron computes on the CPU")
        return torch.device("cpu")
    device = torch.device("cuda", environment.local_rank() or 0)
    torch.cuda.set_device(device)
    return device


def _check_fp8(value: Any, precision: str) -> None:
    if value not in FP8:
        raise UnknownOption("fp8", value, closest(str(value), FP8), FP8)
    if RUNTIME.installed:  # no library helps there
        raise BadArgument("fp8", value, "left out on the CPU; it needs a GPU")
    if not RUNTIME.has_te:
        raise NeedsLibrary("MegatronModel", "transformer_engine.pytorch", "transformer-engine[pytorch]", sys.prefix)
    if precision != "bf16":
        raise BadArgument("mixed_precision", precision, "'bf16' with fp8: what fp8 does not compute is computed in it")


def _build(
    model: MegatronModel,
    model_id: Any,
    config: Any,
    mesh: DeviceMesh,
    precision: str,
    on_nonfinite: Literal["raise", "skip"],
    settings: Mapping[str, Any],
) -> tuple[Any, Any]:
    """Engine and store. Megatron is imported here, once ``RUNTIME`` is installed; what can be checked is checked first."""
    from twinkle_megatron import families, load, parallel
    from twinkle_megatron.draws import Draws

    owner = type(model).__name__
    own = frozenset(n for cls in (MegatronModel, type(model)) for n in inspect.signature(cls).parameters) - {"kwargs"}
    load.check_settings(owner, own, settings)
    layout = parallel.Layout.of(mesh)
    device = _device(mesh)
    folder, hf_config = load.find(model_id, config)
    converted = families.convert(owner, hf_config)
    layout.check(load.describe_shape(converted))
    families.check_layout(hf_config, layout)
    if settings.get("fp8"):
        _check_fp8(settings["fp8"], precision)
        layout = dataclasses.replace(layout, tile=FP8_TILE)
    parallel.connect(device, mesh.world_size)
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
        seed = parallel.common_seed()
        user = parallel.User()
        parallel.GROUPS.enter(layout, user)
        parallel.seed_ranks(seed)
        built = load.build(owner, folder, hf_config, converted, layout, precision, settings, on_cpu=bool(RUNTIME.installed))
        draws = Draws(layout, seed)
    facts = {
        "model_id": str(model_id) if model_id is not None else "none (random weights)",
        "mixed_precision": precision,
        "strategy": "Megatron-Core" + (" on the CPU" if RUNTIME.installed else ""),
        **{key: value for key, value in settings.items() if isinstance(value, (str, int, float, bool))},
    }
    engine = model.make_engine(built, layout=layout, mesh=mesh, device=device, on_nonfinite=on_nonfinite, facts=facts)
    engine.user, engine.draws = user, draws
    return engine, model.make_adapters(built, layout, engine)
