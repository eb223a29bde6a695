"""Two models on the same questions: differences, curves, a verdict, a page."""
