"""PPO with a value head, and the model itself as the sampler: it learns to add by trying, without groups of completions.

Each step asks some sums, rewards right answers at their last token, and takes what came better than the value head had
expected as the advantage of each token. One loss trains policy and value head. The model must be right now and then, or there
is nothing to make more likely.

python cookbook/ppo_loop.py [--model ms://… | hf://… | FOLDER] [--steps N] [--seed N] [--output FOLDER]
"""

import argparse
import random
import re

import torch
from peft import LoraConfig

import twinkle
from twinkle.advantage import gae
from twinkle.model import TransformersModel
from twinkle.template import Template

SUMS = [(a, b) for a in range(4) for b in range(4)]
COMPLETIONS = 64  # of a step
UPDATES = 3  # of a step, on the same completions


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
    parser.add_argument("--output", default="output/ppo_loop")
    args = parser.parse_args()

    twinkle.initialize(seed=args.seed)
    draw = random.Random(args.seed)
    sampling = torch.Generator().manual_seed(args.seed)  # of its own: dropout and the like draw from the global one

    template = Template(model_id=args.model)
    model = TransformersModel(model_id=args.model, mixed_precision="no")
    model.apply_patch("value_head")  # before the adapter, which gets a head of its own
    model.add_adapter_to_model("default", LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    model.set_template(template)
    model.set_optimizer("adamw", lr=args.lr, weight_decay=0.0)
    model.set_loss("ppo", clip_low=0.2, value_coef=0.5)
    model.add_metric("grpo", is_training=True)
    for step in range(1, args.steps + 1):
        sums = [draw.choice(SUMS) for _ in range(COMPLETIONS)]
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
        scores = [reward(text, a, b) for text, (a, b) in zip(texts, sums, strict=True)]

        before = model.forward_only(inputs=rows, return_logits=False)  # logps and values [B, T], padded on the right
        mask, rewards = torch.zeros_like(before.logps, dtype=torch.bool), torch.zeros_like(before.logps)
        for number, (row, score) in enumerate(zip(rows, scores, strict=True)):
            mask[number, : row["length"]] = torch.tensor(row["labels"]) != -100
            rewards[number, mask[number].nonzero()[-1]] = score
        advantages, returns = gae(rewards, before["values"], mask, gamma=1.0, lam=0.95)
        mean, deviation = advantages[mask].mean(), advantages[mask].std()
        advantages = (advantages - mean) / (deviation + 1e-6)  # loss arguments count where there are labels alone
        for _ in range(UPDATES):
            model.forward_backward(
                inputs=rows, advantages=advantages, returns=returns, old_logps=before.logps, old_values=before["values"]
            )
            model.clip_grad_and_step(max_grad_norm=1.0)
        numbers = model.calculate_metric(is_training=True)
        print(
            f"step {step}/{args.steps}  reward {sum(scores) / len(scores):.3f}  "
            f"value loss {numbers['value_loss']:.3f}  entropy {numbers['entropy']:.3f}  ratio {numbers['ratio']:.3f}"
        )

    print("saved", model.save("last", args.output))


if __name__ == "__main__":
    main()
