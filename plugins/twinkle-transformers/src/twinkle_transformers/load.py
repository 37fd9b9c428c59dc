"""From a name, a folder or a config to a transformers model on its device."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from safetensors import SafetensorError

from twinkle_core import hardware, hub, settings
from twinkle_core.errors import (
    HoldsAdapter,
    ModelNotLoaded,
    NoDevice,
    NoModel,
    NotComputed,
    TwinkleError,
    UnknownModelClass,
    WrongArgument,
    WrongType,
)
from twinkle_core.log import get_logger
from twinkle_core.names import closest
from twinkle_core.train import shards
from twinkle_core.train.checkpoint import read_state
from twinkle_transformers import checkpoint
from twinkle_transformers.precision import Precision
from twinkle_transformers.tree import plain_state

if TYPE_CHECKING:
    from twinkle_core.mesh import DeviceMesh

#: What reading a model's folder raises where a file is missing, damaged, or another library's.
_UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, EOFError, SafetensorError, pickle.UnpicklingError)
#: What ``from_config`` takes; everything else belongs to the config.
_FROM_CONFIG = frozenset(
    {"allow_all_kernels", "attn_implementation", "code_revision", "dtype", "experts_implementation", "torch_dtype"}
    | {"trust_remote_code"}
)
#: What ``from_pretrained`` takes (most of it is read out of its keyword arguments) and has an effect on a local folder.
_FROM_PRETRAINED = _FROM_CONFIG | frozenset(
    {"device_map", "disable_mmap", "fusion_config", "generation_config", "gguf_file", "ignore_mismatched_sizes"}
    | {"kernel_config", "key_mapping", "max_memory", "offload_buffers", "offload_folder", "quantization_config"}
    | {"revision", "state_dict", "subfolder", "use_kernels", "use_safetensors", "variant"}
)


def model_class(spec: Any) -> Any:
    """A class as it is; a name of transformers' as its class; None as AutoModelForCausalLM."""
    import transformers

    if spec is None:
        return transformers.AutoModelForCausalLM
    if not isinstance(spec, str):
        if not hasattr(spec, "from_pretrained"):
            raise UnknownModelClass(getattr(spec, "__name__", repr(spec)), None)
        return spec
    found = getattr(transformers, spec, None) if spec in dir(transformers) else None
    if not hasattr(found, "from_pretrained") or not isinstance(found, type):
        names = [n for n in dir(transformers) if n.startswith("AutoModel") or "For" in n or n.endswith("Model")]
        raise UnknownModelClass(spec, closest(spec, names))
    return found


