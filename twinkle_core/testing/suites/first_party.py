"""Suites of twinkle's own components that take more than building (L2). Named in the metadata, as third parties do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ChainedScheduler, ReduceLROnPlateau

from twinkle_core.contracts.metric import StepResult
from twinkle_core.losses.bnpo import BNPOLoss
from twinkle_core.losses.cispo import CISPOLoss
from twinkle_core.losses.cpo import CPOLoss
from twinkle_core.losses.dpo import DPOLoss
from twinkle_core.losses.dr_grpo import DrGRPOLoss
from twinkle_core.losses.gkd import GKDLoss
from twinkle_core.losses.grpo import GRPOLoss
from twinkle_core.losses.gspo import GSPOLoss
from twinkle_core.losses.infonce import InfoNCELoss
from twinkle_core.losses.orpo import ORPOLoss
from twinkle_core.losses.ppo import PPOLoss
from twinkle_core.losses.sapo import SAPOLoss
from twinkle_core.losses.simpo import SimPOLoss
from twinkle_core.metrics.dpo import DPOMetric
from twinkle_core.metrics.embedding import EmbeddingMetric
from twinkle_core.metrics.grpo import GRPOMetric
from twinkle_core.metrics.throughput import ThroughputMetric
from twinkle_core.metrics.train import TrainMetric
from twinkle_core.patches.embedding import EmbeddingPatch
from twinkle_core.patches.value_head import ValueHeadPatch
from twinkle_core.processors.input import InputProcessor
from twinkle_core.templates.vision import VisionTemplate
from twinkle_core.testing.suites.loss import LossSuite
from twinkle_core.testing.suites.metric import MetricSuite
from twinkle_core.testing.suites.outputs import outputs_of, tiny_lm
from twinkle_core.testing.suites.patch import PatchSuite, TinyModel
from twinkle_core.testing.suites.processor import ProcessorSuite
from twinkle_core.testing.suites.simple import SchedulerSuite
from twinkle_core.testing.suites.template import TemplateSuite
from twinkle_core.testing.toys import contrast_rows, logps_like, random_rows
from twinkle_core.testing.vision import picture, vision_processor
from twinkle_core.types import InputFeature, ModelOutput


class TrainMetricSuite(MetricSuite):
    """Speeds depend on the clock."""

    component = TrainMetric
    by_the_clock = frozenset({"tokens_per_second", "seconds_per_step"})


class PlateauSuite(SchedulerSuite):
    """A name of torch's that ``set_lr_scheduler`` knows in order to say why it can't be used."""

    component = ReduceLROnPlateau
    expected_failures = {"test_follows_an_optimizer": "its step() needs a number that is measured"}


class ChainedSuite(SchedulerSuite):
    """One that ``set_lr_scheduler`` takes as an object alone."""

    component = ChainedScheduler
    expected_failures = {"test_follows_an_optimizer": "its first parameter is a list of schedulers, which know the optimizer"}


class InputProcessorSuite(ProcessorSuite):
    """Padded on either side, to a multiple, with the padding id of a real token, and packed."""

    component = InputProcessor

    @pytest.fixture(
        params=[{}, {"padding_side": "left"}, {"pad_to_multiple_of": 8, "pad_id": 3}, {"padding_free": True}],
        ids=["right", "left", "multiple", "packed"],
    )
    def processor(self, request: pytest.FixtureRequest) -> Any:
        """The processor to check."""
        return self.build(**request.param)


class _PairRows(LossSuite):
    """Three pairs, whose answers differ in length."""

    @pytest.fixture
    def rows(self) -> Sequence[InputFeature]:
        """Encoded rows."""
        return random_rows([5, 3, 7, 2, 4, 6])


class SimPOSuite(_PairRows):
    """Pairs."""

    component = SimPOLoss


class CPOSuite(_PairRows):
    """Pairs."""

    component = CPOLoss


class ORPOSuite(_PairRows):
    """Pairs."""

    component = ORPOLoss


class DPOSuite(_PairRows):
    """Pairs, and logps of a reference for each row's labels."""

    component = DPOLoss

    @pytest.fixture
    def loss_args(self, rows: Sequence[InputFeature]) -> Mapping[str, Any]:
        """A reference."""
        return {"ref_logps": logps_like(rows, seed=1)}


class PolicySuite(LossSuite):
    """Completions with advantages of both signs, logps of the policy that sampled them and of a reference."""

    @pytest.fixture
    def loss_args(self, rows: Sequence[InputFeature]) -> Mapping[str, Any]:
        """What a sampler and a reward gave."""
        return {
            "advantages": [1.0, -0.5, 0.25, -1.5, 0.75, 0.5],
            "old_logps": logps_like(rows, seed=1),
            "ref_logps": logps_like(rows, seed=2),
        }


class GRPOSuite(PolicySuite):
    """With a KL term."""

    component = GRPOLoss
    arguments = {"beta": 0.1}


class BNPOSuite(PolicySuite):
    """With a KL term."""

    component = BNPOLoss
    arguments = {"beta": 0.1}


class DrGRPOSuite(PolicySuite):
    """With a KL term."""

    component = DrGRPOLoss
    arguments = {"beta": 0.1}


class GSPOSuite(PolicySuite):
    """Clipped where other losses clip, so that rows lie on both sides of the bounds."""

    component = GSPOLoss
    arguments = {"clip_low": 0.2, "clip_high": 0.2}


