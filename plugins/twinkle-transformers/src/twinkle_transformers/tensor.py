"""Layers whose weights lie apart on ranks that compute together: tensor parallel, and experts of a mixture.

The plans (which layer is cut how) and the ways to compute a cut layer are transformers' own. Here they are laid over a model
that has its weights already, and over the adapters that come later, which neither transformers nor peft can do yet.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.utils.weak import WeakIdKeyDictionary
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES, replace_layer_number_by_wildcard
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from twinkle_core.errors import BadLayout
from twinkle_core.mesh import DeviceMesh
from twinkle_core.ops.sharded import is_sharded
from twinkle_transformers.token_parts import TokenParts

#: how layers are cut that may carry LoRA
_LINEAR = frozenset({"colwise", "rowwise"})
#: styles that are laid over as they are
_LAYERS = _LINEAR | {"all_reduce", "replicate", "packed_colwise", "moe_tp_experts"}
#: its gradient is a part of the whole on each rank. transformers sums it after each backward, which counts a window's first
#: backwards again; here it is summed once, with the window
_PARTIAL = "replicated_with_grad_allreduce"


def _expanded(module: Any, plan: dict[str, str]) -> dict[str, str]:
    """A plan by real names: ``layers.*`` as each layer. Parameters first: a list of experts counts its own when it is cut."""
    names = [*dict(module.named_parameters()), *dict(module.named_modules())]
    return {name: plan[key] for name in names if (key := replace_layer_number_by_wildcard(name)) in plan}


def _divides(owner: str, what: str, count: int | None, name: str, size: int) -> None:
    if count is not None and count % size:
        raise BadLayout(owner, f"{count} {what} can't be shared by {name} {size} ({count} / {size} = {count / size:.4g})")


def check_mesh(owner: str, mesh: DeviceMesh) -> None:
    """Whether any model can be laid over the mesh.

    Raises:
        BadLayout: with the arithmetic.
    """
    tp, ulysses = mesh.sizes["tp"], mesh.ulysses_size
    for name in ("pp", "cp"):
        if mesh.sizes[name] > 1:
            way = "ulysses_size shares long rows" if name == "cp" else "fsdp_size and tp_size share the weights"
            raise BadLayout(owner, f"{name}_size {mesh.sizes[name]} is not for transformers models ({way})")
    if mesh.sequence_parallel and tp == 1:
        raise BadLayout(owner, "sequence_parallel shares tokens among the ranks of tp, and tp_size is 1; take ulysses_size")
    if ulysses > 1 and tp > 1:
        raise BadLayout(owner, f"ulysses_size {ulysses} × tp_size {tp}: both share the attention heads; take one of them")
    if mesh.etp_size > 1:
        raise BadLayout(owner, f"etp_size {mesh.etp_size} is not for transformers models")


def check(owner: str, config: Any, mesh: DeviceMesh) -> None:
    """Whether a model of this config can.

    Raises:
        BadLayout: with the arithmetic.
    """
    tp, ep, ulysses = mesh.sizes["tp"], mesh.ep_size, mesh.ulysses_size
    text = text_config_of(config)
    heads, kv = getattr(text, "num_attention_heads", None), getattr(text, "num_key_value_heads", None)
    _divides(owner, "attention heads", heads, "tp_size", tp)
    _divides(owner, "key-value heads", kv, "tp_size", tp)
    _divides(owner, "attention heads", heads, "ulysses_size", ulysses)
    _divides(owner, "key-value heads", kv, "ulysses_size", ulysses)
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    if ep > 1 and experts is None:
        raise BadLayout(owner, f"ep_size {ep}: {type(config).__name__} has no experts")
    _divides(owner, "experts", experts, "ep_size", ep)
    if mesh.sequence_parallel and text is not config:
        raise BadLayout(owner, f"sequence_parallel is for models of texts, and this is a {type(config).__name__}; leave it off")


def text_config_of(config: Any) -> Any:
    """The config of the text part."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


