"""From an address to rows.

`addresses` finds a file, `download` brings it here, `archives` opens it, `records` reads it.
"""
