"""MultiLoraTransformersModel keeps the contract of models, with tenants as its adapters."""

from twinkle_multilora.compliance import MultiLoraSuite


class TestMultiLoraTransformersModel(MultiLoraSuite):
    pass
