"""How a Megatron model computes: its schedule over micro-batches; losses and windows are core's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from twinkle_core.contracts.engine import SPLIT_STEP, Batch, LossFn
from twinkle_core.errors import NotComputed, UnknownOption
from twinkle_core.mesh import DeviceMesh
from twinkle_core.names import closest
from twinkle_core.ops.gather import Ranks
from twinkle_core.patches.heads import NO_POOLING, pooling_of
from twinkle_core.train.loop_engine import evaluating
from twinkle_core.train.normalise import as_scalar
from twinkle_core.train.session import Session
from twinkle_core.types import InputFeature, ModelOutput
from twinkle_megatron.buffers import BufferEngine
from twinkle_megatron.cpu.runtime import computes
from twinkle_megatron.draws import COPIES, Draws
from twinkle_megatron.inputs import Laid, lay, planned, size_of
from twinkle_megatron.load import Built
from twinkle_megatron.logps import Tempered, Vocabulary, for_all, for_vocabulary, gather_sequence
from twinkle_megatron.parallel import GROUPS, Layout

#: what this engine can be asked for
COMPUTED = frozenset({"logits", "logps", "entropies", "predictions", "hidden", "embeddings"})
TASKS = ("causal_lm", "embedding")


class MegatronEngine(BufferEngine):
    """Core's engine with Megatron inside. Its gradients and optimizers are ``BufferEngine``'s.

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
        super().__init__(built, mesh, device, on_nonfinite)
        self.layout = layout
        self.in_step = mesh.world_size > 1
        self.capabilities = frozenset({SPLIT_STEP}) if layout.pp == 1 else frozenset()
        self._facts = dict(facts or {})
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

    def most(self, count: int, given: int) -> int:
        """Interleaved chunks take micro-batches by the number of stages: what lacks is filled up with rows without labels."""
        most = super().most(count, given)
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
                value = (
                    loss_fn(batch, output).sum * 1.0
                )  # the schedule frees what it sends on, so it must be no view of anything
                if not train and self.layout.pp > 1:
                    seen.append(output)
                return value, torch.ones((), dtype=torch.int, device=self.device), {}

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

    def gather_numbers(self, numbers: Sequence[float | torch.Tensor]) -> list[list[float]]:
        mine = torch.stack([as_scalar(number, "cpu") for number in numbers])
        everyone = [torch.empty_like(mine) for _ in range(self.mesh.world_size)]
        dist.all_gather(everyone, mine, group=GROUPS.hosts)
        return [each.tolist() for each in everyone]

    def _group(self, over: str) -> Any:
        return dist.group.WORLD if over == "world" else parallel_state.get_data_parallel_group()

    def ranks(self, over: str = "dp") -> Any:
        return Ranks(self._group(over)) if self.mesh.sizes["dp"] > 1 else None

    def from_last_stage(self, x: torch.Tensor) -> torch.Tensor:
        if self.layout.pp > 1:
            source = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(x := x.clone(), src=source, group=parallel_state.get_pipeline_model_parallel_group())
        return x

    def state_dict(self) -> dict[str, Any]:
        """The random states of all ranks, on each of them."""
        told = self.gather_objects(self.draws.state_dict(), "world")
        return {f"random/{rank}/{name}": state for rank, states in enumerate(told) for name, state in states.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        mark, first = f"random/{self.mesh.rank}/", f"random/{self.mesh.ranks('tp')[0]}/{COPIES}"
        mine = {k.removeprefix(mark): v for k, v in state.items() if k.startswith(mark)}
        mine.pop(COPIES, None)  # one for all that hold copies of one another now; under another layout theirs may have differed
        self.draws.load_state_dict({**mine, **({COPIES: state[first]} if first in state else {})})

    def describe(self) -> dict[str, Any]:
        return {"model": type(self.chunks[0]).__name__, "device": str(self.device), **self._facts}
