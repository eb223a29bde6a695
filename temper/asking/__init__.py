"""Models behind an address: how they are asked, and what is kept of their answers."""
