"""Serving registered adapters: what stands before vLLM, and a server for machines without it.

Why not `transformers serve` (5.17) for these: it cannot load a bare adapter (it wants a whole model's config.json), it
serves a model under its path or hub id alone, lists the hub cache at /v1/models instead of what it serves,
answers errors as {"detail": ...}, has no API key, and lets any client load further models (/load_model) and
unload all of them (/reset).
"""
