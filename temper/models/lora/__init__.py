"""LoRA adapters: added, merged, stored, and made whole."""
