"""Which distribution provides which first-party name (L0). Generated: python tools/generate_known.py

So a name whose distribution is not installed is answered with what to install.
"""

from __future__ import annotations

#: twinkle's own distributions: their names can't be taken over by others
FIRST_PARTY = (
    "twinkle-core",
    "twinkle-dsml",
    "twinkle-megatron",
    "twinkle-multilora",
    "twinkle-ray",
    "twinkle-transformers",
)

#: (kind, name) -> (class, distribution, first version that has it)
KNOWN = {
    ("loss", "chunked_cross_entropy"): ("ChunkedCrossEntropyLoss", "twinkle-core", "0.1.0"),
    ("loss", "cross_entropy"): ("CrossEntropyLoss", "twinkle-core", "0.1.0"),
    ("loss", "mse"): ("MSELoss", "twinkle-core", "0.1.0"),
    ("metric", "accuracy"): ("AccuracyMetric", "twinkle-core", "0.1.0"),
    ("metric", "loss"): ("LossMetric", "twinkle-core", "0.1.0"),
    ("metric", "train"): ("TrainMetric", "twinkle-core", "0.1.0"),
    ("model", "megatron"): ("MegatronModel", "twinkle-megatron", "0.1.0"),
    ("model", "multi_lora_megatron"): ("MultiLoraMegatronModel", "twinkle-multilora", "0.1.0"),
    ("model", "multi_lora_transformers"): ("MultiLoraTransformersModel", "twinkle-multilora", "0.1.0"),
    ("model", "transformers"): ("TransformersModel", "twinkle-transformers", "0.1.0"),
    ("optimizer", "adadelta"): ("Adadelta", "twinkle-core", "0.1.0"),
    ("optimizer", "adafactor"): ("Adafactor", "twinkle-core", "0.1.0"),
    ("optimizer", "adagrad"): ("Adagrad", "twinkle-core", "0.1.0"),
    ("optimizer", "adam"): ("Adam", "twinkle-core", "0.1.0"),
    ("optimizer", "adamax"): ("Adamax", "twinkle-core", "0.1.0"),
    ("optimizer", "adamw"): ("AdamW", "twinkle-core", "0.1.0"),
    ("optimizer", "asgd"): ("ASGD", "twinkle-core", "0.1.0"),
    ("optimizer", "nadam"): ("NAdam", "twinkle-core", "0.1.0"),
    ("optimizer", "radam"): ("RAdam", "twinkle-core", "0.1.0"),
    ("optimizer", "rmsprop"): ("RMSprop", "twinkle-core", "0.1.0"),
    ("optimizer", "rprop"): ("Rprop", "twinkle-core", "0.1.0"),
    ("optimizer", "sgd"): ("SGD", "twinkle-core", "0.1.0"),
    ("preprocessor", "alpaca"): ("AlpacaProcessor", "twinkle-core", "0.1.0"),
    ("preprocessor", "messages"): ("MessagesProcessor", "twinkle-core", "0.1.0"),
    ("preprocessor", "self_cognition"): ("SelfCognitionProcessor", "twinkle-core", "0.1.0"),
    ("preprocessor", "sharegpt"): ("ShareGPTProcessor", "twinkle-core", "0.1.0"),
    ("processor", "input"): ("InputProcessor", "twinkle-core", "0.1.0"),
    ("runtime", "local"): ("LocalRuntime", "twinkle-core", "0.1.0"),
    ("runtime", "ray"): ("RayRuntime", "twinkle-ray", "0.1.0"),
    ("scheduler", "constant"): ("Constant", "twinkle-core", "0.1.0"),
    ("scheduler", "constant_lr"): ("ConstantLR", "twinkle-core", "0.1.0"),
    ("scheduler", "cosine_annealing_lr"): ("CosineAnnealingLR", "twinkle-core", "0.1.0"),
    ("scheduler", "cosine_annealing_warm_restarts"): ("CosineAnnealingWarmRestarts", "twinkle-core", "0.1.0"),
    ("scheduler", "cosine_warmup"): ("CosineWarmup", "twinkle-core", "0.1.0"),
    ("scheduler", "cyclic_lr"): ("CyclicLR", "twinkle-core", "0.1.0"),
    ("scheduler", "exponential_lr"): ("ExponentialLR", "twinkle-core", "0.1.0"),
    ("scheduler", "lambda_lr"): ("LambdaLR", "twinkle-core", "0.1.0"),
    ("scheduler", "linear_lr"): ("LinearLR", "twinkle-core", "0.1.0"),
    ("scheduler", "linear_warmup"): ("LinearWarmup", "twinkle-core", "0.1.0"),
    ("scheduler", "multi_step_lr"): ("MultiStepLR", "twinkle-core", "0.1.0"),
    ("scheduler", "multiplicative_lr"): ("MultiplicativeLR", "twinkle-core", "0.1.0"),
    ("scheduler", "one_cycle_lr"): ("OneCycleLR", "twinkle-core", "0.1.0"),
    ("scheduler", "polynomial_lr"): ("PolynomialLR", "twinkle-core", "0.1.0"),
    ("scheduler", "step_lr"): ("StepLR", "twinkle-core", "0.1.0"),
    ("template", "chat"): ("ChatTemplate", "twinkle-core", "0.1.0"),
    ("template", "deepseek_v3_2"): ("DeepseekV32Template", "twinkle-dsml", "0.1.0"),
    ("template", "deepseek_v4"): ("DeepseekV4Template", "twinkle-dsml", "0.1.0"),
    ("template", "dsml"): ("DSMLTemplate", "twinkle-dsml", "0.1.0"),
}
