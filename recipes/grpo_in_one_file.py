"""Reinforcement learning of a language model in one file. Read me first.

A small Llama-style transformer learns to spell random words backwards. First it imitates solved examples (supervised
fine-tuning), and is stopped while most words it has never seen still come out wrong. On this toy more examples would
do the rest; in real life they run out. From there on nobody shows it an answer: it samples its own, a function
marks them right or wrong, and GRPO makes the right ones likelier. The words it is measured on are in neither stage.

    python recipes/grpo_in_one_file.py                                           # two minutes on two CPU cores
    python recipes/grpo_in_one_file.py --sft-steps 2 --rl-steps 1 --heldout 20   # does it run at all?

Only `temper.objectives` is imported from Temper: pure functions that turn rewards and log-probabilities into a loss.
The framework around them (engine, trainer, tasks, checkpoints) does what this file does, but fast, exact and resumable.
"""

from __future__ import annotations

import argparse
import random
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from temper.objectives import Credit, Extent, MetricSums, Objective, Tokens, objective_loss, resolve

# Shapes: B sequences, L positions, V vocabulary.

# ---------------------------------------------------------------------------------------------------------------------
# The task: "    zebra>" must be continued by "arbez.". Prompts are padded with spaces, so all have one length.

LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = LETTERS + " >."
END = VOCABULARY.index(".")
SHORTEST, LONGEST = 6, 10
PROMPT_LENGTH = LONGEST + 1
MAX_NEW_TOKENS = LONGEST + 1  # the longest answer and its end token


def encode(text: str) -> list[int]:
    return [VOCABULARY.index(character) for character in text]


def prompt_of(word: str) -> list[int]:
    return encode(word.rjust(LONGEST) + ">")


def reward(word: str, answer_ids: list[int]) -> float:
    """The verifier: 1 for exactly the reversed word and the end token, else 0. There is no partial credit."""
    return float(answer_ids == encode(word[::-1] + "."))


def draw_words(count: int, rng: random.Random, forbidden: frozenset[str] = frozenset()) -> list[str]:
    words: list[str] = []
    while len(words) < count:
        word = "".join(rng.choices(LETTERS, k=rng.randint(SHORTEST, LONGEST)))
        if word not in forbidden:
            words.append(word)
    return words


# ---------------------------------------------------------------------------------------------------------------------
# The model: a Llama in miniature (RMS norm, rotary positions, SwiGLU), 0.4 million parameters.

WIDTH, HEADS, LAYERS, MLP_WIDTH = 128, 4, 2, 352
Cache = list[tuple[Tensor, Tensor]]


