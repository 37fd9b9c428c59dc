from twinkle_core.ops.advantages import gae as gae
from twinkle_core.ops.advantages import grpo_advantages as grpo_advantages
from twinkle_core.ops.advantages import rloo_advantages as rloo_advantages
