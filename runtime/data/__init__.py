"""Text to training samples: corpus → tokenizer → shards → samples. Deterministic, without torch, nothing pickled."""
