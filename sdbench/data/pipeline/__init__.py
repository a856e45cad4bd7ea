"""From stored samples to batches: order, decoding, tokens, workers."""
