"""`reinforge improve`: finds, within a budget, what makes an agent better, and judges it once."""
