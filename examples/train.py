"""Train a checkpoint on rows of your own, with imitation first and practice afterwards.

python examples/train.py [CHECKPOINT]: any Hugging Face directory; without one, a tiny model is made.
"""

import random
import sys

import temper

TINY = {"new": {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "mlp_width": 192, "context": 32}}


def sums(seed: int, count: int) -> list[dict[str, str]]:
    draw = random.Random(seed)
    pairs = [(draw.randint(0, 9), draw.randint(0, 9)) for _ in range(count)]
    return [{"prompt": f"{first}+{second}=", "answer": str(first + second)} for first, second in pairs]


if __name__ == "__main__":
    run = temper.train(
        model=sys.argv[1] if len(sys.argv) > 1 else TINY,
        data=sums(seed=1, count=60),
        heldout=sums(seed=2, count=30),
        reward="exact",
        name="example-train",
        sampling={"max_new_tokens": 4},
        stage=[
            {"kind": "sft", "steps": 40, "optim": {"learning_rate": 3e-3}, "trainer": {"examples_per_step": 32}},
            {"kind": "rl", "steps": 10, "optim": {"learning_rate": 5e-4}, "alarms": {"readiness": "note"}},
        ],
    )
    print(run)
    print("best checkpoint:", run.best)
