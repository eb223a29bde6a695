"""Credit: from rewards to one advantage for every drawn token."""
