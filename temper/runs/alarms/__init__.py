"""What a run raises by itself: conditions, rules, and who watches them."""
