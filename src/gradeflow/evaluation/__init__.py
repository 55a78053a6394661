"""Evaluation with lm-evaluation-harness: one base and any number of its adapters, on any tasks.

`plan` says what is measured; `tasks` which tasks there are and where their data lies; `preflight` finds what would
fail before a model is loaded. `process` or `docker` starts the `worker`, which loads the base once (`engine`), lets
generated code run in the sandbox (`unit_tests`), and has workflows graded (`workflow`); or it scores the replies of an
`earlier` evaluation again (`replay`). `results` reads what lm-eval has written (`report` one file of it, `samples` the
replies). As users of the original know it: `original` its
variables, `entrypoint` its container, `feedback` its evaluator.
"""
