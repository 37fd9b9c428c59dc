"""GRPO with the model itself as the sampler: it learns to add by trying, and no server is needed.

Each step asks some sums several times over, rewards the right answers, and makes what was better than its group's mean more
likely. A model that is never right would learn nothing: there must be something to make more likely.

python cookbook/grpo_loop.py [--model ms://… | hf://… | FOLDER] [--steps N] [--seed N] [--output FOLDER]
"""

import argparse
import random
import re

import torch
from peft import LoraConfig

import twinkle
from twinkle.advantage import grpo_advantages
from twinkle.model import TransformersModel
from twinkle.template import Template

SUMS = [(a, b) for a in range(4) for b in range(4)]
QUESTIONS, GROUP = 8, 8  # of a step, and completions of each
UPDATES = 2  # of a step, on the same completions: from the second on the ratio to the policy that sampled is not 1


def asked(a: int, b: int) -> dict:
    """A conversation that waits for an answer."""
    return {"messages": [{"role": "user", "content": f"{a}+{b}="}]}


def reward(text: str, a: int, b: int) -> float:
    """1 where the last number of the text is the sum."""
    return float(re.findall(r"\d+", text)[-1:] == [str(a + b)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="hf://HuggingFaceTB/SmolLM2-135M-Instruct", help="ms://…, hf://… or a folder")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--output", default="output/grpo_loop")
    args = parser.parse_args()

    twinkle.initialize(seed=args.seed)
    draw = random.Random(args.seed)
    sampling = torch.Generator().manual_seed(args.seed)  # of its own: dropout and the like draw from the global one

    template = Template(model_id=args.model)
    model = TransformersModel(model_id=args.model, mixed_precision="no")
    model.add_adapter_to_model("default", LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    model.set_template(template)
    model.set_optimizer("adamw", lr=args.lr, weight_decay=0.0)
    model.set_loss("grpo", clip_low=0.2, clip_high=0.28)
    model.add_metric("grpo", is_training=True)
    for step in range(1, args.steps + 1):
        sums = [pair for pair in draw.sample(SUMS, QUESTIONS) for _ in range(GROUP)]
        rows = model.generate(
            [asked(a, b) for a, b in sums],
            return_rows=True,  # prompt and completion, with labels on the completion alone
            generator=sampling,
            max_new_tokens=16,
            do_sample=True,  # from the policy itself: no temperature, nothing cut off
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
        texts = [template.decode(row["labels"], skip_special_tokens=True) for row in rows]
        rewards = [reward(text, a, b) for text, (a, b) in zip(texts, sums, strict=True)]
        advantages = grpo_advantages(rewards, GROUP)
        old_logps = model.forward_only(inputs=rows, return_logits=False).logps
        for _ in range(UPDATES):
            model.forward_backward(inputs=rows, advantages=advantages, old_logps=old_logps)
            model.clip_grad_and_step(max_grad_norm=1.0)
        numbers = model.calculate_metric(is_training=True)
        mean = sum(rewards) / len(rewards)
        print(f"step {step}/{args.steps}  reward {mean:.3f}  entropy {numbers['entropy']:.3f}  ratio {numbers['ratio']:.3f}")

    print("saved", model.save("last", args.output))
    greedy = model.generate([asked(a, b) for a, b in SUMS], max_new_tokens=16, do_sample=False)
    right = sum(reward(text, a, b) for text, (a, b) in zip(greedy, SUMS, strict=True))
    print(f"likeliest answers: {right:.0f} of {len(SUMS)} are right")


if __name__ == "__main__":
    main()
