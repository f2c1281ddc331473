"""Traces: what an engine decided, step by step, in a file; and what looks at it: terminal, HTML viewer, Perfetto."""
