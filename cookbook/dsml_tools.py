"""DeepSeek V4 learns to call a tool: its own format in, a call of the right form out.

A DeepSeek V4 of two tiny layers with random weights and a small tokenizer stand in for the real thing, so that this runs in
well under a minute on a CPU. With a checkpoint, give its name as ``--model``; everything else stays as it is.

python cookbook/dsml_tools.py [--model ms://… | hf://… | FOLDER] [--steps N]
"""

import argparse
import json
import tempfile

import torch

import twinkle
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset
from twinkle.model import TransformersModel
from twinkle.template import DSMLTemplate
from twinkle_dsml.testing import write_tiny_v4

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="ms://…, hf://… or a folder; without it a tiny random one is made")
parser.add_argument("--steps", type=int, default=40)
args = parser.parse_args()
if args.model is None:
    torch.set_num_threads(1)  # more only wait for one another, at this size
MODEL = args.model or write_tiny_v4(tempfile.mkdtemp(prefix="tiny-v4-"))

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": CITY}}]


def conversation(city):
    """A question, and the call that answers it."""
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": json.dumps({"city": city})}}
    answer = {"role": "assistant", "content": "", "reasoning_content": "Ask the tool.", "tool_calls": [call]}
    return {"messages": [{"role": "user", "content": f"Weather in {city}?"}, answer], "tools": TOOLS}


twinkle.initialize(seed=42)
template = DSMLTemplate(MODEL, reasoning_effort="low")
dataset = Dataset([conversation(city) for city in ("Bern", "Oslo")])
dataset.set_template(template)
dataset.encode()
dataloader = DataLoader(dataset, batch_size=2)

model = TransformersModel(model_id=MODEL, mixed_precision="no")
model.set_optimizer("adamw", lr=5e-3)
for step in range(args.steps):
    for batch in dataloader:
        loss = model.forward_backward(inputs=batch)
        model.clip_grad_and_step(max_grad_norm=1.0)
    if step % 10 == 0 or step == args.steps - 1:
        print(f"step {step}: loss {loss:.4f}")

question = {"messages": conversation("Oslo")["messages"][:1], "tools": TOOLS}
model.set_template(template)
(text,) = model.generate([question], max_new_tokens=100, do_sample=False)
print(text)
for call in template.parse(text)["tool_calls"]:  # whatever was written; parse(…, strict=True) says what is wrong with it
    print("call:", call["function"]["name"], call["function"]["arguments"])
