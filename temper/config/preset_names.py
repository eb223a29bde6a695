"""Names of all presets, so that a misspelt one is answered without importing torch.

Owns: the names; a test keeps them equal to temper.objectives. Refuses: what they mean.
"""

from __future__ import annotations

from temper.errors import did_you_mean

PRESET_NAMES = (
    # policy gradients
    "reinforce",
    "reinforce_is",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "opo",
    "grpo",
    "grpo_r1",
    "dr_grpo",
    "dapo",
    "maxrl",
    "mgpo",
    "gdpo",
    "lambda_grpo",
    "clip_cov",
    "kl_cov",
    "top_entropy",
    "entropy_advantage",
    "simko",
    "olmorl",
    "scalerl",
    "prorl",
    "deepseek_v32",
    "intellect2",
    "tis",
    "mis",
    "sequence_mis",
    "geo_rs",
    "gspo",
    "gspo_token",
    "cispo",
    "sapo",
    "dppo_tv",
    "dppo_kl",
    "dppo_topk",
    "prime_rl",
    "gmpo",
    "vespo",
    "rspo",
    "rgpo",
    "ppo",
    "vapo",
    "vineppo",
    "trpo",
    "decoupled_ppo",
    "a3po",
    "opd",
    # given texts
    "sft",
    # preferences
    "dpo",
    "cdpo",
    "robust",
    "ipo",
    "hinge",
    "length_normalized",
    "rpo",
    "dpo_shift",
    "beta_dpo",
    "simpo",
    "cpo",
    "power",
    "orpo",
    "kto",
    "xpo",
    "online_dpo",
    "nash_md",
    # reward models
    "reward_model",
    "process_reward_model",
    # distillation
    "gkd",
    "off_policy_distillation",
    "opd_direct",
    "opd_top_k",
)

OTHER_NAMES = {"icepop": "mis"}
"""What papers call a preset, where it is not near its name."""


def why_unknown(name: str) -> str:
    """What to say of a name that no preset has, with the nearest one; empty: there is such a preset."""
    if name in PRESET_NAMES:
        return ""
    meant = f' Did you mean "{OTHER_NAMES[name]}"?' if name in OTHER_NAMES else did_you_mean(name, PRESET_NAMES)
    return f'objective "{name}" is unknown.{meant} Run "temper presets" to list all.'
