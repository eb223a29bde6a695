"""Models that judge: prompts, verdicts, rubrics of criteria, agreement with people."""
