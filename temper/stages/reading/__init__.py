"""What stages that read data are made of: tasks, rows, and what a reference said of them."""
