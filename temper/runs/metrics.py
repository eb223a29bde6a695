"""What each metric of a run means, defined once. Owns: names, units, masks, reductions. Refuses: computing them.

"*" stands for the rest of a name. Every metric but those under sys/, flow/ and judge/ is a pure function of data and
weights, and no split into microbatches, ranks or order of arrival changes it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    unit: str
    mask: str
    """What is counted."""
    reduction: str
    """How it becomes one number."""
    meaning: str


TOKENS = "trained tokens"
"""Tokens drawn by the policy, of responses that are trained; before rejection rules."""
TRAINED = "trained responses"
CREDITED = "scored responses of trained groups"
CREDITED_TOKENS = "tokens of scored responses of trained groups"
SCORED = "scored responses"
"""Those of all groups this step rolled, dropped ones too, so that filtering does not flatter; also the next three."""
RESPONSES = "responses with tokens"
GENERATED = "generated groups"
EPISODES = "all responses"
CALLS = "tool calls"
UPDATES = "updates of the step"
STEP = "the step"
PAIRS = "pairs of the step"
LABELLED = "labelled steps of the batch"
CASES = "labelled cases that were answered"

MEAN, SHARE, COUNT, MIN, MAX, STD = "mean", "share", "count", "minimum", "maximum", "population deviation"
P95 = "value at rank ceil(0.95 n)"
P99 = "value at rank ceil(0.99 n), to 0.5%, within exp(-5) and exp(5)"
TEN = "ten shares, /00 to /09"
ONCE = "once"

# fmt: off
SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Reward": (
        Metric("reward/mean", "reward", SCORED, MEAN,
               "What is optimised. Unscorable responses are left out and counted apart"),
        Metric("reward/std", "reward", SCORED, STD, "Spread of rewards in the batch"),
        Metric("reward/shaped_mean", "reward", CREDITED, MEAN, "After the objective's shaping; only where it shapes"),
        Metric("reward/*", "reward", SCORED, MEAN,
               "One part of the reward; with _weighted, what it added to the whole"),
    ),
    "Reward models": (
        Metric("loss/reward_model", "nats", PAIRS, MEAN, "What a reward model minimises; 0.693 says nothing"),
        Metric("loss/process_reward", "nats", LABELLED, MEAN, "The same for steps"),
        Metric("reward_model/accuracy", "share", PAIRS, MEAN, "The chosen side scores higher; equal scores are half"),
        Metric("reward_model/margin", "score", PAIRS, MEAN, "Chosen minus rejected"),
        Metric("reward_model/score", "score", "sides of pairs", MEAN, "Drifts unless centred"),
        Metric("reward_model/score_min", "score", "sides of pairs", MIN, "Lowest score"),
        Metric("reward_model/score_max", "score", "sides of pairs", MAX, "Highest score"),
        Metric("reward_model/calibration_error", "share", "predictions", "sum over ten bins of share x distance",
               "How far sigmoid of a margin, or of a step's score, is from how often it comes true"),
        Metric("calibration/*", "share", "predictions of one bin", MEAN, "The bins it is made of"),
        Metric("process_reward/accuracy", "share", LABELLED, MEAN, "A step's score has the sign of its label"),
        Metric("process_reward/good_share", "share", LABELLED, MEAN, "Labels that say good"),
        Metric("process_reward/score", "share", LABELLED, MEAN, "Probability of good, by the model"),
    ),
    "Advantage": (
        Metric("adv/mean", "advantage", CREDITED, MEAN, "Near 0 with a group baseline"),
        Metric("adv/std", "advantage", CREDITED, STD, "Size of the learning signal"),
        Metric("adv/min", "advantage", CREDITED, MIN, "Strongest push down"),
        Metric("adv/max", "advantage", CREDITED, MAX, "Strongest push up"),
        Metric("adv/abs_mean", "advantage", CREDITED, MEAN, "Mean size of the learning signal"),
        Metric("adv/frac_zero", "share", CREDITED, SHARE, "Responses that teach nothing"),
        Metric("adv/token_mean", "advantage", CREDITED_TOKENS, MEAN,
               "As above over tokens: long responses count more"),
        Metric("adv/token_std", "advantage", CREDITED_TOKENS, STD, "As above over tokens"),
        Metric("adv/token_min", "advantage", CREDITED_TOKENS, MIN, "As above over tokens"),
        Metric("adv/token_max", "advantage", CREDITED_TOKENS, MAX, "As above over tokens"),
        Metric("adv/token_abs_mean", "advantage", CREDITED_TOKENS, MEAN, "As above over tokens"),
        Metric("adv/token_frac_zero", "share", CREDITED_TOKENS, SHARE, "As above over tokens"),
    ),
    "Policy": (
        Metric("policy/entropy", "nats", TOKENS, MEAN,
               "Entropy of the next-token distribution over the whole vocabulary. Falling to 0: no exploration left"),
        Metric("policy/ratio_mean", "ratio", TOKENS, MEAN,
               "New over proximal probability; exactly 1 in a single on-policy update"),
        Metric("policy/ratio_max", "ratio", TOKENS, MAX, "Largest growth of a token's probability"),
        Metric("policy/ratio_min", "ratio", TOKENS, MIN, "Largest fall of a token's probability"),
        Metric("policy/ratio_p99", "ratio", TOKENS, P99, "How far the tail has moved, without its last outlier"),
        Metric("policy/clip_frac_high", "share", TOKENS, SHARE,
               "Advantage above 0 and ratio above the upper bound: no gradient"),
        Metric("policy/clip_frac_low", "share", TOKENS, SHARE,
               "Advantage below 0 and ratio under the lower bound: no gradient"),
        Metric("policy/dual_clip_frac", "share", TOKENS, SHARE,
               "Advantage below 0 and ratio above the dual bound: no gradient"),
        Metric("policy/gate_mask_frac", "share", TOKENS, SHARE, "Bounded by the gate, whichever way"),
        Metric("epochs/clip_frac/*", "share", TOKENS, SHARE,
               "clip_frac_high and _low together, in one of several epochs over the batch (trainer.epochs)"),
        Metric("epochs/kl_old_k3/*", "nats", TOKENS, MEAN, "kl_old_k3 in one of several epochs over the batch"),
        Metric("policy/kl_old_k1", "nats", TOKENS, MEAN, "log proximal - log policy; may be negative"),
        Metric("policy/kl_old_k3", "nats", TOKENS, MEAN, "r - 1 - log r against the proximal policy; never negative"),
        Metric("policy/kl_ref_k1", "nats", TOKENS, MEAN,
               "log policy - log reference, over the whole vocabulary; may be negative"),
        Metric("policy/kl_ref_k3", "nats", TOKENS, MEAN, "Distance from the reference model; never negative"),
        Metric("policy/kl_ref_sequence", "nats", TRAINED, MEAN,
               "Sum of kl_ref_k1 over a response; adaptive KL looks here"),
        Metric("policy/reference_moved", "flag", STEP, ONCE,
               "1 when the reference model followed the policy after this step"),
        Metric("policy/trust_kl", "nats", TOKENS, MEAN, "KL(old || new) of the constrained step that was taken"),
        Metric("policy/trust_*", "", STEP, ONCE,
               "The constrained step: its gain, how often it was shortened, whether it was taken"),
        Metric("policy/grad_norm", "norm", UPDATES, MEAN, "L2 norm over all parameters before clipping"),
        Metric("policy/grad_norm_clipped", "norm", UPDATES, MEAN,
               "L2 norm after clipping; never above optim.max_grad_norm"),
        Metric("policy/update_norm_ratio", "ratio", UPDATES, MEAN,
               "Norm of the change of the master weights over their norm"),
        Metric("policy/loss_scale", "factor", UPDATES, MEAN, "float16 alone: what the loss was multiplied by"),
        Metric("policy/skipped_updates", "share", UPDATES, SHARE,
               "float16 alone: updates left out because the gradient overflowed; the scale of the loss is then halved"),
        Metric("policy/learning_rate", "rate", STEP, ONCE, "Of the last update; 0 while the critic is trained alone"),
        Metric("critic/explained_var", "share", TOKENS, ONCE, "1 - Var(R - V)/Var(R): 1 is perfect, 0 a constant"),
        Metric("critic/*", "", TOKENS, MEAN, "The value model: its predictions, its bound, its gradient"),
        Metric("control/*", "", STEP, ONCE, "What a controller remembers, e.g. the factor on a coefficient"),
        Metric("judge/*", "verdicts", "since the start", COUNT,
               "What a judge said: values, unscorable, errors; heldout/ stands before parts of the held-out verifier"),
        Metric("judge/agreement/*", "share", CASES, SHARE,
               "Verdicts that equal the label. Measured at every evaluation, for judges with a labelled set"),
        Metric("judge/kappa/*", "kappa", CASES, "(p_o - p_e) / (1 - p_e)",
               "Cohen's kappa with the labels: 1 is perfect, 0 chance"),
        Metric("judge/kappa_low/*", "kappa", CASES, "95% interval", "Its lower end, by Wilson"),
        Metric("judge/kappa_high/*", "kappa", CASES, "95% interval", "Its upper end"),
        Metric("judge/kappa_fall/*", "kappa", CASES, "95% interval",
               "Lower end of kappa at the start minus kappa now. Above 0 the judge has changed"),
        Metric("judge/kappa_fall", "kappa", CASES, MAX, "The same of the judge that fell furthest"),
        Metric("judge/labelled_errors/*", "cases", "labelled cases", COUNT,
               "The judge failed; left out of the agreement, never counted as disagreement"),
        Metric("loss/policy", "loss", TOKENS, "weighted sum", "The policy term; its size says little, only its slope"),
        Metric("loss/*", "loss", TOKENS, "weighted sum", "One more term of the loss, with its coefficient"),
    ),
    "Sampler against trainer": (
        Metric("mismatch/logp_abs_mean", "nats", TOKENS, MEAN,
               "Size of trainer minus sampler log-probability. 0 in exact mode"),
        Metric("mismatch/logp_abs_max", "nats", TOKENS, MAX, "Worst token. Above 5 something is wrong"),
        Metric("mismatch/kl_k1", "nats", TOKENS, MEAN,
               "log sampler - log trainer; estimates the divergence, may be negative"),
        Metric("mismatch/kl_k3", "nats", TOKENS, MEAN,
               "Never negative. Above 0.01 (dense, bf16) or 0.05 (experts) something is wrong"),
        Metric("mismatch/chi2_token", "", TOKENS, MEAN,
               "rho^2 - 1, rho trainer over sampler: variance of an uncorrected weight"),
        Metric("mismatch/ppl_train", "perplexity", TRAINED, MEAN,
               "exp of minus the response's mean log-probability, by the trainer"),
        Metric("mismatch/ppl_rollout", "perplexity", TRAINED, MEAN, "The same by the sampler"),
        Metric("mismatch/log_ppl_diff", "nats", TRAINED, MEAN, "Mean over a response of log sampler - log trainer"),
        Metric("mismatch/corr", "", TOKENS, "Pearson correlation",
               "Of both probabilities. Below 0.99 something is wrong"),
        Metric("mismatch/ess", "share", TOKENS, "(mean W)^2 / mean W^2",
               "Effective share of tokens under the correction weights W"),
        Metric("mismatch/weight_mean", "weight", TOKENS, MEAN, "Mean correction weight"),
        Metric("mismatch/clip_frac", "share", TOKENS, SHARE, "A correction changed the weight and kept the token"),
        Metric("mismatch/reject_frac_token", "share", TOKENS, SHARE, "Rejected: weight 0"),
        Metric("mismatch/reject_frac_seq", "share", TRAINED, SHARE, "Rejected as a whole"),
        Metric("mismatch/veto_frac", "share", TOKENS, SHARE, "In responses that the veto dropped"),
        Metric("route/moved_frac", "share", "experts of trained tokens", SHARE,
               "Experts that the sampler took and the trainer's routers would not choose. With model.replay_routes"),
        Metric("route/moved_by_updates", "share", "experts of trained tokens", "last update less first",
               "Of route/moved_frac what updates of a batch did: negative is noise. With several updates per batch"),
        Metric("route/recorded_frac", "share", TOKENS, SHARE,
               "Tokens whose routes the sampler told; the others take their routers' choice. With model.replay_routes"),
        Metric("route/load_max", "factor", TOKENS, "mean over layers",
               "Tokens of the most chosen expert over the mean of all experts: 1 is even"),
        Metric("route/entropy", "nats", TOKENS, "mean over tokens and layers", "Entropy of the routers' probabilities"),
        Metric("route/shift", "nats", TOKENS, "mean over tokens, layers and experts",
               "How far routers moved from what they thought of the experts that they chose when the batch started: "
               "|log q - log q_old|. With objectives that weigh tokens by it (rspo)"),
        Metric("mismatch/*", "share", TOKENS, SHARE, "Tokens that the correction of this name acted on"),
    ),
    "Generation": (
        Metric("gen/len_mean", "tokens", RESPONSES, MEAN, "Length of responses; drawn tokens only"),
        Metric("gen/len_max", "tokens", RESPONSES, MAX, "Longest response"),
        Metric("gen/len_p95", "tokens", RESPONSES, P95, "Length of the long ones"),
        Metric("gen/len_correct", "tokens", "responses scored 1 or more", MEAN, "Length of what was right"),
        Metric("gen/len_wrong", "tokens", "responses scored under 1", MEAN,
               "Length of what was not; growing alone, the model rambles"),
        Metric("gen/truncation_rate", "share", RESPONSES, SHARE, "Cut at the length limit"),
        Metric("gen/interrupt_rate", "share", RESPONSES, SHARE, "A completion was paused before its end"),
        Metric("gen/closed_rate", "share", RESPONSES, SHARE,
               "Thinking was closed at its budget by a text that was put in (rollout.thinking)"),
        Metric("gen/eos_rate", "share", RESPONSES, SHARE, "Ended by the model itself"),
        Metric("gen/repetition_rate", "share", "responses of 4 tokens or more", MEAN,
               "Share of a response's 4-grams it has drawn before"),
        Metric("gen/reflection_rate", "share", RESPONSES, SHARE,
               'Says that it looks again ("wait", "let me check"), in English words; evaluations: reflection'),
        Metric("gen/backtracking_rate", "share", RESPONSES, SHARE,
               'Says that it gives up what it said ("that is wrong", "try again"); evaluations: backtracking'),
        Metric("gen/format_valid_rate", "share", RESPONSES, SHARE, "Not given up by the environment as unreadable"),
        Metric("gen/turns_mean", "turns", RESPONSES, MEAN, "Turns of an episode"),
        Metric("gen/tool_calls_mean", "calls", RESPONSES, MEAN, "Tool calls of an episode"),
        Metric("gen/model_calls_mean", "calls", RESPONSES, MEAN, "Questions of the environment to a model by itself"),
        Metric("gen/tool_error_rate", "share", CALLS, SHARE, "The tool ran and failed"),
        Metric("gen/tool_timeout_rate", "share", CALLS, SHARE, "The tool did not answer in time"),
        Metric("gen/bad_call_rate", "calls", RESPONSES, MEAN, "No such tool, or arguments that do not fit"),
        Metric("gen/permission_denied", "acts", RESPONSES, MEAN, "Asked for and refused"),
        Metric("gen/side_effect_rate", "acts", RESPONSES, MEAN, "Something outside the conversation changed"),
        Metric("gen/env_reset_fail", "responses", EPISODES, COUNT, "The environment failed before the first turn"),
        Metric("gen/cost_per_success", "cost", RESPONSES, "costs over solved episodes",
               "What a solved task costs, with plays that were lost with their process (sys/replayed)"),
    ),
    "Data": (
        Metric("data/all_pass", "share", GENERATED, SHARE, "Every response has the top score: too easy"),
        Metric("data/all_fail", "share", GENERATED, SHARE, "Every response has the bottom score: too hard"),
        Metric("data/degenerate", "share", GENERATED, SHARE, "All rewards equal: no learning signal"),
        Metric("data/group_std_mean", "reward", GENERATED, MEAN, "Unbiased deviation of rewards in a group"),
        Metric("data/p_hist/*", "share", "generated groups with scores", TEN,
               "Groups by share of responses scored 1 or more: /03 is 0.3 up to 0.4"),
        Metric("data/prompt_repeat_rate", "share", "trained groups", SHARE,
               "Prompts that the last 8 steps trained too"),
        Metric("data/passes", "passes", STEP, ONCE, "How often the recorded prompts were gone through so far"),
        Metric("data/dup_response_rate", "share", RESPONSES, SHARE,
               "Token by token equal to another of the same group"),
        Metric("data/effective_groups", "groups", "trained groups", COUNT, "Groups that were trained"),
        Metric("data/gen_factor", "ratio", GENERATED, "over trained groups", "Groups generated per group trained"),
        Metric("data/unscorable", "responses", EPISODES, COUNT,
               "No score: nothing to judge by, or the verifier failed"),
        Metric("data/env_error", "responses", EPISODES, COUNT,
               "The environment or a tool failed, timed out or was aborted"),
        Metric("data/prompts_known", "prompts", "the stage so far", COUNT,
               "Prompts that have been drawn and may come back: those of sources with an end"),
        Metric("data/prompts_pass_rate", "share", "known prompts", MEAN, "Their running pass rates"),
        Metric("data/skipped_share", "share", "prompts that draws came upon", SHARE,
               "Passed over by data.choose; since the step before"),
        Metric("data/solved_share", "share", "known prompts", SHARE,
               "Put out by no_positive_resampling: not drawn again"),
        Metric("data/in_band", "share", "known prompts with a score", SHARE, "Within the band of data.choose"),
        Metric("data/pool_easy", "share", GENERATED, SHARE, "Of prompts that were easy before the step"),
        Metric("data/pool_middle", "share", GENERATED, SHARE, "Of prompts that were neither easy nor hard"),
        Metric("data/pool_hard", "share", GENERATED, SHARE, "Of prompts that were hard"),
        Metric("data/pool_unseen", "share", GENERATED, SHARE, "Of prompts that were never scored before"),
        Metric("data/weight/*", "share", STEP, ONCE, "Share of the next draws that adaptive_sources gives a source"),
        Metric("data/signal/*", "share", "groups of the source", "running mean",
               "What a source teaches, as adaptive_sources measures it"),
        Metric("data/trained_trajectories", "responses", TRAINED, COUNT, "Responses with a gradient"),
        Metric("data/tokens", "tokens", UPDATES, COUNT,
               "Trained tokens; one that several epochs train counts in each"),
        Metric("data/examples", "examples", STEP, COUNT, "Supervised examples of the step"),
        Metric("source/*", "", GENERATED, MEAN,
               "reward, length, truncated, degenerate, groups of each source, where a stage tells its sources apart"),
    ),
    "Supervised": (
        Metric("loss/likelihood", "nats", TOKENS, MEAN, "What a supervised step minimises"),
        Metric("sft/nll", "nats", TOKENS, MEAN, "Negative log-likelihood of the trained tokens, without smoothing"),
        Metric("sft/perplexity", "tokens", TOKENS, "exp of the mean", "exp of sft/nll"),
        Metric("data/too_long", "examples", STEP, COUNT, "Drawn and dropped by trainer.max_length"),
    ),
    "Distillation": (
        Metric("loss/distillation", "nats", TOKENS, MEAN, "What a distillation step minimises"),
        Metric("distillation/divergence", "nats", TOKENS, MEAN, "Distance from the teacher, as the loss measures it"),
        Metric("distillation/on_policy", "0 or 1", STEP, MEAN, "1: the step trained on samples, 0: on given texts"),
        Metric("policy/logprob", "nats", TOKENS, MEAN, "Log-probability of the trained tokens"),
    ),
    "Preferences": (
        Metric("loss/preference", "nats", PAIRS, MEAN, "What a preference step minimises"),
        Metric("preference/margin", "reward", PAIRS, MEAN, "Chosen minus rejected implicit reward"),
        Metric("preference/accuracy", "share", PAIRS, SHARE, "Chosen above rejected"),
        Metric("preference/chosen_reward", "reward", PAIRS, MEAN, "What the loss compares, e.g. beta log(pi / ref)"),
        Metric("preference/rejected_reward", "reward", PAIRS, MEAN, "The same of the rejected side"),
        Metric("preference/chosen_logprob", "nats", PAIRS, MEAN, "Summed over the completion, by the policy"),
        Metric("preference/rejected_logprob", "nats", PAIRS, MEAN, "The same of the rejected side"),
        Metric("preference/log_ratio", "nats", "completions", MEAN, "log pi - log ref; a KL on the policy's own only"),
        Metric("preference/win_rate", "share", GENERATED, MEAN, "Comparisons with its opponent that the policy wins"),
        Metric("preference/length_difference", "tokens", PAIRS, MEAN, "Chosen minus rejected"),
        Metric("preference/reward_length_correlation", "", "completions", "Pearson correlation",
               "Of implicit reward and length; near 1, longer is learned as better"),
        Metric("preference/*", "", "completions", MEAN, "Of one method: beta_dpo's batch, KTO's baseline and labels"),
    ),
    "Rejection sampling": (
        Metric("keep/share", "share", EPISODES, SHARE, "Newly kept as examples"),
        Metric("keep/duplicates", "share", EPISODES, SHARE, "Said what was said to this prompt before"),
        Metric("keep/prompts_without", "share", GENERATED, SHARE, "Nothing was ever kept for their prompt"),
        Metric("keep/best_of_n", "reward", "generated groups with scores", "mean of the highest",
               "Score of best-of-N with N the group size; reward/mean is that of one response"),
        Metric("keep/rows", "examples", "the stage so far", COUNT, "Rows of kept.jsonl"),
        Metric("keep/prompts", "prompts", "the stage so far", COUNT, "Prompts with at least one row"),
    ),
    "Staleness": (
        Metric("stale/mean", "versions", CREDITED, MEAN, "Age of the weights that drew a response's oldest token"),
        Metric("stale/max", "versions", CREDITED, MAX, "Never above the staleness bound"),
        Metric("stale/p95", "versions", CREDITED, P95, "Age of the old ones"),
        Metric("stale/in_flight", "versions", CREDITED, MEAN, "Versions published while a response was drawn"),
        Metric("stale/in_queue", "versions", CREDITED, MEAN,
               "Versions published while it waited to be trained; both add up to stale/mean"),
        Metric("stale/mixed_version_frac", "share", CREDITED, SHARE, "Drawn by more than one version"),
        Metric("stale/token_hist/*", "share", CREDITED_TOKENS, TEN,
               "Tokens by age in versions; /09 is 9 and more"),
    ),
    "Who is trained when": (
        Metric("flow/cut", "groups", "groups under way", COUNT,
               "Given back since the step before, to be drawn anew: tail, or oversample without staleness"),
        Metric("flow/tail_limit", "tokens", STEP, ONCE, "tail: longest answer of a short step"),
        Metric("flow/put_off", "groups", "groups that were given back", COUNT, "Wait for a late step"),
        Metric("flow/late_step", "0 or 1", STEP, ONCE, "1: the step caught up on groups that were put off"),
        Metric("flow/interrupted", "requests", STEP, COUNT, "partial: paused when the step was full, and resumed"),
        Metric("flow/prefilled_again", "ratio", "resumed requests", "over tokens of trained responses",
               "partial: tokens that were computed a second time; stale/mixed_version_frac is what it mixed"),
        Metric("flow/running_limit", "groups", STEP, ONCE, "concurrency: groups that may run at once from now on"),
        Metric("flow/running_limit_change", "groups", STEP, ONCE,
               "By how much the last step moved it: down when the cache was full, up when there was room"),
        Metric("flow/lead_limit", "groups", STEP, ONCE,
               "concurrency: groups that may be under way, finished ones included; lower when they queue"),
        Metric("flow/overtaken", "groups", "groups under way", COUNT,
               "Drawn before one that is trained already; only where rollout.order is \"finished\""),
        Metric("flow/length_ratio", "ratio", TRAINED, "mean length over that of the last 32 steps",
               "Under 1: a step of quick groups; over 1: late ones came. Its mean by answers is 1; as above"),
    ),
    "System": (
        Metric("sys/step_time", "s", STEP, ONCE, "Wall clock from report to report; the phases add up to it"),
        Metric("sys/trainer_idle", "share", STEP, "over wall clock", "The trainer waited for data"),
        Metric("sys/sampler_idle", "share", STEP, "over wall clock",
               "The sampler had no request in flight, or made way for the trainer; of several, the mean"),
        Metric("sys/publish_latency", "s", STEP, ONCE, "Until the samplers draw with the new weights"),
        Metric("sys/rollout_tok_s", "tokens/s", STEP, "over the rollout phase",
               "Drawn tokens; with max_staleness above 0, over the whole step"),
        Metric("sys/train_tok_s", "tokens/s", STEP, "over the training phases",
               "Tokens of trained rows, prompt included"),
        Metric("sys/prefill_tok_s", "tokens/s", STEP, "over the sampler's time", "Prompt tokens read by the sampler"),
        Metric("sys/decode_tok_s", "tokens/s", STEP, "over the sampler's time", "Tokens drawn by the sampler"),
        Metric("sys/decode_tokens", "tokens", STEP, COUNT,
               "Drawn after the first of each answer; those that controls cut and those of evaluations, too"),
        Metric("sys/mfu", "share", STEP, "over the training phases",
               "FLOPs that had to be computed (below) over the GPU's peak; absent if unknown"),
        Metric("sys/rollout_tokens", "tokens", STEP, COUNT, "Drawn tokens, dropped groups included"),
        Metric("sys/train_tokens", "tokens", STEP, COUNT, "Tokens of trained rows, prompt included"),
        Metric("sys/queue_groups", "groups", STEP, ONCE, "Finished groups that waited when the batch was taken"),
        Metric("sys/inflight", "requests", "sampler steps", MEAN, "Requests that ran or waited in the sampler"),
        Metric("sys/occupancy", "share", "sampler steps", MEAN, "Rows of the sampler in use"),
        Metric("sys/kv_use", "share", "sampler steps", MAX, "Blocks of the key-value cache in use"),
        Metric("sys/preemptions", "sequences", STEP, COUNT, "Sequences that lost their cache and were computed again"),
        Metric("sys/prefix_hit_rate", "share", "prompt tokens", SHARE, "Found in the cache instead of computed"),
        Metric("sys/samplers", "processes", STEP, ONCE, "Sampler processes that are ready to draw"),
        Metric("sys/sampler_restarts", "processes", STEP, COUNT, "Sampler processes that ended and were replaced"),
        Metric("sys/reissued", "requests", STEP, COUNT, "Requests that went to another because their sampler ended"),
        Metric("sys/rescued", "tokens", STEP, COUNT, "Tokens of such requests that were not drawn a second time"),
        Metric("sys/replayed", "plays", EPISODES, COUNT,
               "Episodes begun anew because the worker process of their environment was lost (env.place)"),
        Metric("sys/peak_memory_bytes", "bytes", "of the stage", MAX, "Device memory, or resident memory on a CPU"),
        Metric("sys/peak_memory_since_start", "0 or 1", "of the stage", MAX, "Whether earlier stages are in that peak"),
    ),
}
# fmt: on

METRICS: tuple[Metric, ...] = tuple(metric for section in SECTIONS.values() for metric in section)


def describe(name: str) -> Metric | None:
    """The definition of a metric: its own, else that of the longest matching pattern, else None."""
    exact = next((metric for metric in METRICS if metric.name == name), None)
    patterns = (metric for metric in METRICS if metric.name.endswith("*") and name.startswith(metric.name[:-1]))
    return exact or max(patterns, key=lambda metric: len(metric.name), default=None)