class Parts:
    """A model whose layers are cut over the ranks of ``tp``.

    The embedding and the output layer stay whole on each rank: the losses read the output layer's weight.

    Args:
        module: has the same weights on all ranks; is changed in place.
        mesh: torch's, of the one dimension.
        share_tokens: residuals and norms are of each rank's part of the tokens.
        leave: names of the plan that are somebody else's to cut.

    Raises:
        BadLayout: transformers has no plan for this model, or one whose layers are cut in a way that isn't known here.
    """

    def __init__(
        self, owner: str, module: Any, mesh: Any, share_tokens: bool = False, leave: Collection[str] = frozenset()
    ) -> None:
        self.mesh = mesh
        ends = {m for m in (module.get_input_embeddings(), module.get_output_embeddings()) if m is not None}
        whole = {name for name, m in module.named_modules() if m in ends} | set(leave)
        plan = {
            k: v for k, v in _expanded(module, dict(module.tp_plan or {})).items() if not {k, k.removesuffix(".weight")} & whole
        }
        if not plan:
            raise BadLayout(owner, f"tp_size {mesh.size()}: no plan for {type(module).__name__}; take fsdp_size")
        strange = {k: v for k, v in plan.items() if v not in _LAYERS | {_PARTIAL}}
        if strange:
            name, style = next(iter(strange.items()))
            raise BadLayout(owner, f"tp_size {mesh.size()}: {name} would be cut as '{style}'; take ep_size or fsdp_size")
        modules = dict(module.named_modules())
        summed = [k.rpartition(".") for k, v in plan.items() if v == _PARTIAL]
        self._summed = [(modules[parent], name) for parent, _, name in summed]
        #: parameters whose gradients are parts of the whole
        self.partial: MutableMapping[torch.nn.Parameter, bool] = WeakIdKeyDictionary()
        cut = {k: v for k, v in plan.items() if v != _PARTIAL}
        self._styles = {modules[k]: v for k, v in cut.items() if v in _LINEAR and k in modules}
        parameters = dict(module.named_parameters())
        weights = {f"{k}.{n}": v for k, v in cut.items() for n in ("weight", "bias") if f"{k}.{n}" in parameters}
        self.tokens = TokenParts(owner, module, mesh, plan, _LINEAR | {_PARTIAL, "replicate"}) if share_tokens else None
        own = {name for name, m in modules.items() if self.tokens is not None and m in self.tokens.linear}
        apply_tensor_parallelism(module, mesh, {k: v for k, v in (weights | cut).items() if k not in own})

    def note(self) -> None:
        """All parameters are what they will be, or there are new ones: those whose gradients are parts are known."""
        found = [p for parent, name in self._summed for p in getattr(parent, name).parameters()]
        for p in [*found, *(self.tokens.partial() if self.tokens is not None else ())]:
            self.partial[p] = True

    def adapt(self, module: torch.nn.Module, name: str) -> None:
        """Cut a new adapter as its layers are: of a layer that is cut by columns A is whole and B's outputs are cut; by rows,
        A's inputs are cut, and B is whole.

        Raises:
            TypeError: something else than LoRA on a layer that is cut, or on one that is cut otherwise.
        """
        for layer in layers_of(module, name):
            style = self._styles.get(layer.get_base_layer())
            if style is None:
                refuse_cut(layer, "tp")
                continue
            if not isinstance(layer, LoraLinear) or layer.lora_variant.get(name) is not None:
                raise TypeError(f"{type(layer).__name__} on a layer that is cut over tp ranks; take plain LoRA")
            a, b = layer.lora_A[name], layer.lora_B[name]
            matrix, rest = (b, a) if style == "colwise" else (a, b)
            for parameter in list(matrix._parameters):
                ALL_PARALLEL_STYLES[style].shard_param(matrix, parameter, self.mesh)
            if self.tokens is None or layer.get_base_layer() not in self.tokens.linear:
                ALL_PARALLEL_STYLES[style].install_forward(matrix, self.mesh)
                continue
            self.tokens.compute(matrix, style)
            for parameter in rest.parameters():  # from the outputs, or the tokens, that this rank has
                self.partial[parameter] = True
        self.note()


