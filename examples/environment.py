"""An environment of your own: a game of hot and cold over several turns.

The policy names a letter; the environment answers "higher" or "lower" until the letter is found. What it says is
shown to the policy and never trained on.
"""

import temper
from temper import EnvOpening, EnvReply, Message, Task

TINY = {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "mlp_width": 64, "context": 96}


class HotAndCold:
    async def start(self, task: Task, seed: int) -> EnvOpening:
        self.secret = task.answer or "m"
        return EnvOpening(messages=task.messages)

    async def step(self, message: Message) -> EnvReply:
        guess = message.content[:1]
        if guess == self.secret:
            return EnvReply(reward=1.0, is_done=True)
        hint = "higher" if guess < self.secret else "lower"
        return EnvReply(messages=(Message(role="user", content=hint),), reward=0.0)

    async def close(self) -> None: ...


if __name__ == "__main__":
    run = temper.train(
        model={"new": TINY},
        data=[{"prompt": "guess", "answer": letter} for letter in "abcdefgh"],
        reward="env",
        env=HotAndCold,
        name="example-environment",
        steps=10,
        sampling={"max_new_tokens": 2},
        rollout={"groups_per_step": 8, "group_size": 8, "max_turns": 3},
        optim={"learning_rate": 3e-3},
    )
    print(run)
