from twinkle_core.testing.runner import compliance as compliance
from twinkle_core.testing.suites.base import Suite as Suite
from twinkle_core.testing.suites.loss import LossSuite as LossSuite
from twinkle_core.testing.suites.metric import MetricSuite as MetricSuite
from twinkle_core.testing.suites.model import ModelSuite as ModelSuite
from twinkle_core.testing.suites.patch import PatchSuite as PatchSuite
from twinkle_core.testing.suites.processor import ProcessorSuite as ProcessorSuite
from twinkle_core.testing.suites.template import TemplateSuite as TemplateSuite
