"""An objective of your own: a preset, and what you change in it. Every factor is a name, or a name with arguments.

`temper presets dapo` shows a preset's factors, `temper presets --compare dapo gspo` what differs,
and docs/objectives.md all there are.
"""

import temper

TINY = {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "mlp_width": 64, "context": 24}
OBJECTIVES = {
    "dapo": {"preset": "dapo"},
    "mine": {
        "preset": "dapo",
        "gate": {"name": "clip", "low": 0.1, "high": 0.3},
        "regularizers": [{"name": "kl", "coefficient": 0.01}],
    },
}

if __name__ == "__main__":
    for name, objective in OBJECTIVES.items():
        run = temper.train(
            model={"new": TINY},
            data={"generator": "spell_backward", "options": {"min_letters": 1, "max_letters": 2}},
            reward="edit",
            objective=objective,
            name=f"example-objective-{name}",
            steps=10,
            sampling={"max_new_tokens": 4},
            rollout={"groups_per_step": 8, "group_size": 8},
            optim={"learning_rate": 2e-3},
        )
        print(name, run.report().stages[0].reward[-1])
