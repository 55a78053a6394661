"""Definite assignment, against what the program does when it runs."""

import ast
import itertools
import random
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradeflow.workflow.program import Program, ProgramError, parse
from gradeflow.workflow.program.flow import find_unbound

BREAKS = {"NameError", "UnboundLocalError"}
NAMES = ("a", "b", "c", "d")
PROBLEMS = ["".join(bits) for bits in itertools.product("01", repeat=3)]


class Writer:
    """Writes programs at random; where `careful`, they read what is bound on every path, and nothing else.

    The others seldom read something else.
    """

    def __init__(self, chance: random.Random, *, careful: bool) -> None:
        self.chance = chance
        self.careful = careful

    def program(self) -> str:
        bound: set[str] = set()
        rows = [*self.block(bound, 3, inside_loop=False), f"log.append({self.value(bound)})"]
        return "\n".join(["import decimal", "log = []", *rows, "return str(log), 0"])

    def block(self, bound: set[str], depth: int, *, inside_loop: bool) -> list[str]:
        rows: list[str] = []
        for _ in range(self.chance.randint(1, 3)):
            rows += self.statement(bound, depth, inside_loop=inside_loop)
        return rows

    def statement(self, bound: set[str], depth: int, *, inside_loop: bool) -> list[str]:
        simple = ["assign", "log", "walrus", "comprehend", "close", "delete", "pair"]
        deep = ["branch", "twice", "each", "until", "attempt", "within", "choose", "finally_", "define"]
        kind = self.chance.choice(simple + (deep * 2 if depth else []) + (["jump"] if inside_loop else []))
        if kind == "jump":
            return [f"if {self.condition()}:", f"    {self.chance.choice(['break', 'continue'])}"]
        if kind in simple:
            return getattr(self, kind)(bound)
        return getattr(self, kind)(bound, depth - 1, inside_loop)

    def condition(self) -> str:
        digit = f"problem[{self.chance.randint(0, 2)}] == '1'"
        other = f"problem[{self.chance.randint(0, 2)}] != '1'"
        return self.chance.choice([digit, f"not {digit}", f"{digit} and {other}", f"{digit} or {other}"])

    def value(self, bound: set[str]) -> str:
        choices = sorted(bound) if self.careful or self.chance.random() < 0.9 else NAMES
        name = self.chance.choice([*choices, "1"])
        digits = f"{name} if {self.condition()} else 2"
        return self.chance.choice([name, name, f"{name} + 1", digits, f"max(x for x in [{name}, 3])"])

    def inside(self, rows: list[str]) -> list[str]:
        return [f"    {row}" for row in rows]

    def assign(self, bound: set[str]) -> list[str]:
        row = f"{(name := self.chance.choice(NAMES))} = {self.value(bound)}"
        bound.add(name)
        return [row]

    def pair(self, bound: set[str]) -> list[str]:
        first, second = self.chance.sample(NAMES, 2)
        row = f"{first}, {second} = {self.value(bound)}, {self.value(bound)}"
        bound |= {first, second}
        return [row]

    def log(self, bound: set[str]) -> list[str]:
        return [f"log.append({self.value(bound)})"]

    def walrus(self, bound: set[str]) -> list[str]:
        name = self.chance.choice(NAMES)
        row = f"log.append(({name} := {self.value(bound)}) and {name})"
        bound.add(name)
        return [row]

    def comprehend(self, bound: set[str]) -> list[str]:
        return [f"log.append([a + {self.value(bound | {'a'})} for a in range(2) if {self.condition()}])"]

    def close(self, bound: set[str]) -> list[str]:
        return [f"log.append((lambda b: {self.value(bound | {'b'})})(2))"]

    def delete(self, bound: set[str]) -> list[str]:
        name = self.chance.choice(sorted(bound) or ["log"])
        if name == "log":
            return ["pass"]
        bound.discard(name)
        return [f"del {name}"]

    def branch(self, bound: set[str], depth: int, loop: bool) -> list[str]:
        then, otherwise = set(bound), set(bound)
        rows = [f"if {self.condition()}:", *self.inside(self.block(then, depth, inside_loop=loop))]
        if self.chance.random() < 0.6:
            rows += ["else:", *self.inside(self.block(otherwise, depth, inside_loop=loop))]
        bound.intersection_update(then & otherwise)
        bound |= then & otherwise
        return rows

    def twice(self, bound: set[str], depth: int, loop: bool) -> list[str]:
        """What is bound under a condition is read under the same condition."""
        condition, name = self.condition(), self.chance.choice(NAMES)
        return [f"if {condition}:", f"    {name} = 5", f"if {condition}:", f"    log.append({name})"]

    def each(self, bound: set[str], depth: int, loop: bool) -> list[str]:
        many, name = self.chance.choice(["range(2)", "range(3)", "problem.strip('0')"]), self.chance.choice(NAMES)
        inside = {*bound, name} if "range" in many else set(bound)
        before = set(bound)
        body = self.block(inside, depth, inside_loop=True)
        deleted = {row.split()[-1] for row in body if "del " in row}
        bound.difference_update(deleted)
        if deleted & before and self.careful:
            return ["pass"]
        rows = [f"for {name} in {many}:", *self.inside(body)]
        if "range" in many and not deleted:
            bound.add(name)
        elif name not in before:
            rows.append(f"{name} = 0")
            bound.add(name)
        return rows

    def until(self, bound: set[str], depth: int, loop: bool) -> list[str]:
        counter = f"n{self.chance.randint(0, 10**6)}"
        body = self.block(set(bound), depth, inside_loop=True)
        if any("del " in row for row in body) and self.careful:
            return ["pass"]
        rows = [f"{counter} = 0", f"while {counter} < 2:", f"    {counter} += 1", *self.inside(body)]
        return [*rows, "else:", "    pass"]

    def attempt(self, bound: set[str], depth: int, loop: bool) -> list[str]:
        tried, caught = set(bound), set(bound)
        body = self.block(tried, depth, inside_loop=loop)
        deleted = {row.split()[-1] for row in body if "del " in row}
        caught -= deleted
        rows = ["try:", *self.inside(body), f"    if {self.condition()}:", "        raise ValueError"]
        seldom, self.careful = self.careful, True  # a call in the body might raise, and never does here
        handled = self.block(caught, depth, inside_loop=loop)
        self.careful = seldom
        rows += ["except ValueError as error:", "    log.append(str(error))", *self.inside(handled)]
        both = tried & caught
        bound.intersection_update(both)
        bound |= both
        return rows

    def finally_(self, bound: set[str], depth: int, loop: bool) -> list[str]:
        body = self.block(bound, depth, inside_loop=False)
        return ["try:", *self.inside(body), "finally:", "    log.append(0)"]

    def within(self, bound: set[str], depth: int, loop: bool) -> list[str]:
        return ["with decimal.localcontext():", *self.inside(self.block(bound, depth, inside_loop=loop))]

    def choose(self, bound: set[str], depth: int, loop: bool) -> list[str]:
        first, last = set(bound), {*bound, "c"}
        rows = ["match problem[0]:", "    case '0':"]
        rows += self.inside(self.inside(self.block(first, depth, inside_loop=loop)))
        rows += ["    case c:", *self.inside(self.inside(self.block(last, depth, inside_loop=loop)))]
        bound.intersection_update(first & last)
        bound |= first & last
        return rows

    def define(self, bound: set[str], depth: int, loop: bool) -> list[str]:
        inner = set(bound)
        name = f"f{self.chance.randint(0, 10**6)}"
        local = self.chance.choice(NAMES)
        rows = [f"def {name}({local}=1):", "    log = []", f"    log.append({self.value({local})})"]
        return [*rows, f"    return log + [{local}]", f"log.append({name}())", f"log.append({self.value(inner)})"]


