"""Where rewards run: killable processes, and threads for functions that were handed over."""
