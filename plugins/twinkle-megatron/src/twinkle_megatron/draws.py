"""Random numbers of training: dropout that is the same where ranks hold copies, and other where they hold parts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from twinkle_megatron.parallel import Layout, seed_ranks

#: under which name the state is kept that tensor ranks share
COPIES = "copies"


class Draws:
    """The states that one model draws from while it trains.

    Megatron keeps states by name for what tensor ranks hold apart. What they hold copies of (an adapter's A, hidden states
    without sequence parallelism) it drops by torch's own state, and takes for granted that it is the same on all of them: under
    ``tp_size`` over 1 that is one of the model's own, since processes that nobody seeded have different ones.

    Made inside of ``torch.random.fork_rng``: it seeds.

    Args:
        seed: shared by all ranks.
    """

    def __init__(self, layout: Layout, seed: int) -> None:
        rows = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        seed_ranks((seed + 1 + 10_007 * parallel_state.get_pipeline_model_parallel_rank() + 1_000_003 * rows) % 2**31)
        self.states: dict[str, torch.Tensor] = dict(get_cuda_rng_tracker().get_states())
        self.copies = torch.cuda.get_rng_state() if layout.tp > 1 else None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, they are drawn from; on leaving, torch's and Megatron's states are what they were."""
        tracker = get_cuda_rng_tracker()
        found, own = dict(tracker.get_states()), torch.cuda.get_rng_state() if self.copies is not None else None
        tracker.set_states(dict(self.states))
        if self.copies is not None:
            torch.cuda.set_rng_state(self.copies)
        try:
            yield
        finally:
            self.states = dict(tracker.get_states())
            tracker.set_states(found)
            if own is not None:
                self.copies = torch.cuda.get_rng_state()
                torch.cuda.set_rng_state(own)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's."""
        return {**self.states, **({} if self.copies is None else {COPIES: self.copies})}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Put back ``state_dict()``; of another layout's, what is here too."""
        for name, value in self.states.items():
            there = state.get(name)
            self.states[name] = there.clone() if there is not None and there.shape == value.shape else value
        there = state.get(COPIES)
        if self.copies is not None and there is not None and there.shape == self.copies.shape:
            self.copies = there.clone()


@contextlib.contextmanager
def drawing_from(layout: Layout, seed: int, device: torch.device) -> Iterator[Draws]:
    """Draws of a seed, which is torch's own state too inside. All states are put back on leaving."""
    found = dict(get_cuda_rng_tracker().get_states())
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
        try:
            yield Draws(layout, seed)
        finally:
            get_cuda_rng_tracker().set_states(found)
