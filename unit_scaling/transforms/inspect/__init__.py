"""What is seen of a model while it runs: products, tensors over time, and what the numbers say."""