def pick_device(mesh: DeviceMesh | None) -> torch.device:
    """The mesh's kind of device, else this process's accelerator, else the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = (mesh.device_type if mesh else None) or (accelerator.type if accelerator else "cpu")
    kind = {"gpu": accelerator.type if accelerator else "cuda"}.get(kind.lower(), kind.lower())
    if kind == "cpu":
        return torch.device("cpu")
    if accelerator is None or accelerator.type != kind:
        raise NoDevice(kind)
    return torch.device(kind, settings.local_rank() or 0)


def check_types(owner: str, given: Mapping[str, tuple[Any, type | tuple[type, ...], str]]) -> None:
    """Arguments with the types and the words for what each must be. None is always allowed.

    Raises:
        WrongType
    """
    for parameter, (value, types, wanted) in given.items():
        if value is not None and not isinstance(value, types):
            raise WrongType(owner, parameter, value, wanted)


def warn_slow_precision(precision: Precision, device: torch.device) -> None:
    """One line where bf16 would be emulated."""
    if device.type == "cpu" and precision.mixed == "bf16" and not hardware.cpu_has_bf16():
        get_logger("transformers").warning(
            "this CPU has no bf16 hardware, so mixed_precision='bf16' is emulated and slow; mixed_precision='no' is faster here"
        )


def _check_options(owner: str, own: frozenset[str], options: Mapping[str, Any], known: frozenset[str], config: Any) -> None:
    """Every option is the loader's or the config's, and has an effect."""
    for key in options:
        if key not in known and not hasattr(config, key):
            fields = [] if config is None else [f for f in config.to_dict() if not f.startswith("_")]
            near = closest(key, own) or closest(key, [*known, *fields])
            raise WrongArgument(owner, key, near, sorted(own))
    if options.get("output_router_logits") and config is not None:
        known_as, text = type(config).__name__, config.get_text_config()
        if options.get("router_aux_loss_coef", getattr(text, "router_aux_loss_coef", None)) is None:
            why = "its router has no such loss (no router_aux_loss_coef). Leave output_router_logits out"
            raise NotComputed(f"the model of {known_as}", "aux_loss", why)


def load_model(
    owner: str,
    own: frozenset[str],
    *,
    model_cls: Any,
    model_id: str | Path | None,
    config: Any,
    precision: Precision,
    device: torch.device,
    options: Mapping[str, Any],
) -> Any:
    """The model, in evaluation mode, on its device.

    Args:
        owner: who is constructed, for error texts; ``own``: its parameters, for did-you-mean.
        model_cls: see ``model_class``.
        model_id: ``ms://``, ``hf://`` or a local folder; None: random weights from ``config`` (or from options alone, where
            ``model_cls`` is a model's own class).
        config: a PretrainedConfig, used in place of the one in the folder.
        options: for ``from_pretrained`` or ``from_config``, and single values of the config. ``dtype`` overrides the type
            in which weights are loaded; remote code is not run unless ``trust_remote_code=True`` is among them.

    Raises:
        UnknownModelClass, NoModel, WrongArgument, ModelNotLoaded, HoldsAdapter, and what ``hub.resolve`` raises.
    """
    cls = model_class(model_cls)
    options = dict(options)
    if model_id is None:
        if config is None and not (options and getattr(cls, "config_class", None)):
            _no_model(owner, own, options)
        model = _build(owner, own, cls, config, options)
    else:
        model = _load(owner, own, cls, str(model_id), config, precision, options)
    if "device_map" not in options:
        model = model.to(device)
    return model.eval()


def from_config(model_cls: Any, config: Any, options: Mapping[str, Any]) -> Any:
    """A model that a config describes, as ``load_model`` would build it."""
    cls = model_class(model_cls)
    loader = {k: v for k, v in options.items() if k in _FROM_CONFIG and k not in ("dtype", "torch_dtype")}
    if hasattr(cls, "from_config"):
        return cls.from_config(config, **loader)
    loader.pop("trust_remote_code", None)
    return cls._from_config(config, **loader)


def _no_model(owner: str, own: frozenset[str], options: Mapping[str, Any]) -> NoReturn:
    """There is no model to ask what it knows; but a word that is like one of the constructor's is what is missing."""
    for key in options:
        if key not in _FROM_PRETRAINED and (near := closest(key, own)):
            raise WrongArgument(owner, key, near)
    raise NoModel(owner, options)


def _build(owner: str, own: frozenset[str], cls: Any, config: Any, options: dict[str, Any]) -> Any:
    loader = {k: v for k, v in options.items() if k in _FROM_CONFIG}
    fields = {k: v for k, v in options.items() if k not in _FROM_CONFIG}
    config = cls.config_class() if config is None else copy.deepcopy(config)
    _check_options(owner, own, fields, _FROM_CONFIG, config)
    config = type(config).from_dict({**config.to_dict(), **fields}) if fields else config
    if hasattr(cls, "from_config"):
        return cls.from_config(config, **loader)
    loader.pop("trust_remote_code", None)  # the class is here already
    return cls._from_config(config, **loader)


def _load(
    owner: str, own: frozenset[str], cls: Any, model_id: str, config: Any, precision: Precision, options: dict[str, Any]
) -> Any:
    from transformers import AutoConfig, PreTrainedModel
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    folder, options = _fetch(model_id, options)
    place = Path(folder) / (options.get("subfolder") or "")
    if hub.holds_adapter(place):  # transformers would put it in unseen, beneath the adapters of this model
        raise HoldsAdapter(place, hub.base_of_adapter(place))
    if place.is_dir():
        read_state(place)  # of a checkpoint: its files are what was saved
    options["trust_remote_code"] = trust = bool(options.get("trust_remote_code", False))
    if shards.place(place, "model").is_dir():
        return _from_shards(owner, own, cls, place, config, precision, options)
    strange = {k: v for k, v in options.items() if k not in _FROM_PRETRAINED}
    if not {"dtype", "torch_dtype"} & set(options):
        options["dtype"] = precision.load_dtype
    try:
        if strange:  # taking the config out of a GGUF file would take as long as loading it
            ask = config is None and "gguf_file" not in options
            there = AutoConfig.from_pretrained(folder, trust_remote_code=trust) if ask else config
            _check_options(owner, own, strange, _FROM_PRETRAINED, there)
        if config is not None:
            options["config"] = config
        if not issubclass(cls, (PreTrainedModel, _BaseAutoModelClass)):  # one that only looks like transformers'
            return cls.from_pretrained(folder, **options)
        model, report = cls.from_pretrained(folder, output_loading_info=True, **options)
    except TwinkleError:
        raise
    except _UNREADABLE as error:
        raise ModelNotLoaded(folder, str(error) or type(error).__name__) from error
    _check_complete(model, folder, report, reshaped=bool(strange) or config is not None)
    return model


