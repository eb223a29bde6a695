"""The table of metrics: every name listed here has one definition, and every definition says what it is."""

from __future__ import annotations

import pytest

from temper.runs.metrics import METRICS, describe

SPECIFIED = {
    "reward": "mean",
    "adv": "mean std min max abs_mean frac_zero token_mean token_std token_min token_max token_abs_mean",
    "policy": "entropy ratio_mean ratio_max ratio_min ratio_p99 clip_frac_high clip_frac_low dual_clip_frac "
    "gate_mask_frac kl_old_k1 kl_old_k3 kl_ref_k1 kl_ref_k3 grad_norm grad_norm_clipped update_norm_ratio",
    "critic": "explained_var",
    "mismatch": "logp_abs_mean logp_abs_max kl_k1 kl_k3 ess chi2_token ppl_train ppl_rollout log_ppl_diff clip_frac "
    "reject_frac_token reject_frac_seq veto_frac corr",
    "gen": "len_mean len_max len_p95 len_correct len_wrong truncation_rate interrupt_rate eos_rate repetition_rate "
    "tool_calls_mean tool_error_rate tool_timeout_rate turns_mean format_valid_rate side_effect_rate permission_denied "
    "env_reset_fail cost_per_success",
    "data": "all_pass all_fail degenerate group_std_mean p_hist/* prompt_repeat_rate effective_groups gen_factor "
    "unscorable env_error dup_response_rate",
    "stale": "mean max p95 token_hist/* in_flight in_queue mixed_version_frac",
    "sys": "rollout_tok_s train_tok_s step_time trainer_idle sampler_idle queue_groups inflight kv_use "
    "preemptions prefix_hit_rate publish_latency mfu",
}
"""There is no stale/dropped among them: no group is ever dropped for its age (rollout/buffer.py)."""


@pytest.mark.parametrize("name", [f"{area}/{name}" for area, names in SPECIFIED.items() for name in names.split()])
def test_every_specified_metric_has_a_definition_of_its_own(name: str) -> None:
    metric = describe(name)
    assert metric is not None
    assert metric.name == name


def test_every_name_is_defined_once_and_says_what_it_is() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(metric.mask and metric.reduction and metric.meaning for metric in METRICS)


def test_a_name_finds_its_own_definition_before_a_pattern() -> None:
    for name, expected in (
        ("reward/mean", "reward/mean"),
        ("reward/exact", "reward/*"),
        ("loss/kl", "loss/*"),
        ("data/p_hist/07", "data/p_hist/*"),
        ("mismatch/token_tis_frac", "mismatch/*"),
    ):
        found = describe(name)
        assert found is not None
        assert found.name == expected
    for unknown in ("weather/today", "gen/mood", "sys/colour"):
        assert describe(unknown) is None
