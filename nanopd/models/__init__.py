"""From a name to something that computes: the model's config, its weights, its tokenizer.

`config.py` says what the model is, `decoder.py` what it computes, `loader.py` and `gguf.py` read the files,
`tokenizer.py` turns text into ids, `default.py` keeps the default model. Nothing is imported here: `import torch` alone
costs seconds, and a command that only lists models should not pay for it.
"""
