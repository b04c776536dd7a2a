"""What people look at: reports of a plan, made of its plan file, and comparisons of training under budgets."""