def rotate(x: Tensor, start: int) -> Tensor:
    """Rotary position embedding: turns pairs of channels by an angle that grows with the position."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-torch.arange(half) / half)
    angles = torch.arange(start, start + x.shape[-2])[:, None] * frequencies
    left, right = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * MLP_WIDTH, bias=False)
        self.down = nn.Linear(MLP_WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        batch, length, _ = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        start = past[0].shape[2] if past else 0
        q, k = rotate(q, start), rotate(k, start)
        if past:  # one new token that looks at everything before it
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        gate, value = self.up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value), (k, v)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(VOCABULARY), WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(VOCABULARY), bias=False)

    def forward(self, token_ids: Tensor, past: Cache | None = None) -> tuple[Tensor, Cache]:
        """Logits [B, L, V] and the keys and values that make the next token cheap."""
        x, cache = self.embedding(token_ids), []
        for place, layer in enumerate(self.layers):
            x, keys_values = layer(x, past[place] if past else None)
            cache.append(keys_values)
        return self.head(self.norm(x)), cache


def answer_logprobs(model: Model, sequences: Tensor) -> Tensor:
    """Log-probabilities of everything after the prompt. The logits at one position score the token at the next."""
    logprobs = model(sequences[:, :-1])[0][:, PROMPT_LENGTH - 1 :].log_softmax(-1)
    return logprobs.gather(2, sequences[:, PROMPT_LENGTH:, None]).squeeze(2)


# ---------------------------------------------------------------------------------------------------------------------
# Sampling: the policy writes. We keep the log-probability with which each token was drawn; it cannot be had later,
# because by then the weights have changed.


@torch.no_grad()
def sample(model: Model, prompts: Tensor, copies: int, is_greedy: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """For each prompt `copies` answers: sequences [B, L], log-probabilities and drawn mask [B, MAX_NEW_TOKENS]."""
    logits, cache = model(prompts)  # each prompt is read once, its copies share the cache
    last = logits[:, -1].repeat_interleave(copies, 0)
    cache = [(k.repeat_interleave(copies, 0), v.repeat_interleave(copies, 0)) for k, v in cache]
    is_running = torch.ones(len(last), dtype=torch.bool)
    tokens, logprobs, drawn = [], [], []
    for _ in range(MAX_NEW_TOKENS):
        distribution = last.log_softmax(-1)
        token = distribution.argmax(-1) if is_greedy else torch.multinomial(distribution.exp(), 1).squeeze(1)
        tokens.append(token)
        logprobs.append(distribution.gather(1, token[:, None]).squeeze(1))
        drawn.append(is_running)  # the end token itself was drawn and is trained; what follows it is padding
        is_running = is_running & (token != END)
        logits, cache = model(token[:, None], cache)
        last = logits[:, -1]
    sequences = torch.cat([prompts.repeat_interleave(copies, 0), torch.stack(tokens, 1)], 1)
    return sequences, torch.stack(logprobs, 1), torch.stack(drawn, 1)


def score(words: list[str], sequences: Tensor, drawn: Tensor) -> list[float]:
    """One reward per sequence; `words` repeats each word as often as it was answered."""
    answers = [row[PROMPT_LENGTH:][mask].tolist() for row, mask in zip(sequences, drawn, strict=True)]
    return [reward(word, answer) for word, answer in zip(words, answers, strict=True)]


def accuracy(model: Model, words: list[str], copies: int, is_greedy: bool) -> float:
    sequences, _, drawn = sample(model, torch.tensor([prompt_of(word) for word in words]), copies, is_greedy)
    rewards = score([word for word in words for _ in range(copies)], sequences, drawn)
    return sum(rewards) / len(rewards)


# ---------------------------------------------------------------------------------------------------------------------
# Stage 1, supervised: raise the log-probability of given answers.


def supervised_step(model: Model, optimizer: torch.optim.Optimizer, words: list[str]) -> float:
    texts = [word[::-1] + "." for word in words]
    rows = [prompt_of(word) + encode(text.ljust(MAX_NEW_TOKENS)) for word, text in zip(words, texts, strict=True)]
    # The mask comes from lengths, never from ids: a padding id may also be a real token somewhere else.
    mask = torch.tensor([[float(place < len(text)) for place in range(MAX_NEW_TOKENS)] for text in texts])
    loss = -(answer_logprobs(model, torch.tensor(rows)) * mask).sum() / mask.sum()
    apply(model, optimizer, loss)
    return loss.item()


def apply(model: Model, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


# ---------------------------------------------------------------------------------------------------------------------
# Stage 2, reinforcement: sample groups, compare inside each group, raise what was better than its siblings.

UPDATES = 2  # optimiser steps per batch of samples; from the second on the policy has moved and the clip starts to act


def reinforce_step(
    model: Model, optimizer: torch.optim.Optimizer, objective: Objective, words: list[str], group_size: int
) -> dict[str, float]:
    prompts = torch.tensor([prompt_of(word) for word in words])
    sequences, behavior, drawn = sample(model, prompts, group_size)
    rewards = score([word for word in words for _ in range(group_size)], sequences, drawn)

    # Credit, on the whole batch: GRPO's advantage is (R - mean) / std over the answers to one prompt. A group that is
    # all right or all wrong teaches nothing and gets exactly 0.
    credit = Credit(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group_ids=torch.arange(len(words)).repeat_interleave(group_size),
        lengths=drawn.sum(1),
        is_truncated=(sequences[:, PROMPT_LENGTH:] != END).all(1),
        max_new_tokens=MAX_NEW_TOKENS,
    )
    advantages = objective.advantage(credit).float()  # one number per answer

    # One weight per token, which already holds one over the denominator (GRPO: 1 / (sequences * own length)). Losses
    # below are plain weighted sums, so a batch may be split in any way. Rows with advantage 0 add exactly 0: skip them.
    metrics = MetricSums()
    for part in torch.arange(len(sequences)).chunk(UPDATES):
        extent = Extent(lengths=credit.lengths[part], group_ids=credit.group_ids[part], max_new_tokens=MAX_NEW_TOKENS)
        weights = objective.weighting(extent).float()
        is_useful = advantages[part] != 0
        rows, weights = part[is_useful], weights[is_useful]
        mask, lengths = drawn[rows], credit.lengths[rows]
        tokens = Tokens(  # of the drawn tokens alone: what was not drawn by the policy has no place here
            policy_logprobs=answer_logprobs(model, sequences[rows])[mask],
            proximal_logprobs=behavior[rows][mask],  # where the batch started; the ratio is measured against it
            behavior_logprobs=behavior[rows][mask],
            advantages=advantages[rows].repeat_interleave(lengths),
            weights=weights.repeat_interleave(lengths),
            trajectory_ids=torch.arange(len(lengths)).repeat_interleave(lengths),
            num_trajectories=len(lengths),
            num_batch_tokens=int(lengths.sum()),
            versions=torch.zeros(int(lengths.sum()), dtype=torch.int64),
        )
        loss, sums = objective_loss(objective, tokens)
        apply(model, optimizer, loss)
        metrics = metrics.merge(sums)
    return metrics.finish() | {"reward": sum(rewards) / len(rewards)}


def report(title: str, model: Model, heldout: list[str]) -> tuple[float, float]:
    greedy, sampled = accuracy(model, heldout, 1, is_greedy=True), accuracy(model, heldout, 4, is_greedy=False)
    print(f"{title:<12} held-out words right: greedy {greedy:6.1%}   sampled {sampled:6.1%}", flush=True)
    return greedy, sampled


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO in one file.")
    parser.add_argument("--preset", default="grpo", help="any preset that needs no reference model, e.g. dapo, cispo")
    parser.add_argument("--sft-steps", type=int, default=120)
    parser.add_argument("--rl-steps", type=int, default=60)
    parser.add_argument("--heldout", type=int, default=500, help="number of held-out words")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    heldout = draw_words(options.heldout, rng)
    forbidden = frozenset(heldout)
    model = Model()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {torch.get_num_threads()} threads")

    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    start = time.monotonic()
    for step in range(1, options.sft_steps + 1):
        # Warm up, hold, cool down: the cooling lets the model settle, so that RL does not merely collect the noise.
        optimizer.param_groups[0]["lr"] = 4e-3 * min(1.0, step / 20, (options.sft_steps + 1 - step) / 30)
        loss = supervised_step(model, optimizer, draw_words(64, rng, forbidden))
        if step % 25 == 0:
            print(f"  sft {step:4}   loss {loss:.3f}   {time.monotonic() - start:4.0f} s", flush=True)
    before = report("after SFT", model, heldout)

    objective = resolve(options.preset)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    start = time.monotonic()
    for step in range(1, options.rl_steps + 1):
        optimizer.param_groups[0]["lr"] = 5e-4 * min(1.0, step / 4)
        metrics = reinforce_step(model, optimizer, objective, draw_words(192, rng, forbidden), group_size=8)
        if step % 5 == 0 or step == 1:
            shown = f"{options.preset} {step:4}   reward {metrics['reward']:.3f}"
            print(f"  {shown}   {time.monotonic() - start:4.0f} s", flush=True)
    after = report("after RL", model, heldout)
    gains = [100 * (new - old) for new, old in zip(after, before, strict=True)]
    print(f"gain of RL   greedy {gains[0]:+.1f} points   sampled {gains[1]:+.1f} points")


if __name__ == "__main__":
    main()
