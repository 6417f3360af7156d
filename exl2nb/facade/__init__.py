"""Floor 5c: what a loaded model offers besides generate and stream: samples, scores, choices, activations, conversations, draft models."""
