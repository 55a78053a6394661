"""The embedded base: a small Qwen2 that is executor, policy and judge on a machine without GPU, key or hub.

`curriculum` says what it is taught, `teach` makes it, and `recipe` names it: by the digest of everything it is made
from, because the bytes of its weights differ from one kind of CPU to the next.
"""
