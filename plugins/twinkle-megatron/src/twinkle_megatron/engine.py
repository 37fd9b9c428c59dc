"""How a Megatron model computes: its schedule over micro-batches, its buffers and optimizer; losses and windows are core's."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func

from twinkle_core.contracts.engine import SPLIT_STEP, Batch, LossFn
from twinkle_core.errors import NotComputed, UnknownOption
from twinkle_core.mesh import DeviceMesh
from twinkle_core.names import closest
from twinkle_core.ops.gather import Ranks
from twinkle_core.patches.heads import NO_POOLING, pooling_of
from twinkle_core.train import optim
from twinkle_core.train.loop_engine import LoopEngine, Window, evaluating
from twinkle_core.train.session import Session
from twinkle_core.types import InputFeature, ModelOutput
from twinkle_megatron import checkpoint
from twinkle_megatron.cpu.runtime import computes
from twinkle_megatron.draws import Draws
from twinkle_megatron.inputs import Laid, lay, planned, size_of
from twinkle_megatron.load import Built
from twinkle_megatron.logps import Tempered, Vocabulary, for_all, for_vocabulary, gather_sequence
from twinkle_megatron.optim import MegatronDistributedOptimizer
from twinkle_megatron.parallel import Layout

#: what this engine can be asked for
COMPUTED = frozenset({"logits", "logps", "entropies", "predictions", "hidden", "embeddings"})
TASKS = ("causal_lm", "embedding")


class MegatronEngine(LoopEngine):
    """Core's engine with Megatron inside.

    Gradients are sums in Megatron's buffers until a window closes: then they are reduced once, over data and context ranks, and
    divided by the window's weight, as Megatron does with ``num_tokens``.

    Args:
        built: the chunks of this rank.
        layout, mesh, device: where it computes.
        on_nonfinite: see LoopEngine; fp16 always skips.
        facts: for ``describe``.
    """

    collective = True
    user: Any = None  # holds Megatron's groups as long as the engine lives
    draws: Draws  # what dropout is drawn from

    def __init__(
        self,
        built: Built,
        *,
        layout: Layout,
        mesh: DeviceMesh,
        device: torch.device,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        module = built.chunks[0] if len(built.chunks) == 1 else torch.nn.ModuleList(built.chunks)
        super().__init__(module, mesh=mesh, device=device, on_nonfinite="skip" if built.config.fp16 else on_nonfinite)
        self.built, self.chunks, self.config, self.layout = built, built.chunks, built.config, layout
        self.capabilities = frozenset({SPLIT_STEP}) if layout.pp == 1 else frozenset()
        self._facts = dict(facts or {})
        self._ddps: dict[int, list[Any]] = {}  # parameter -> the buffers that hold its gradient
        self._owners: weakref.WeakValueDictionary[int, MegatronDistributedOptimizer] = weakref.WeakValueDictionary()
        self._vocabulary = self._output_layer() if self.is_last_stage else None

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank's last chunk gives hidden states to the output layer."""
        return bool(self.chunks[-1].post_process)

    def _output_layer(self) -> Vocabulary:
        last = self.chunks[-1]
        group = parallel_state.get_tensor_model_parallel_group() if self.layout.tp > 1 else None

        def weight() -> Any:
            tied = last.share_embeddings_and_output_weights
            return last.shared_embedding_or_output_weight() if tied else last.output_layer.weight

        return Vocabulary(weight, self.built.vocabulary, group)

    # ------------------------------------------------------------------------------------------------ computing

    def prepare(
        self,
        session: Session,
        rows: Sequence[InputFeature] | InputFeature,
        *,
        micro_batch_size: int | None = None,
        loss_args: Mapping[str, Any] | None = None,
    ) -> list[Batch]:
        """See ``Engine.prepare``; ids beyond the vocabulary and rows that can't be laid out are refused on the CPU."""
        session, rows = planned(session, rows, self.built.vocabulary, self.layout)
        return super().prepare(session, rows, micro_batch_size=micro_batch_size, loss_args=loss_args)

    def most(self, count: int) -> int:
        """Interleaved chunks take micro-batches by the number of stages: what lacks is filled up with rows without labels."""
        most = super().most(count)
        return -(-most // self.layout.pp) * self.layout.pp if self.layout.vpp > 1 else most

    def _check(self, needs: frozenset[str], task: str) -> None:
        if task not in TASKS:
            raise UnknownOption("task", task, closest(str(task), TASKS), TASKS)
        if unknown := sorted(needs - COMPUTED):
            raise NotComputed("MegatronModel", unknown[0], "it is a language model, with logits and what is made of them")
        if "embeddings" in needs and pooling_of(self.module) is None:
            raise NotComputed("MegatronModel", "embeddings", NO_POOLING)

    @computes
    def run_schedule(
        self,
        batches: Sequence[Batch],
        needs: frozenset[str],
        loss_fn: LossFn,
        *,
        train: bool = True,
        sync: bool = True,
        temperature: float = 1.0,
        task: str = "causal_lm",
    ) -> None:
        """Megatron's schedule. Without training, all stages get the outputs of the last one, and call ``loss_fn`` with them."""
        self._check(needs, task)
        seen: list[ModelOutput] = []
        size = None
        if self.layout.vpp > 1:  # interleaved chunks exchange tensors of one shape
            sizes = [size_of(batch.inputs, self.layout) for batch in batches]
            size = (max(rows for rows, _ in sizes), max(length for _, length in sizes))

        def step(rows: Iterator[Batch], chunk: Any) -> Any:
            batch = next(rows)
            laid = lay(batch.inputs, self.layout, self.device, size)

            def loss(result: torch.Tensor) -> Any:
                output = self._outputs(batch, laid, result, needs, temperature)
                value = loss_fn(batch, output)
                if not train and self.layout.pp > 1:
                    seen.append(output)
                # the schedule frees what it sends on, so the loss must be no view of anything
                return value.sum * 1.0, torch.ones((), dtype=torch.int, device=self.device), {}

            return self._states(chunk, laid), loss

        self.config.grad_scale_func = self._grad_scale() if train else None
        with self.mode(train), self.draws.active():
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=[iter(batches) for _ in self.chunks] if len(self.chunks) > 1 else iter(batches),
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=len(batches),
                seq_length=size[1] if size else 1,  # without a size, shapes travel with the tensors (variable_seq_lengths)
                micro_batch_size=size[0] if size else 1,
                forward_only=not train,
            )
        if not train and self.layout.pp > 1:
            self._share_outputs(batches, seen, loss_fn)

    def _share_outputs(self, batches: Sequence[Batch], outputs: list[ModelOutput], loss_fn: LossFn) -> None:
        group = parallel_state.get_pipeline_model_parallel_group()
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        plain = [{k: v.cpu() for k, v in output.items() if isinstance(v, torch.Tensor) and k != "hidden"} for output in outputs]
        found: list[Any] = [plain if self.is_last_stage else None]
        dist.broadcast_object_list(found, src=source, group=group)
        if self.is_last_stage:
            return
        for batch, output in zip(batches, found[0], strict=True):
            loss_fn(batch, ModelOutput({k: v.to(self.device) for k, v in output.items()}))

    def _grad_scale(self) -> Any:
        """What multiplies a loss before its backward: the scaler of whoever owns the parameters that take part."""
        owner = next((self._owners.get(id(p)) for p in self.module.parameters() if p.requires_grad), None)
        return owner.inner.scale_loss if owner is not None and self.config.fp16 else None

    def _states(self, chunk: Any, laid: Laid) -> torch.Tensor:
        """What a chunk gives: hidden states for the next one, or for the output layer."""
        places = laid.positions
        if self.config.position_embedding_type == "mrope":  # of text, its three kinds are the same
            places = places.expand(3, *places.shape)
        return chunk(  # type: ignore[no-any-return]
            input_ids=laid.ids, position_ids=places, attention_mask=None, packed_seq_params=laid.packed
        )

    def _outputs(
        self, batch: Batch, laid: Laid, hidden: torch.Tensor, needs: frozenset[str], temperature: float
    ) -> ModelOutput:
        """What ``needs`` names, of whole rows, from ``[B, T / (context and sequence ranks), D]``."""
        assert self._vocabulary is not None
        group = parallel_state.get_context_parallel_group() if self.layout.cp > 1 else None
        output = ModelOutput()

        def whole(x: torch.Tensor) -> torch.Tensor:
            return laid.back(gather_sequence(x, group))

        states, hidden = hidden, for_vocabulary(hidden, self.layout)
        if "logits" in needs:
            output["logits"] = whole(self._vocabulary(hidden, temperature))
        if needs & {"logps", "entropies", "predictions"}:
            labels = laid.mine(laid.out(batch.inputs["labels"]))
            found = self._vocabulary.token_logps(
                hidden, labels, temperature, entropies="entropies" in needs, predictions="predictions" in needs
            )
            output |= {k: whole(v) for k, v in found.items() if k in needs}
        if needs & {"hidden", "embeddings"}:
            states = whole(for_all(states, self.layout))
        if "hidden" in needs:
            output["hidden"], output["output_layer"] = states, Tempered(self._vocabulary, temperature, self.layout.cp)
        if "embeddings" in needs:
            head = pooling_of(self.module)
            assert head is not None
            output["embeddings"] = head(states, batch.inputs)
        return output

    @computes
    def forward(
        self, batch: Batch, needs: frozenset[str], *, train: bool, temperature: float = 1.0, task: str = "causal_lm"
    ) -> ModelOutput:
        self._check(needs, task)
        laid = lay(batch.inputs, self.layout, self.device)
        with self.mode(train), self.draws.active():
            return self._outputs(batch, laid, self._states(self.chunks[0], laid), needs, temperature)

    @computes
    def backward(self, loss_sum: torch.Tensor, *, sync: bool = True) -> None:
        scale = self._grad_scale()
        with self.draws.active():
            torch.autograd.backward(loss_sum if scale is None else scale(loss_sum))

    def mode(self, train: bool) -> Any:
        return contextlib.nullcontext() if train else evaluating(self.module)

    # ------------------------------------------------------------------------------------------------ optimizing

    @computes
    def make_optimizer(
        self, cls: Any, parameters: Mapping[str, torch.nn.Parameter], kwargs: Mapping[str, Any]
    ) -> torch.optim.Optimizer:
        """One set of buffers and one optimizer for these parameters; buffers of an optimizer before are used again."""
        optimizer = optim.build(cls, parameters, kwargs)
        assert isinstance(optimizer, MegatronDistributedOptimizer)
        optimizer.wrap(self._buffers(parameters, optimizer.distributed), self.config.params_dtype)
        scale = float(optimizer.inner.get_loss_scale()) if self.config.fp16 else 1.0
        for parameter in parameters.values():
            self._owners[id(parameter)] = optimizer
            if parameter.grad is not None:  # of an open window that began before there was an optimizer
                self.set_gradient(parameter, parameter.grad * scale)
                parameter.grad = None
        self.adopt_optimizer(optimizer)
        return optimizer

    def _buffers(self, parameters: Mapping[str, torch.nn.Parameter], distributed: bool) -> list[Any]:
        """Buffers for what is trainable now, those that are there if they hold just that: a parameter has one ``main_grad``."""
        found = [self._ddps.get(id(p)) for p in parameters.values()]
        first = found[0]
        held = {id(p) for ddp in first or () for p in ddp.params_with_grad}
        same = first is not None and all(ddps is first for ddps in found) and held == {id(p) for p in parameters.values()}
        if first is not None and same and first[0].ddp_config.use_distributed_optimizer == distributed:
            return first
        ddps = []
        for chunk in self.chunks:
            config = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
            ddps.append(DistributedDataParallel(self.config, config, chunk))
        self._ddps.update((id(p), ddps) for p in parameters.values())
        return ddps

    def forget(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Drop the buffers of an adapter that is gone."""
        for parameter in parameters.values():
            self._ddps.pop(id(parameter), None)
            self._owners.pop(id(parameter), None)

    def gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        if id(parameter) in self._owners:
            return parameter.main_grad  # type: ignore[attr-defined,no-any-return]
        return parameter.grad

    def set_gradient(self, parameter: torch.nn.Parameter, value: torch.Tensor | None) -> None:
        if id(parameter) not in self._owners:
            parameter.grad = value
        elif value is None:
            parameter.main_grad.zero_()  # type: ignore[attr-defined]
        else:
            parameter.main_grad.copy_(value)  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def _alone(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Only this optimizer's parameters are trainable: Megatron reduces again what it finds trainable, whosever it is."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        flags = [(p, p.requires_grad) for p in self.module.parameters()]
        try:
            for p, _ in flags:
                p.requires_grad_(id(p) in own)
            yield
        finally:
            for p, flag in flags:
                p.requires_grad_(flag)

    @computes
    def finish_grads(self, optimizer: Any, scale: torch.Tensor | float) -> bool:
        with self._alone(optimizer):
            finalize_model_grads(optimizer.ddps, None)
        for ddp in optimizer.ddps:
            ddp.scale_gradients(float(scale))
        overflow = bool(optimizer.inner.prepare_grads())
        norm = float(optimizer.inner.get_grad_norm())
        finite = not overflow and math.isfinite(norm)
        self._windows[optimizer] = Window(torch.tensor(norm, dtype=torch.float64), finite)
        return finite

    @computes
    def clip(self, optimizer: Any, max_norm: float, norm_type: float) -> torch.Tensor:
        parts = [part for part in optimizer.inner.chained_optimizers if part.get_parameters()]
        window = self._windows[optimizer]
        norm = float(window.norm) if norm_type == 2 else self._norm(optimizer, norm_type)
        if norm > max_norm:
            for part in parts:
                clip_grad_by_total_norm_fp32(part.get_parameters(), max_norm=max_norm, total_norm=norm)
        return torch.tensor(norm, dtype=torch.float64)

    @staticmethod
    def _norm(optimizer: Any, norm_type: float) -> float:
        norms = [
            float(
                get_grad_norm_fp32(
                    part.get_main_grads_for_grad_norm(),
                    norm_type=norm_type,
                    grad_stats_parallel_group=part.get_grad_stats_parallel_group(),
                )
            )
            for part in optimizer.inner.chained_optimizers
        ]
        return max(norms) if math.isinf(norm_type) else sum(n**norm_type for n in norms) ** (1 / norm_type)

    @computes
    def update(self, optimizer: Any) -> bool:
        window = self._windows.get(optimizer)
        if window is not None and not window.finite:
            return False
        return bool(optimizer.step())

    @computes
    def zero_grad(self, optimizer: Any) -> None:
        optimizer.zero_grad()
        self._windows.pop(optimizer, None)

    def optimizer_state(
        self, optimizer: Any, parameters: Mapping[str, torch.nn.Parameter]
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        return {}, checkpoint.describe(optimizer)

    def prepare_optimizer_state(
        self,
        optimizer: Any,
        parameters: Mapping[str, torch.nn.Parameter],
        tensors: Mapping[str, torch.Tensor],
        data: Mapping[str, Any],
        folder: Path,
    ) -> dict[str, Any]:
        state = checkpoint.prepare(optimizer, self._slot(optimizer), data, folder)
        return {**state, "read": computes(state["read"])}

    @computes
    def write_shards(self, optimizer: Any, folder: Path) -> None:
        checkpoint.write(optimizer, self._slot(optimizer), folder)

    def _slot(self, optimizer: Any) -> str | None:
        """The slot of the adapter whose optimizer it is, by which its parameters are called."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        names = (name for chunk in self.chunks for name, p in chunk.named_parameters() if id(p) in own)
        _, mark, rest = next(names, "").partition(".lora_")
        return rest.split(".")[1] if mark else None

    def reload(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Weights have been set from outside: the optimizer's fp32 copies follow."""
        for optimizer in {id(o): o for p in parameters.values() if (o := self._owners.get(id(p))) is not None}.values():
            optimizer.inner.reload_model_params()

    def state_dict(self) -> dict[str, Any]:
        """The random states of all ranks, on each of them."""
        told = self.gather_objects(self.draws.state_dict(), "world")
        return {f"random/{rank}/{name}": state for rank, states in enumerate(told) for name, state in states.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        mark = f"random/{self.mesh.rank}/"
        self.draws.load_state_dict({k.removeprefix(mark): v for k, v in state.items() if k.startswith(mark)})

    # ------------------------------------------------------------------------------------------------ ranks

    def all_reduce(self, x: torch.Tensor, over: str = "dp") -> torch.Tensor:
        if self.mesh.world_size > 1:
            dist.all_reduce(x := x.clone(), group=self._group(over))
        return x

    def gather_objects(self, obj: Any, over: str = "dp") -> list[Any]:
        """Of a pipeline, what the last stage has: metrics are there."""
        group = self._group(over)
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, obj, group=group)
        if over == "dp" and self.layout.pp > 1:
            told = [found]
            source = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast_object_list(told, src=source, group=parallel_state.get_pipeline_model_parallel_group())
            found = told[0]
        return found

    def _group(self, over: str) -> Any:
        return dist.group.WORLD if over == "world" else parallel_state.get_data_parallel_group()

    def ranks(self, over: str = "dp") -> Any:
        return Ranks(self._group(over)) if self.mesh.sizes["dp"] > 1 else None

    def from_last_stage(self, x: torch.Tensor) -> torch.Tensor:
        if self.layout.pp > 1:
            source = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(x := x.clone(), src=source, group=parallel_state.get_pipeline_model_parallel_group())
        return x

    def describe(self) -> dict[str, Any]:
        return {"model": type(self.chunks[0]).__name__, "device": str(self.device), **self._facts}
