"""The part that computes: KV memory, attention, the model runner, the sampler."""
