"""What each metric of a run means, defined once. Owns: names, units, reductions. Refuses: computing them.

"*" stands for the rest of a name. Every metric but those under sys/ is a pure function of data and weights.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    unit: str
    reduction: str
    """What the value is taken over: mask first, then how."""
    meaning: str


SCORED = "mean over scored responses of trained groups"
RESPONSES = "mean over responses of trained groups"
TOKENS = "mean over trained tokens"
GENERATED = "share of generated groups"
COUNT = "count over generated responses"
STEP = "once per step"

METRICS: tuple[Metric, ...] = (
    Metric("reward/mean", "reward", SCORED, "What is optimised. Unscorable responses are left out and counted apart"),
    Metric("reward/std", "reward", "population deviation over scored responses", "Spread of rewards in the batch"),
    Metric("reward/*", "reward", SCORED, "One reward part, before weighting"),
    Metric("adv/mean", "advantage", RESPONSES, "Near 0 with a group baseline"),
    Metric("adv/std", "advantage", "population deviation over responses", "Size of the learning signal"),
    Metric("adv/min", "advantage", "minimum over responses", "Strongest push down"),
    Metric("adv/max", "advantage", "maximum over responses", "Strongest push up"),
    Metric("adv/abs_mean", "advantage", RESPONSES, "Mean size of the learning signal"),
    Metric("adv/frac_zero", "share", RESPONSES, "Responses that teach nothing"),
    Metric(
        "policy/entropy", "nats", TOKENS, "Entropy of the next-token distribution. Falling to 0: no exploration left"
    ),
    Metric(
        "policy/ratio_mean", "ratio", TOKENS, "New over proximal probability; exactly 1 in a single on-policy update"
    ),
    Metric("policy/ratio_max", "ratio", "maximum over trained tokens", "Largest growth of a token's probability"),
    Metric("policy/ratio_min", "ratio", "minimum over trained tokens", "Largest fall of a token's probability"),
    Metric("policy/clip_frac_high", "share", TOKENS, "Advantage above 0 and ratio above the upper bound: no gradient"),
    Metric("policy/clip_frac_low", "share", TOKENS, "Advantage below 0 and ratio under the lower bound: no gradient"),
    Metric("policy/dual_clip_frac", "share", TOKENS, "Advantage below 0 and ratio above the dual bound: no gradient"),
    Metric("policy/gate_mask_frac", "share", TOKENS, "Gradient set to zero by another gate"),
    Metric("policy/kl_old_k1", "nats", TOKENS, "log proximal - log policy; may be negative"),
    Metric("policy/kl_old_k3", "nats", TOKENS, "r - 1 - log r against the proximal policy; never negative"),
    Metric("policy/kl_ref_k1", "nats", TOKENS, "log policy - log reference; may be negative"),
    Metric("policy/kl_ref_k3", "nats", TOKENS, "Distance from the reference model; never negative"),
    Metric(
        "policy/kl_ref_sequence", "nats", "sum over a response's tokens, mean over responses", "Adaptive KL looks here"
    ),
    Metric("policy/reference_moved", "flag", STEP, "1 when the reference model followed the policy after this step"),
    Metric("policy/trust_kl", "nats", TOKENS, "KL(old || new) of the constrained step that was taken"),
    Metric(
        "policy/trust_*", "", STEP, "The constrained step: what it gained, how often it was shortened, whether taken"
    ),
    Metric("critic/explained_var", "share", "over trained tokens", "1 - Var(R - V)/Var(R): 1 is perfect, 0 a constant"),
    Metric("critic/*", "", TOKENS, "The value model: its predictions, its bound, its gradient"),
    Metric("judge/*", "verdicts", "count since the start", "What a judge said: values, unscorable, errors"),
    Metric("control/*", "", STEP, "What a controller remembers, e.g. the factor on a coefficient"),
    Metric("policy/grad_norm", "norm", "L2 over all parameters, mean over updates", "Gradient before clipping"),
    Metric("policy/update_norm_ratio", "ratio", STEP, "Norm of the change of the weights over norm of the weights"),
    Metric("policy/learning_rate", "rate", STEP, "Of the last update"),
    Metric(
        "loss/policy",
        "loss",
        "weighted sum over trained tokens",
        "The policy term; its size says little, only its slope",
    ),
    Metric("loss/*", "loss", "weighted sum over trained tokens", "One more term of the loss, with its coefficient"),
    Metric("mismatch/logp_abs_mean", "nats", TOKENS, "Size of trainer minus sampler log-probability. 0 in exact mode"),
    Metric("mismatch/logp_abs_max", "nats", "maximum over trained tokens", "Worst token"),
    Metric("mismatch/kl_k1", "nats", TOKENS, "log sampler - log trainer; estimates the divergence, may be negative"),
    Metric("mismatch/kl_k3", "nats", TOKENS, "Never negative. Above 0.01 (dense, bf16) something is wrong"),
    Metric("mismatch/ess", "share", TOKENS, "Effective share of samples under the correction weights"),
    Metric("mismatch/*", "", TOKENS, "Agreement of sampler and trainer, and what corrections did about it"),
    Metric("gen/len_mean", "tokens", RESPONSES, "Length of responses; drawn tokens only"),
    Metric("gen/len_max", "tokens", "maximum over responses", "Longest response"),
    Metric("gen/truncation_rate", "share", RESPONSES, "Cut at the length limit"),
    Metric("gen/eos_rate", "share", RESPONSES, "Ended by the model itself"),
    Metric("gen/turns_mean", "turns", RESPONSES, "Turns of an episode"),
    Metric("gen/tool_calls_mean", "calls", RESPONSES, "Tool calls of an episode"),
    Metric("gen/tool_error_rate", "share", "over tool calls", "The tool ran and failed"),
    Metric("gen/tool_timeout_rate", "share", "over tool calls", "The tool did not answer in time"),
    Metric("gen/bad_call_rate", "calls", RESPONSES, "No such tool, or arguments that do not fit"),
    Metric("gen/permission_denied", "acts", RESPONSES, "Asked for and refused"),
    Metric("gen/side_effect_rate", "acts", RESPONSES, "Something outside the conversation changed"),
    Metric("gen/cost_per_success", "cost", "sum of costs over solved episodes", "What a solved task costs"),
    Metric("gen/*", "", RESPONSES, "A property of the responses"),
    Metric("data/degenerate", "share", GENERATED, "All rewards equal: no learning signal"),
    Metric("data/all_pass", "share", GENERATED, "Every response has the top score: too easy"),
    Metric("data/all_fail", "share", GENERATED, "Every response has the bottom score: too hard"),
    Metric("data/group_std_mean", "reward", "mean over generated groups", "Unbiased deviation of rewards in a group"),
    Metric("data/effective_groups", "groups", "count", "Groups that were trained"),
    Metric("data/gen_factor", "ratio", STEP, "Groups generated per group trained"),
    Metric("data/unscorable", "responses", COUNT, "No score: nothing to judge by, or the verifier failed"),
    Metric("data/env_error", "responses", COUNT, "The environment or a tool failed, timed out or was aborted"),
    Metric("data/trained_trajectories", "responses", STEP, "Responses with a gradient"),
    Metric("data/examples", "examples", STEP, "Supervised examples of the step"),
    Metric("data/tokens", "tokens", "count over updates", "Trained tokens"),
    Metric("stale/mean", "versions", "mean over trained responses", "Age of the weights that drew the oldest token"),
    Metric("stale/max", "versions", "maximum over trained responses", "Never above the staleness bound"),
    Metric("stale/mixed_version_frac", "share", "mean over trained responses", "Drawn by more than one version"),
    Metric("sys/rollout_tok_s", "tokens/s", STEP, "Drawn tokens over the time of the rollout phase"),
    Metric("sys/train_tok_s", "tokens/s", STEP, "Tokens of trained rows, prompt included, over the time of training"),
    Metric("sys/rollout_tokens", "tokens", STEP, "Drawn tokens, dropped groups included"),
    Metric("sys/train_tokens", "tokens", STEP, "Tokens of trained rows, prompt included"),
    Metric("sys/peak_memory_bytes", "bytes", "maximum so far", "Device memory, or resident memory on a CPU"),
    Metric("sys/kv_use", "share", STEP, "Blocks of the key-value cache in use"),
    Metric("sys/preemptions", "sequences", STEP, "Sequences that lost their cache and were computed again"),
)


def describe(name: str) -> Metric | None:
    """The definition of a metric: its own, else that of the longest matching pattern, else None."""
    exact = next((metric for metric in METRICS if metric.name == name), None)
    patterns = (metric for metric in METRICS if metric.name.endswith("*") and name.startswith(metric.name[:-1]))
    return exact or max(patterns, key=lambda metric: len(metric.name), default=None)
