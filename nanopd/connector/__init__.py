"""KV connectors: how the KV cache of one engine reaches another."""
