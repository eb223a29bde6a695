"""Which prompts are drawn, by what a stage has seen of them: histories, and the choosers that read them."""