def results(source: str) -> Iterator[str]:
    """What the program returns for each problem, or what it dies of."""
    rows = "\n".join(f"    {row}" for row in source.split("\n"))
    scope: dict[str, object] = {}
    exec(compile(f"def workflow(problem, entry_point):\n{rows}", "workflow", "exec"), scope)
    for problem in PROBLEMS:
        try:
            yield repr(scope["workflow"](problem, ""))  # type: ignore[operator]
        except Exception as error:  # noqa: BLE001 - it is what is asked
            yield type(error).__name__


def written(seed: int, *, careful: bool) -> str:
    return Writer(random.Random(seed), careful=careful).program()


SWALLOWS = "class A:\n    def __enter__(self): pass\n    def __exit__(self, *_): return True"
CASES = {
    "a certain use": ("return x", "certain"),
    "a branch": ("if problem:\n    x = 1\nreturn x", "doubtful"),
    "a branch, twice": ("if problem:\n    x = 1\nif problem:\n    return x", ""),
    "a branch, and its contrary": ("if not problem:\n    return 1\nif problem:\n    x = 2\nreturn x", ""),
    "cases that exclude each other": (
        "if problem == 'a':\n    y = 1\nelif problem == 'b':\n    x = 2\nif problem == 'b':\n    return x",
        "",
    ),
    "a flag": ("ok = False\nfor x in problem:\n    ok = True\nif ok:\n    return x", ""),
    "a mark of absence": ("y = None\nif problem:\n    y = x = 1\nif y is not None:\n    return x", ""),
    "a loop over something": ("for x in range(3):\n    y = x\nreturn x, y", ""),
    "a loop over what was collected": (
        "y = []\nfor _ in range(2):\n    y.append(1)\nfor x in y:\n    pass\nreturn x",
        "",
    ),
    "a loop over perhaps nothing": ("for x in problem:\n    pass\nreturn x", "doubtful"),
    "a loop's else": ("for y in problem:\n    x = 1\n    break\nelse:\n    x = 2\nreturn x", ""),
    "a counted loop": ("n = 0\nwhile n < 3:\n    x = n\n    n += 1\nreturn x", ""),
    "a loop without end": ("while True:\n    x = 1\n    if problem:\n        break\nreturn x", ""),
    "an exception": ("try:\n    x = len(problem)\nexcept ValueError:\n    pass\nreturn x", "doubtful"),
    "an exception after it": ("try:\n    x = ''\n    x = len(x)\nexcept ValueError:\n    pass\nreturn x", ""),
    "the name of an exception": ("try:\n    len(problem)\nexcept ValueError as x:\n    pass\nreturn x", "certain"),
    "an error that is caught": ("try:\n    return x\nexcept NameError:\n    x = 1\nreturn x", ""),
    "an error that finally drops": ("try:\n    return x\nfinally:\n    return 1", ""),
    "a question whether it is bound": ("if 'x' in locals():\n    return x\nx = 1", ""),
    "a deletion": ("x = 1\ndel x\nreturn x", "certain"),
    "a match with all cases": (
        "match problem:\n    case 'a':\n        x = 1\n    case y:\n        x = 2\nreturn x",
        "",
    ),
    "a match with some": ("match problem:\n    case 'a':\n        x = 1\nreturn x", "doubtful"),
    "a walrus": ("if (x := problem) and x:\n    return x\nreturn x", ""),
    "a walrus that may be left out": ("if problem and (x := 1):\n    pass\nreturn x", "doubtful"),
    "a comprehension's own": ("return [x for x in problem if x]", ""),
    "a comprehension's own, outside": ("y = [x for x in problem]\nreturn x", "certain"),
    "a closure": ("def f():\n    return x\nx = 1\nreturn f()", ""),
    "a function that is not used": ("def f():\n    return x\nreturn 1", ""),
    "a nonlocal": ("def f():\n    nonlocal x\n    x = 1\nf()\nreturn x\nx = 2", ""),
    "a global": ("global x\nx = 1\nreturn x", ""),
    "a class's own": ("class A:\n    x = 1\n    y = x\n    def f(self):\n        return x\nreturn A().f()", "certain"),
    "an augmented assignment": ("x += 1", "certain"),
    "dead code": ("return 1\nreturn x", ""),
    "an assertion": ("if problem:\n    x = 1\nelse:\n    assert False\nreturn x", ""),
    "a with": ("with problem as y:\n    x = 1\nreturn x, y", ""),
    "a with that swallows": (f"{SWALLOWS}\nwith A():\n    y = len(problem)\n    x = 1\nreturn x", "doubtful"),
}


