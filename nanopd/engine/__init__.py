"""The engine: scheduler and model runner put together, and the offline interface on top."""
