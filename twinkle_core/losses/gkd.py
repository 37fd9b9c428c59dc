"""Generalised knowledge distillation (L2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from twinkle_core.contracts.loss import Loss
from twinkle_core.errors import BadLossArgument, BadLossSetting, MissingArgument
from twinkle_core.losses import settings
from twinkle_core.ops.rows import floats, labelled, per_token_vectors
from twinkle_core.types import InputFeature, LossOutput, ModelOutput

#: positions whose distributions are there at once
CHUNK = 512


class GKDLoss(Loss):
    """Divergence of a student from its teacher, token by token (Agarwal et al. 2024, On-Policy Distillation, eqs. 1 and 2).

    With T the teacher's and S the student's next-token distribution, at each labelled position

        JSD_beta = beta KL(T || M) + (1 - beta) KL(S || M),   M = beta T + (1 - beta) S
        beta = 0:  KL(T || S)        beta = 1:  KL(S || T)

    The ends are the limits of JSD_beta / beta and JSD_beta / (1 - beta), so the loss is not continuous there: near the ends it
    is small, as if by a small learning rate. The sum is over labelled positions, the weight their number; scope ``token``.

    Three ways to the teacher, by the arguments of a call:

    * ``teacher_logits`` ``[B, T, V]``: all of it.
    * the same with ``top_k``: its k likeliest words.
    * ``teacher_topk_ids`` and ``teacher_topk_logps`` ``[B, T, K]``: what a server gives of its K likeliest words.

    In the last two all other words are one bucket (``add_tail``), which has what is left of T and S: both stay
    distributions, and the divergence is at most the full one, and the full one at K = V - 1. Without it both are
    renormalised over the k words.

    Each argument may also be a list with one entry for each row, as long as the row or as its labels are many. Needs logits.

    Args:
        beta: 0 to 1.
        temperature: both logits are divided by it, besides the temperature of the verb, which reaches the student only.
        top_k: of ``teacher_logits``; None: all.
        add_tail: the bucket. Logps of a server at another temperature than 1 have none.
    """

    needs = frozenset({"logits", "labels"})
    scope = "token"
    masked_args = frozenset({"teacher_logits", "teacher_topk_logps"})

    def __init__(self, beta: float = 0.5, temperature: float = 1.0, top_k: int | None = None, add_tail: bool = True) -> None:
        self.beta = settings.number(self, "beta", beta, least=0, most=1)
        self.temperature = settings.number(self, "temperature", temperature, above=0)
        self.top_k = None if top_k is None else settings.count(self, "top_k", top_k)
        self.add_tail = settings.flag(self, "add_tail", add_tail)
        if self.top_k == 1 and not add_tail:
            raise BadLossSetting("GKDLoss", "top_k", 1, "at least 2 without add_tail: one word alone is always certain")

    def __call__(
        self,
        inputs: InputFeature,
        outputs: ModelOutput,
        *,
        teacher_logits: Any = None,
        teacher_topk_ids: Any = None,
        teacher_topk_logps: Any = None,
    ) -> LossOutput:
        """See the class."""
        name, mask = type(self).__name__, labelled(type(self).__name__, inputs)
        student = floats(outputs.logits[mask])
        # what a server gives takes the place of logits
        remote = teacher_topk_ids is not None and teacher_topk_logps is not None
        if not remote and teacher_logits is None:
            raise MissingArgument(name, ["teacher_logits"])
        if remote:
            ids = per_token_vectors(name, "teacher_topk_ids", teacher_topk_ids, inputs).to(student.device).long()
            given = per_token_vectors(name, "teacher_topk_logps", teacher_topk_logps, inputs).to(student)
            self._check_remote(ids, given, student.shape[-1])
        else:
            ids, given = None, per_token_vectors(name, "teacher_logits", teacher_logits, inputs).to(student)
            if given.shape != student.shape:
                why = f"it has {given.shape[-1]} words, and the student {student.shape[-1]}"
                raise BadLossArgument(name, "teacher_logits", why, "the logits of a teacher with the same vocabulary")
        total = student.sum() * 0
        for start in range(0, len(student), CHUNK):
            cut = slice(start, start + CHUNK)
            part = (student[cut], given[cut], None if ids is None else ids[cut])
            total = total + (
                checkpoint(self._divergence, *part, use_reentrant=False) if torch.is_grad_enabled() else self._divergence(*part)
            )
        return LossOutput(total, mask.sum())

    def _check_remote(self, ids: Tensor, logps: Tensor, vocabulary: int) -> None:
        name = type(self).__name__
        if ids.shape != logps.shape:
            why = f"for the labelled tokens it has shape {list(logps.shape)}, and the ids {list(ids.shape)}"
            raise BadLossArgument(name, "teacher_topk_logps", why, "one log-probability for each id")
        if self.add_tail and self.temperature != 1.0:
            why = "at another temperature than 1 what lies outside of them is not known"
            raise BadLossArgument(name, "teacher_topk_logps", why, "add_tail=False, temperature=1.0, or whole teacher_logits")
        if ids.device.type != "cpu" or not ids.numel():
            return  # a look at them would wait for the device
        if (most := float(logps.max())) > 1e-3:
            why = f"it holds {most:g}, and no probability is above 1"
            raise BadLossArgument(name, "teacher_topk_logps", why, "log-probabilities, 0 or less")
        if (logps.exp().sum(-1) > 1.05).any():
            why = "the probabilities of a token's words add up to more than 1"
            raise BadLossArgument(name, "teacher_topk_logps", why, "log-probabilities of different words")
        if not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            why = f"it holds {int(ids.min())} to {int(ids.max())}"
            raise BadLossArgument(name, "teacher_topk_ids", why, f"ids of the student's words, 0 to {vocabulary - 1}")

    def _divergence(self, student: Tensor, given: Tensor, ids: Tensor | None) -> Tensor:
        """Summed over the positions of a chunk."""
        s, t = torch.log_softmax(student / self.temperature, -1), given
        if ids is None:
            t = torch.log_softmax(given / self.temperature, -1)
            if self.top_k is not None and self.top_k < t.shape[-1]:
                t, ids = t.topk(self.top_k, -1)
        elif self.temperature != 1.0:
            t = t / self.temperature
        if ids is not None:
            s = s.gather(-1, ids)
            s, t = (_with_tail(x) if self.add_tail else torch.log_softmax(x, -1) for x in (s, t))
        if self.beta == 0:
            return _kl(t, s)
        if self.beta == 1:
            return _kl(s, t)
        weights = torch.tensor([self.beta, 1 - self.beta], dtype=s.dtype, device=s.device).log()
        m = torch.logsumexp(torch.stack([t + weights[0], s + weights[1]]), 0)
        return self.beta * _kl(t, m) + (1 - self.beta) * _kl(s, m)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of log-probabilities, summed: 0 log 0 is 0."""
    least = torch.finfo(p.dtype).min / 4  # a word that is masked out has -inf, and 0 * inf is NaN
    p, q = p.clamp(min=least), q.clamp(min=least)
    return (p.exp() * (p - q)).sum()


def _with_tail(logps: Tensor) -> Tensor:
    """Log-probabilities of some words, and of all others together, as a distribution."""
    total = torch.logsumexp(logps, -1, keepdim=True).clamp(max=-torch.finfo(logps.dtype).eps)
    return torch.cat([logps, torch.log(-torch.expm1(total))], -1)