def peek(model_id: str | Path | None, config: Any, options: Mapping[str, Any]) -> Any:
    """The config of a model that is to be loaded, where that is to be had without loading anything; else None."""
    from transformers import AutoConfig

    if config is not None or model_id is None or not Path(model_id).is_dir():
        return config
    try:
        return AutoConfig.from_pretrained(model_id, trust_remote_code=bool(options.get("trust_remote_code", False)))
    except _UNREADABLE:  # loading says what is wrong
        return None


def _from_shards(
    owner: str, own: frozenset[str], cls: Any, folder: Path, config: Any, precision: Precision, options: dict[str, Any]
) -> Any:
    """From a checkpoint whose weights each rank wrote for itself: built from its config, and filled.

    Raises:
        WrongArgument: an option of ``from_pretrained`` that is none of ``from_config``. WeightsMismatch, CheckpointDamaged.
    """
    from transformers import AutoConfig

    if not {"dtype", "torch_dtype"} & set(options):
        options["dtype"] = precision.load_dtype
    try:
        config = config or AutoConfig.from_pretrained(folder, trust_remote_code=options["trust_remote_code"])
    except _UNREADABLE as error:
        raise ModelNotLoaded(folder, str(error) or type(error).__name__) from error
    if options.get("dtype") == "auto":
        options["dtype"] = config.dtype
    model = _build(owner, own, cls, config, options)
    live = plain_state(model)
    state = checkpoint.with_ties(live, shards.read(shards.place(folder, "model"), live))
    checkpoint.check_keys(live, state, "the model")
    for key, tensor in state.items():
        live[key].copy_(tensor)
    return model


def _check_complete(model: Any, folder: str, report: Mapping[str, Any], reshaped: bool) -> None:
    """Weights that no file holds are random numbers. That is right for a new head, and nowhere else.

    Args:
        report: what transformers found; tied weights and buffers that it makes itself are not in it.
        reshaped: the caller changed the config, so that weights may be left over (fewer layers).

    Raises:
        ModelNotLoaded: a weight of the model's body is missing, or of the output layer of a model that generates; or a weight
        of its body is left over.
    """
    prefix = "" if model.base_model is model or not model.base_model_prefix else f"{model.base_model_prefix}."
    generates = bool(model.can_generate())
    missing = sorted(k for k in report["missing_keys"] if "pooler" not in k.split("."))  # models without one are saved so
    unexpected = sorted(report["unexpected_keys"])
    lost = [key for key in missing if generates or key.startswith(prefix)]
    strange = [key for key in unexpected if generates and key.startswith(prefix)]
    if lost or (strange and not reshaped):
        raise ModelNotLoaded.incomplete(folder, type(model).__name__, lost, strange)
    new = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    for keys, text in ((new, "new, with random numbers"), (unexpected, "in its files, and not used")):
        if keys:
            shown = ", ".join(keys[:3]) + (", ..." if len(keys) > 3 else "")
            get_logger("transformers").warning("%s: %d weight(s) are %s: %s", type(model).__name__, len(keys), text, shown)


def _fetch(model_id: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The local folder, and the options that are left for ``from_pretrained``. A path to a GGUF file names file and folder."""
    # what no loader here reads; some repositories hold each weight three times
    unused = ["*.pth", "original/*", "*.onnx", "onnx/*", "*.msgpack", "*.h5", "*.ot"]
    if "gguf_file" not in options:
        unused.append("*.gguf")
    path = Path(hub.resolve(model_id, revision=options.pop("revision", None), ignore_patterns=unused))
    if path.is_file():
        options = {**options, "gguf_file": path.name}
        path = path.parent
    return str(path), options


def set_checkpointing(model: Any, wanted: bool | None) -> None:
    """Gradient checkpointing on, off, or (None) off too: half of a step's time is not spent unasked."""
    if wanted:
        # the re-entrant kind loses gradients where no input of a block requires one, as under LoRA
        settings = {"use_reentrant": False}
        if hasattr(model, "activation_checkpointing_enable"):  # the newer name; the older one warns there
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    elif any(getattr(m, "gradient_checkpointing", False) for m in model.modules()):
        if hasattr(model, "activation_checkpointing_disable"):
            model.activation_checkpointing_disable()
        else:
            model.gradient_checkpointing_disable()