class SAPOSuite(PolicySuite):
    """Smooth."""

    component = SAPOLoss


class CISPOSuite(PolicySuite):
    """The weight has no gradient."""

    component = CISPOLoss
    expected_failures = {"test_gradients_are_those_of_the_formula": "the formula stops the gradient of the importance weight"}


class PPOSuite(PolicySuite):
    """With returns and old values."""

    component = PPOLoss

    @pytest.fixture
    def loss_args(self, rows: Sequence[InputFeature]) -> Mapping[str, Any]:
        """What a sampler, a reward and a value head gave."""
        return {
            "advantages": [1.0, -0.5, 0.25, -1.5, 0.75, 0.5],
            "old_logps": logps_like(rows, seed=1),
            "returns": logps_like(rows, seed=2),
            "old_values": logps_like(rows, seed=3),
        }


class DPOMetricSuite(MetricSuite):
    """On the rewards that a loss over pairs gives."""

    component = DPOMetric
    group = 2

    @pytest.fixture
    def rows(self) -> Sequence[InputFeature]:
        """Four pairs."""
        return random_rows([5, 3, 7, 2, 4, 6, 3, 5])

    @pytest.fixture
    def outputs(self) -> Any:
        """A loss without a reference."""
        loss = DPOLoss(reference_free=True)

        def made(inputs: InputFeature) -> ModelOutput:
            result = loss(inputs, outputs_of(tiny_lm(), inputs, loss.needs))
            return ModelOutput(loss=result.sum.detach(), num_items=result.weight, loss_metrics=result.metrics)

        return made


class GRPOMetricSuite(MetricSuite):
    """On the numbers that a policy loss gives, and entropies."""

    component = GRPOMetric

    @pytest.fixture
    def outputs(self) -> Any:
        """A loss whose advantage and reference are the same for all tokens."""
        loss = GRPOLoss(clip_low=0.1)

        def made(inputs: InputFeature) -> ModelOutput:
            output = outputs_of(tiny_lm(), inputs, {"logps", "entropies"})
            same = torch.full_like(output.logps, -2.4)
            result = loss(inputs, output, advantages=same, old_logps=same, ref_logps=same)
            output.loss, output.num_items = result.sum.detach(), result.weight
            output["loss_metrics"] = result.metrics
            return output

        return made


class EmbeddingMetricSuite(MetricSuite):
    """Groups of an anchor, its positive and a negative."""

    component = EmbeddingMetric
    group = 3

    @pytest.fixture
    def rows(self) -> Sequence[InputFeature]:
        """Four groups."""
        return contrast_rows([3, 3, 3, 3])


class ThroughputMetricSuite(MetricSuite):
    """Speeds depend on the clock, which starts when a window closes."""

    component = ThroughputMetric
    arguments = {"parameters": 1e6, "peak_flops": 1e9}
    by_the_clock = frozenset({"tokens_per_second", "tokens_per_second_per_device", "mfu"})

    @pytest.fixture
    def metric(self) -> Any:
        """One whose clock runs."""
        metric = self.build()
        metric.on_step(StepResult(acted=True, cur_step=1, grad_norm=None, lr=0.0, weight=1.0))
        return metric


class InfoNCESuite(LossSuite):
    """Groups of different sizes."""

    component = InfoNCELoss
    arguments = {"temperature": 0.5}

    @pytest.fixture
    def rows(self) -> Sequence[InputFeature]:
        """Four groups."""
        return contrast_rows([2, 4, 3, 2])


class GKDSuite(LossSuite):
    """A teacher's logits, or the words it finds likeliest, for each token."""

    component = GKDLoss

    @pytest.fixture
    def loss_args(self, rows: Sequence[InputFeature]) -> Mapping[str, Any]:
        """Logits of a teacher, one list a row."""
        generator = torch.Generator().manual_seed(3)
        return {"teacher_logits": [torch.randn(len(r["input_ids"]), 11, generator=generator).tolist() for r in rows]}


class EmbeddingPatchSuite(PatchSuite):
    """A pooling head changes nothing that is computed without it."""

    component = EmbeddingPatch


class ValueHeadPatchSuite(PatchSuite):
    """On a model that has none."""

    component = ValueHeadPatch
    arguments = {"hidden_size": 8}

    @pytest.fixture
    def model(self) -> Any:
        """The suite's tiny model, without the value head that it brings."""
        model = TinyModel()
        del model.module.value_head
        return model


class VisionTemplateSuite(TemplateSuite):
    """With a small processor; conversations of texts, as of any template, and one with images."""

    component = VisionTemplate

    def build(self, **options: Any) -> Any:
        return super().build(**{"model_id": vision_processor("qwen2_5_vl"), **options})

    def test_images_are_tokens_that_are_not_trained(self) -> None:
        """As many tokens as the pixels make, none of them with a label."""
        template = self.build()
        parts = [{"type": "image", "image": picture(60, 40)}, {"type": "text", "text": "What is it?"}]
        talk = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "A picture."}]}
        row = template.encode(talk)
        made, seen = int(row["image_grid_thw"].prod()) // 4, row["mm_token_type_ids"].count(1)
        assert made == seen == 2 and len(row["pixel_values"]) == 4 * made
        assert template.decode(row["labels"]) == "A picture.<|im_end|>"