@pytest.mark.parametrize(("body", "found"), CASES.values(), ids=CASES)
def test_it_follows_pythons_own_rules(body: str, found: str) -> None:
    rows = body.replace("\n", "\n    ")
    tree = ast.parse(f"async def __call__(self, problem, entry_point):\n    {rows}")
    certain = {one.certain for one in find_unbound(tree, tree.body) if one.name == "x"}
    assert certain == {"certain": {True}, "doubtful": {False}, "": set()}[found]


def test_loops_in_loops_are_walked_soon() -> None:
    rows = [f"{' ' * depth}while len(''):" for depth in range(18)]
    body = "\n".join([*rows, f"{' ' * 18}x", f"{' ' * 18}x = 1"])
    tree = ast.parse(body)
    started = time.perf_counter()
    find_unbound(tree, ())
    assert time.perf_counter() - started < 2


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_a_valid_program_stays_as_it_is(seed: int) -> None:
    source = written(seed, careful=True)
    assert not BREAKS & set(results(source)), source
    assert parse(source) == Program(source, "body"), source


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_what_runs_to_its_end_is_not_refused_and_ends_the_same(seed: int) -> None:
    source = written(seed, careful=False)
    before = list(results(source))
    program, failure = None, ""
    try:
        program = parse(source)
    except ProgramError as error:
        failure = error.failure
    after = list(results(program.source)) if program else before
    assert all(one == other or one in BREAKS for one, other in zip(before, after, strict=True)), program
    assert program or (failure == "unbound" and not all(one.startswith("(") for one in before)), source
