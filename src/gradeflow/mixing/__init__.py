"""How datasets are mixed: rows are read once, in parallel; what is decided about them fits in memory as numbers.

`scan` turns raw files into an array of rows, `grams` finds evaluation questions in training rows, `near` finds rows
that are nearly the same, `quota` says how many to draw of which, and `pool` decides. `written` makes lines of what was
decided, and `parquet` columns of those.
"""
