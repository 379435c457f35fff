"""How good a trained model is: held-out bits per byte, lm-eval's tasks, comparisons of models of one size."""
