"""What plugin authors test with. Each name is loaded when it is asked for; the suites need ``twinkle-core[testing]``."""

from twinkle_core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "LossSuite": "twinkle_core.testing.suites.loss:LossSuite",
        "MetricSuite": "twinkle_core.testing.suites.metric:MetricSuite",
        "ModelSuite": "twinkle_core.testing.suites.model:ModelSuite",
        "PatchSuite": "twinkle_core.testing.suites.patch:PatchSuite",
        "ProcessorSuite": "twinkle_core.testing.suites.processor:ProcessorSuite",
        "Suite": "twinkle_core.testing.suites.base:Suite",
        "compliance": "twinkle_core.testing.runner:compliance",
        "TemplateSuite": "twinkle_core.testing.suites.template:TemplateSuite",
    },
)
