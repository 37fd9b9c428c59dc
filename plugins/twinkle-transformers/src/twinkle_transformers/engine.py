"""How a transformers model computes: one forward and one backward after the other, and nothing that nobody asked for."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from twinkle_core.contracts.engine import GENERATE, SPLIT_STEP, Batch
from twinkle_core.contracts.loss import Loss
from twinkle_core.errors import NotComputed, UnknownOption
from twinkle_core.mesh import DeviceMesh
from twinkle_core.names import closest
from twinkle_core.ops.token_logps import Tempered, logps_from_logits, token_logps
from twinkle_core.patches.heads import NO_POOLING, NO_VALUE_HEAD, VALUE_HEAD, pooling_of, values_of
from twinkle_core.train.loop_engine import evaluating
from twinkle_core.train.prepare import check_length
from twinkle_core.train.session import Session
from twinkle_core.types import InputFeature, ModelOutput
from twinkle_transformers.attention import by_row
from twinkle_transformers.generate import check_options, complete
from twinkle_transformers.inputs import Fitted, fit, packs
from twinkle_transformers.layout import Layout
from twinkle_transformers.parallel import Meeting, MeshEngine
from twinkle_transformers.precision import NARROW, Precision
from twinkle_transformers.probes import body_of, caches, check_isolation, check_shared_tokens, counts_from_zero, output_layer_of
from twinkle_transformers.tree import text_config

#: what is computed from labels, token by token
TOKEN_NEEDS = frozenset({"logps", "entropies", "predictions"})
#: what a model may be asked for; all but the first: whatever its own logits are
TASKS = ("causal_lm", "seq_cls", "token_cls", "embedding")


@contextlib.contextmanager
def training(module: torch.nn.Module) -> Iterator[None]:
    """Training mode inside; on leaving, the flag of each submodule is what it was.

    A model that is in training mode already is left as it is: what its owner put into evaluation there stays so.
    """
    if module.training:
        yield
        return
    found = [(m, m.training) for m in module.modules()]
    module.train()  # the model's own idea of it: some keep parts of themselves in evaluation
    try:
        yield
    finally:
        for m, flag in found:
            m.training = flag


def _is_plain(mask: Any, positions: Any) -> bool:
    """Whether a mask hides nothing and positions count from 0. Asked on the CPU alone: elsewhere one waits for the answer."""
    if mask is None or mask.dim() != 2 or mask.device.type != "cpu" or not bool(mask.all()):
        return False
    return positions is None or torch.equal(positions, torch.arange(mask.shape[1]).expand_as(positions))


@contextlib.contextmanager
def results_of(module: torch.nn.Module) -> Iterator[list[Any]]:
    """What a module gives inside, call by call."""
    seen: list[Any] = []
    handle = module.register_forward_hook(lambda _, __, result: seen.append(result))
    try:
        yield seen
    finally:
        handle.remove()


def _wanted(needs: frozenset[str]) -> dict[str, bool]:
    return {"entropies": "entropies" in needs, "predictions": "predictions" in needs}


def _named(needs: frozenset[str], values: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    found = dict(zip(("logps", "entropies", "predictions"), values, strict=True))
    return {k: v for k, v in found.items() if k in needs and v is not None}


class TransformersEngine(MeshEngine):
    """Core's loop over micro-batches, with a transformers model inside.

    Labels never reach the model: its own loss would shift and average them. Logps, predictions and entropies are taken from
    the input of the output layer, at the labelled positions alone, where the model's logits are its output layer's output and
    nothing else (found out once, by asking it); models that scale or cap logits go by their logits.

    Args:
        module: the model.
        precision: its types, and the autocast of a forward.
        device, mesh, scaler, on_nonfinite: see LoopEngine.
        layout: how the model lies over the mesh's ranks; default: as it is on each.
        facts: for ``describe``.
    """

    capabilities = frozenset({SPLIT_STEP, GENERATE})
    module: Any
    #: the longest row that is taken, in tokens; None: any
    max_length: int | None = None

    def __init__(
        self,
        module: Any,
        *,
        precision: Precision,
        device: torch.device,
        mesh: DeviceMesh | None = None,
        layout: Layout | None = None,
        scaler: torch.amp.GradScaler | None = None,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(module, mesh=mesh, device=device, scaler=scaler, on_nonfinite=on_nonfinite)
        self.layout = layout or Layout(type(module).__name__, Meeting(self.mesh, self.device))
        self.precision = precision
        self._facts = dict(facts or {})
        self._takes = frozenset(inspect.signature(module.forward).parameters) - {"labels", "use_cache"}
        self._caches = caches(module)
        self._roads: dict[tuple[Any, ...], Any] = {}
        self._isolated: set[Any] = set()
        self._packed = False  # whether rows that were prepared share a sequence
        self._own = list(module.parameters())  # the model's, without those of adapters, which are fp32 from the beginning

    # ------------------------------------------------------------------------------------------------ forward

    def prepare(
        self,
        session: Session,
        rows: Sequence[InputFeature] | InputFeature,
        *,
        micro_batch_size: int | None = None,
        loss_args: Mapping[str, Any] | None = None,
    ) -> list[Batch]:
        """See ``Engine.prepare``. Ids and labels that the model has no place for are refused here, while they are on the CPU.

        Raises:
            BadInputs, BadRow, BadLabels, PackingLeaks
        """
        loss = session.loss
        check_length(rows, self.max_length)
        if isinstance(rows, Mapping):
            rows = self._fit(rows, loss)
        else:
            assert session.processor is not None
            fitted = Fitted(session.processor, lambda batch, first: self._fit(batch, loss, first))
            session = copy.copy(session)
            session.processor = fitted
        batches = super().prepare(session, rows, micro_batch_size=micro_batch_size, loss_args=loss_args)
        if self._packed:  # ranks ask the model together: after they have met
            self._packed = False
            self._check_isolation()
        return batches

    def _fit(self, batch: Mapping[str, Any], loss: Loss | None, first: int = 0) -> InputFeature:
        fitted = fit(self.module, batch, loss, first)
        self._packed = self._packed or packs(fitted)
        return fitted

    def forward(
        self, batch: Batch, needs: frozenset[str], *, train: bool, temperature: float = 1.0, task: str = "causal_lm"
    ) -> ModelOutput:
        """See ``Engine.forward``. ``task`` other than ``causal_lm``: whatever the model's own logits are, without labels.

        ``logits``, and what the ``output_layer`` that goes with ``hidden`` makes, are divided by ``temperature`` too: a loss
        on either sees the same distribution as one on logps.

        ``embeddings`` come from the pooling head and ``values`` from the value head that patches put on the model, both of the
        last hidden state; where nothing else is wanted, the output layer does not run.

        Raises:
            UnknownOption: the task. NotComputed, BadLabels.
        """
        if task not in TASKS:
            raise UnknownOption("task", task, closest(str(task), TASKS), TASKS)
        if self.in_step:
            self._counts_from_zero()  # by all ranks at once, whether this one's rows need to know it or not
        tokens = self.layout.tokens
        features = batch.inputs if tokens is None else tokens.pad(self._name(), batch.inputs)
        inputs = self._inputs(features)
        if train and self.precision.compute is not None:
            # what is trained is fp32 before its first gradient: in a narrow type gradients of a window would lose digits
            self.precision.master([p for p in self._own if p.requires_grad and p.dtype in NARROW])
        mode = training(self.module) if train else evaluating(self.module)
        rows = by_row(self.module, features.get("seq_lens"))
        with mode, self.precision.autocast(self.device), rows:
            shared = self.around(lambda: dict(self._shared(features, inputs, needs, temperature, task)), "hidden" in needs)
            output = ModelOutput(shared)
            return output if tokens is None else tokens.trim(output, batch.inputs["input_ids"].shape[1])

    def _shared(
        self, batch: InputFeature, inputs: Mapping[str, Any], needs: frozenset[str], temperature: float, task: str
    ) -> ModelOutput:
        """Where ranks share the sequence: this rank's part of it, then the outputs of all parts."""
        sequence = self.layout.sequence
        if (tokens := self.layout.tokens) is not None:
            self._output_layer(inputs)  # found out on whole rows
            if self._roads.setdefault(("shared tokens",), True):
                check_shared_tokens(self.module, tokens, self.precision, self.device)
                self._roads["shared tokens",] = False
            with self.layout.sharing():
                return self._compute(batch, inputs, needs, temperature, task)
        if sequence is None:
            return self._compute(batch, inputs, needs, temperature, task)
        sequence.check(self._name(), needs)
        self._output_layer(inputs)  # found out on whole rows
        cut, own, whole, length = sequence.cut(self._name(), batch, inputs)
        output = self._compute(cut, own, needs, temperature, task)  # type: ignore[arg-type]
        return sequence.join(self._name(), output, whole, length)

    def _compute(
        self, batch: InputFeature, inputs: Mapping[str, Any], needs: frozenset[str], temperature: float, task: str
    ) -> ModelOutput:
        heads = self._heads(needs)
        if heads and heads == needs:
            return self._by_heads(self._states(body_of(self.module)(**inputs)), batch, heads)
        layer = self._output_layer(inputs) if self._wants_hidden(needs - heads, task) else None
        if layer is None:
            return self._by_logits(batch, inputs, needs, temperature)
        return self._by_hidden(batch, inputs, needs, temperature, layer)

    def backward(self, loss_sum: torch.Tensor, *, sync: bool = True) -> None:
        # gradient checkpointing runs parts of the forward again, with their dropout and their attention
        with training(self.module), by_row(self.module), self.layout.sharing():
            super().backward(loss_sum, sync=sync)

    @property
    def aux_loss_coef(self) -> float:  # type: ignore[override]
        """``router_aux_loss_coef`` of the model's config where that says ``output_router_logits``, as in transformers."""
        text = text_config(self.module)
        on = getattr(text, "output_router_logits", False)
        return float(getattr(text, "router_aux_loss_coef", None) or 0.0) if on else 0.0

    def _wants_hidden(self, needs: frozenset[str], task: str) -> bool:
        beyond = {"values"} | (set() if "logits_to_keep" in self._takes else {"aux_loss"})
        tokens = task in ("causal_lm", "embedding") and bool(needs & (TOKEN_NEEDS | {"hidden"}))
        return tokens and not needs & beyond

    def _heads(self, needs: frozenset[str]) -> frozenset[str]:
        """What of ``needs`` comes from heads on the hidden states."""
        if "embeddings" in needs and pooling_of(self.module) is None:
            raise NotComputed(self._name(), "embeddings", NO_POOLING)
        return needs & ({"embeddings", "values"} if hasattr(self.module, VALUE_HEAD) else {"embeddings"})

    def _inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """What the model's forward takes of a batch.

        Without padding there is nothing to mask, and positions are what the model counts by itself; leaving both out selects
        the plain causal kernels. A packed batch has no mask and keeps its positions: they mark where rows begin. Models that
        count otherwise than from 0 (RoBERTa's) find padding by its token and count by themselves.
        """
        inputs = {k: v for k, v in batch.items() if k in self._takes and v is not None}
        if _is_plain(inputs.get("attention_mask"), inputs.get("position_ids")):
            del inputs["attention_mask"]
            inputs.pop("position_ids", None)
        elif not packs(batch) and getattr(inputs.get("position_ids"), "ndim", 0) == 2 and not self._counts_from_zero():
            del inputs["position_ids"]
        if self._caches:
            inputs["use_cache"] = False
        return inputs

    def _by_logits(
        self, batch: InputFeature, inputs: Mapping[str, Any], needs: frozenset[str], temperature: float
    ) -> ModelOutput:
        """The whole model. Memory: ``[B, T, V]``."""
        if "hidden" in needs:
            raise NotComputed(self._name(), "hidden", "its logits are not its output layer's output alone; use a loss on logps")
        extra = {"output_router_logits": True} if "aux_loss" in needs and "output_router_logits" in self._takes else {}
        with results_of(body_of(self.module)) as seen:
            result = self.module(**inputs, **extra)
        logits: Any = getattr(result, "logits", None)
        heads = self._heads(needs)
        output = self._by_heads(self._states(seen[-1] if seen else None), batch, heads) if heads else ModelOutput()
        needs -= heads
        if "aux_loss" in needs:
            output["aux_loss"] = self._aux_of(result)
        if logits is None and needs & (TOKEN_NEEDS | {"logits", "values"}):
            raise NotComputed(self._name(), "logits", f"its outputs are {', '.join(result.keys())}")
        if "logits" in needs:
            output["logits"] = logits if temperature == 1.0 else logits / temperature
        if needs & TOKEN_NEEDS:
            labels = batch["labels"]
            if labels.is_floating_point() or labels.shape != logits.shape[:-1]:
                why = f"labels {list(labels.shape)} ({labels.dtype}) are no classes of logits {list(logits.shape)}"
                raise NotComputed(self._name(), "logps", f"{why}; set_loss('mse') or a function")
            output.update(_named(needs, logps_from_logits(logits, batch["labels"], **_wanted(needs), temperature=temperature)))
        if "values" in needs:
            if logits.shape[-1] != 1:
                raise NotComputed(self._name(), "values", f"{NO_VALUE_HEAD}; nor logits of one column (a regression head)")
            output["values"] = logits.squeeze(-1)
        return output

    def _aux_of(self, result: Any) -> torch.Tensor:
        aux = getattr(result, "aux_loss", None)
        if not isinstance(aux, torch.Tensor):
            raise NotComputed(self._name(), "aux_loss", "it has no router with such a loss")
        return aux

    def _by_hidden(
        self, batch: InputFeature, inputs: Mapping[str, Any], needs: frozenset[str], temperature: float, layer: Any
    ) -> ModelOutput:
        """The body of the model, and its output layer only where there are labels, unless whole logits were asked for."""
        aux = None
        if "aux_loss" in needs:
            hidden, aux = self._hidden_and_aux(inputs)
        else:
            hidden = self._states(body_of(self.module)(**inputs))
        output = self._by_heads(hidden, batch, self._heads(needs))
        if aux is not None:
            output["aux_loss"] = aux
        shown = layer if temperature == 1.0 else Tempered(layer, temperature)
        if "logits" in needs:
            output["logits"] = shown(hidden)
        if "hidden" in needs:
            output["hidden"], output["output_layer"] = hidden, shown
        if needs & TOKEN_NEEDS:
            output.update(_named(needs, token_logps(hidden, layer, batch["labels"], **_wanted(needs), temperature=temperature)))
        return output

    def _hidden_and_aux(self, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """The last hidden states, and the auxiliary loss, which only the whole model makes: with one column of logits."""
        with results_of(body_of(self.module)) as seen:
            result = self.module(**inputs, output_router_logits=True, logits_to_keep=1)
        return self._states(seen[-1]), self._aux_of(result)

    def _by_heads(self, hidden: torch.Tensor, batch: InputFeature, heads: frozenset[str]) -> ModelOutput:
        """``embeddings`` ``[B, D]`` and ``values`` ``[B, T]``, as far as they are asked for."""
        output = ModelOutput()
        if "embeddings" in heads and (pooling := pooling_of(self.module)) is not None:
            output["embeddings"] = pooling(hidden, batch)
        if "values" in heads:
            output["values"] = values_of(self.module, hidden)
        return output

    def _states(self, result: Any) -> torch.Tensor:
        """The last hidden states of what the model's body gave."""
        hidden: torch.Tensor | None = getattr(result, "last_hidden_state", None)
        if hidden is None:
            raise NotComputed(
                self._name(), "hidden states", f"its body gives {type(result).__name__}, without last_hidden_state"
            )
        return hidden

    # ------------------------------------------------------------------------------------------------ what the model is like

    def _name(self) -> str:
        return type(self.module).__name__

    def _output_layer(self, inputs: Mapping[str, Any]) -> Any:
        """The output layer if the logits are its output alone, else None. Asked once for each pair of layers and forward."""
        layer = self.module.get_output_embeddings()
        forward = getattr(self.module.forward, "__func__", self.module.forward)  # a patch may have put another in its place
        given = frozenset() if self.in_step else frozenset(inputs)  # ranks may be given more or less, and ask together
        key = (id(layer), id(getattr(self.module, "base_model", None)), forward, given)
        if key not in self._roads:
            self._roads[key] = output_layer_of(self.module, inputs)
        return layer if self._roads[key] else None

    def _counts_from_zero(self) -> bool:
        key = ("counts from zero",)
        if key not in self._roads:
            with torch.no_grad():
                self._roads[key] = self.around(lambda: counts_from_zero(self.module, self.precision, self.device))
        return bool(self._roads[key])

    def _check_isolation(self) -> None:
        key = getattr(getattr(self.module, "config", None), "_attn_implementation", None)
        if key not in self._isolated:
            with torch.no_grad():
                self.around(lambda: check_isolation(self.module, self._takes, self.precision, self.device))
            self._isolated.add(key)

    # ------------------------------------------------------------------------------------------------ the rest

    def make_optimizer(
        self, cls: Any, parameters: Mapping[str, torch.nn.Parameter], kwargs: Mapping[str, Any]
    ) -> torch.optim.Optimizer:
        self.precision.master(parameters.values())
        return super().make_optimizer(cls, parameters, kwargs)

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        super().adopt_optimizer(optimizer)
        self.precision.master(p for group in optimizer.param_groups for p in group["params"])

    def generate(
        self,
        rows: Sequence[InputFeature],
        *,
        generator: torch.Generator | None = None,
        keep_end: bool = False,
        **kwargs: Any,
    ) -> list[list[int]]:
        """Completions' ids of prompts' ids.

        Args:
            generator: where the random numbers of sampling come from: the same state gives the same completions, and the global
                state, from which dropout draws, stays as it is. None: the global state.
            keep_end: leave the end token on.
            kwargs: of transformers' ``generate``; at most 128 new tokens if it isn't said.

        Raises:
            NotComputed: the model has no text to give. WrongArgument, ReservedArgument, BadArgument, BadGeneration: the
            options. BadRow: a prompt.
        """
        if not self.module.can_generate():
            raise NotComputed(self._name(), "text", "transformers can't generate with this class; load one ...ForCausalLM")
        check_options("TransformersModel.generate", self.module, kwargs)
        if self.in_step:
            kwargs = {**kwargs, "synced_gpus": True}  # a rank that is done goes on until all are
        with evaluating(self.module), self.precision.autocast(self.device):
            return self.around(lambda: complete(self.module, rows, self.device, kwargs, generator=generator, keep_end=keep_end))

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), **self._facts}