def layers_of(module: torch.nn.Module, name: str) -> list[Any]:
    """The layers of peft's that carry an adapter."""
    return [m for m in module.modules() if isinstance(m, BaseTunerLayer) and name in m._get_available_adapters()]


def refuse_cut(layer: Any, dimension: str) -> None:
    """Raise TypeError if what a layer of peft's stands on is cut over these ranks."""
    base = layer.get_base_layer()
    if any(is_sharded(p) and dimension in (p.device_mesh.mesh_dim_names or ()) for p in base._parameters.values()):
        what = f"{type(layer).__name__} on {type(base).__name__}, whose weights are cut over {dimension} ranks"
        raise TypeError(f"{what}; take fsdp_size, or other target modules")


class _ByIdentity:
    """Where a parameter is to be cut."""

    def __init__(self, axes: Mapping[int, Shard]) -> None:
        self._axes = axes

    def __call__(self, parameter: torch.nn.Parameter) -> Shard:
        return self._axes[id(parameter)]


def planned_experts(module: Any) -> list[str]:
    """Names of what ``Experts`` cuts, by transformers' plan."""
    return list(_expanded(module, dict(module.ep_plan or {})))


class Experts:
    """A mixture whose experts are shared by the ranks of ``ep``; tokens travel to the experts that they are routed to.

    Args:
        module: has the same weights on all ranks; is changed in place.
        mesh: torch's, ``ep`` and, before it, the ranks that have the same experts: ``fsdp`` where they are to have a part of
            each, else ``rest``.
        same: torch's, of the ranks with the same tokens (``tp``; this one alone, without).
    """

    def __init__(self, owner: str, module: Any, mesh: Any, same: Any) -> None:
        self.owner, self.mesh = owner, mesh
        plan, size = _expanded(module, dict(module.ep_plan or {})), mesh["ep"].size()
        if not plan:
            raise BadLayout(owner, f"ep_size {size}: no plan for {type(module).__name__}; take fsdp_size")
        apply_expert_parallelism(module, mesh["ep"], same, plan, ep_implementation="all_to_all")
        modules, parameters = dict(module.named_modules()), dict(module.named_parameters())
        places = [name.rpartition(".") for name in plan if name in parameters]
        self._places = [(modules[parent], name) for parent, _, name in places]
        #: parameters of which each rank has its own experts'
        self.own: MutableMapping[torch.nn.Parameter, bool] = WeakIdKeyDictionary()

    def shard(self, options: Mapping[str, Any]) -> None:
        """Give each rank of ``fsdp`` that has the same experts a part of each of them (torch's ``fully_shard``).

        Raises:
            BadLayout: no axis can be cut into as many parts, or something beside the experts' weights is in their module.
        """
        count = self.mesh["fsdp"].size()
        own = {id(getattr(m, name)) for m, name in self._places}
        for module in dict.fromkeys(m for m, _ in self._places):
            axes: dict[int, Shard] = {}  # by identity: what is referred to weakly can't be given storage later
            for name, p in module.named_parameters():
                axis = next((i for i in range(1, p.dim()) if p.shape[i] % count == 0), None)
                if id(p) not in own or axis is None:
                    why = "is no expert's" if id(p) not in own else f"{list(p.shape)} has no axis of {count} equal parts"
                    size = self.mesh["ep"].size()
                    raise BadLayout(
                        self.owner, f"fsdp_size with ep_size {size}: {name} of {type(module).__name__} {why}; take dp_size"
                    )
                axes[id(p)] = Shard(axis)
            fully_shard(module, **options, mesh=self.mesh["fsdp"], shard_placement_fn=_ByIdentity(axes))

    def note(self) -> None:
        """All parameters are what they will be."""
        for module, name in self._places:
            self.own[getattr(module, name)] = True

    def adapt(self, module: torch.nn.Module, name: str) -> None:
        """An adapter beside the experts; one on them would be needed where their tokens are.

        Raises:
            TypeError: it is on them.
        """
        for layer in layers_of(module, name):
            refuse_cut(layer, "ep")
