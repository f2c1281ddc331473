"""The HTTP side: an OpenAI-compatible server for one engine, and a router in front of many."""
