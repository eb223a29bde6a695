"""A reward of your own: a function of what was asked, what was answered and the gold answer.

From Python:  temper.train(..., reward=close_in_length)
In a recipe:  [[reward]]
              kind = "examples/reward.py:close_in_length"
None means that an answer cannot be scored; an exception is an error of that episode. Neither is ever trained on as a 0.
"""

import temper

WORDS = ["cat", "horse", "bird", "whale", "ant", "tiger"]
TINY = {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "mlp_width": 64, "context": 24}


def close_in_length(prompt: str, response: str, answer: str | None) -> float | None:
    """1 for a response as long as the word that was asked about, less for each letter more or less."""
    return max(0.0, 1.0 - abs(len(response) - len(prompt)) / len(prompt)) if prompt else None


if __name__ == "__main__":
    run = temper.train(
        model={"new": TINY},
        data=[{"prompt": word, "answer": ""} for word in WORDS],
        reward=close_in_length,
        name="example-reward",
        steps=20,
        sampling={"max_new_tokens": 12},
        rollout={"groups_per_step": 6, "group_size": 16},
        optim={"learning_rate": 3e-3},
    )
    print(run)
