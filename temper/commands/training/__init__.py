"""What 'temper train' does: the dry run, the stages, how a run stops."""
