"""Which variables of a program may be unbound where they are read: definite assignment over the syntax tree.

Each function is walked once with one state, where paths that meet are joined: a variable that is unbound on every
path to a use is certain to break there. What may be unbound on some of them is walked again with the paths kept
apart by what their conditions say, so that `if flag: x = 1` fits a later `if flag: use(x)`. What this cannot follow
counts as bound: closures, which run at an unknown time, uses inside a `try` that would catch the error, dead code.
"""

import ast
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gradeflow.workflow.program.conditions import UNKNOWN, Conditions, Facts
from gradeflow.workflow.program.scopes import BUILTINS, Comprehension, Survey, catches, survey, targets

PATHS = 48
"""So many paths are kept apart; beyond that they are joined."""

FUEL = 10_000
"""So many steps are taken; a program that needs more, with loops in loops in loops, is left to its run."""

_CONSUMERS = frozenset({"all", "any", "dict", "join", "list", "max", "min", "set", "sorted", "sum", "tuple"})
_GROWS = frozenset({"add", "append", "insert"})
_SAFE_VALUES = (ast.Constant, ast.Name, ast.List, ast.Tuple, ast.Dict, ast.Load)


@dataclass(frozen=True, slots=True)
class Unbound:
    """A variable that is read where it may be unbound; `local` if its function assigns it somewhere."""

    name: str
    line: int
    scope: ast.AST
    local: bool
    certain: bool


class Path(NamedTuple):
    """What holds on a path: the variables that may be bound and those that may be unbound, as bits, and facts."""

    bound: int
    unbound: int
    facts: Facts


State = list[Path]
"""The paths that lead here; none where nothing does."""


@dataclass(slots=True)
class Jumps:
    breaks: State = field(default_factory=list)
    continues: State = field(default_factory=list)
    returns: State = field(default_factory=list)


def find_unbound(tree: ast.Module, entries: Collection[ast.AST]) -> list[Unbound]:
    """The reads that break wherever they are reached, and those that may; `entries` are called from outside."""
    surveyed = survey(tree)
    if surveyed.observes:
        return []
    found: list[Unbound] = []
    waiting: list[tuple[ast.AST, frozenset[str]]] = [(tree, BUILTINS | surveyed.declared)]
    for scope, visible in waiting:
        walk = _Walk(surveyed, scope, visible)
        walk.run()
        if scope is tree or scope in entries or not surveyed.catches:
            found += walk.findings()
        waiting += walk.nested
    return found


class _OutOfFuelError(Exception):
    """The walk is longer than it is worth."""


class _Walk:
    """One function, walked in the order in which it runs."""

    def __init__(self, survey: Survey, scope: ast.AST, visible: frozenset[str]) -> None:
        names = survey.scopes[scope]
        self.survey = survey
        self.scope = scope
        self.names = names
        local = (names.bound | names.parameters) - survey.declared
        self.index = {name: 1 << number for number, name in enumerate(local)}
        self.visible = visible | names.bound | names.parameters
        self.tracked = (1 << len(local)) - 1
        self.apart = False
        self.hidden: frozenset[str] = frozenset()
        self.members: frozenset[str] = frozenset()
        self.caught = 0
        self.fuel = FUEL
        self.seen: dict[ast.Name, tuple[int, int]] = {}
        self.never: dict[str, ast.Name] = {}
        self.nested: list[tuple[ast.AST, frozenset[str]]] = []
        self.jumps = Jumps()
        self.raising: list[State] = []
        self.conditions = Conditions(self.index)

    def run(self) -> None:
        """Walk it joined; where that finds something, walk it with the paths apart, and keep what both find."""
        try:
            self._walk()
            joined, nested, never = self.seen, self.nested, self.never
            doubted = {self.index[node.id] for node, (_, unbound) in joined.items() if unbound}
            if doubted or never:
                self.tracked, self.apart = sum(doubted), True
                self.seen, self.never, self.fuel = {}, {}, FUEL
                self.conditions.note_all(self.scope)
                self._walk()
                self.seen = {node: (joined[node][0], unbound) for node, (_, unbound) in self.seen.items()}
            self.nested = nested
        except _OutOfFuelError:
            self.seen, self.never = {}, {}

    def _walk(self) -> None:
        self.jumps, self.nested = Jumps(), []
        given = sum(self.index.get(name, 0) for name in self.names.parameters) & self.tracked
        start = [Path(given, self.tracked & ~given, {})]
        if isinstance(self.scope, ast.Lambda):
            self.expr(self.scope.body, start)
        elif isinstance(self.scope, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef):
            self.block(self.scope.body, start)

    def findings(self) -> Iterator[Unbound]:
        if not self.survey.star:
            for name, node in self.never.items():
                yield Unbound(name, node.lineno, self.scope, local=False, certain=True)
        for node, (bound, unbound) in self.seen.items():
            if unbound:
                yield Unbound(node.id, node.lineno, self.scope, local=True, certain=not bound)

    # Statements

    def block(self, statements: Sequence[ast.stmt], state: State) -> State:
        for statement in statements:
            if not state:
                return state
            self.fuel -= len(state)
            if self.fuel < 0:
                raise _OutOfFuelError
            risky = self.raising and _may_raise(statement)
            if risky:
                self.note_raise(state)
            walk = _STATEMENTS.get(type(statement))
            state = walk(self, statement, state) if walk else self.parts(statement, state)
            if risky and not _is_one_step(statement):
                self.note_raise(state)
        return state

    def note_raise(self, state: State) -> None:
        for raised in self.raising:
            raised.extend(path for path in state if path not in raised)

    def assign(self, node: ast.Assign, state: State) -> State:
        state = self.expr(node.value, state)
        for target in node.targets:
            state = self.store(target, state, node.value)
        return state

    def ann_assign(self, node: ast.AnnAssign, state: State) -> State:
        if (self.members or isinstance(self.scope, ast.Module)) and not self.survey.postponed:
            state = self.expr(node.annotation, state)
        return self.store(node.target, self.expr(node.value, state), node.value) if node.value else state

    def aug_assign(self, node: ast.AugAssign, state: State) -> State:
        if isinstance(node.target, ast.Name):
            self.load(node.target, state)
        return self.store(node.target, self.expr(node.value, state))

    def delete(self, node: ast.Delete, state: State) -> State:
        for target in node.targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Name):
                    self.load(part, state)
                    if isinstance(part.ctx, ast.Del):
                        state = self.bind(part.id, state, unbound=True)
        return state

    def branch(self, node: ast.If, state: State) -> State:
        then, otherwise = self.test(node.test, state)
        return self.join(self.block(node.body, then) + self.block(node.orelse, otherwise))

    def check(self, node: ast.Assert, state: State) -> State:
        then, otherwise = self.test(node.test, state)
        if node.msg:
            self.expr(node.msg, otherwise)
        return then

    def until(self, node: ast.While, state: State) -> State:
        outer, self.jumps = self.jumps, Jumps(returns=self.jumps.returns)
        head, ends = state, list[Path]()
        for _ in range(PATHS):
            then, ends = self.test(node.test, head)
            again = self.block(node.body, then)
            wider = self.join(head + again + self.jumps.continues)
            if _same(wider, head):
                break
            head = wider
        breaks, self.jumps = self.jumps.breaks, outer
        return self.join(self.block(node.orelse, ends) + breaks)

    def each(self, node: ast.For | ast.AsyncFor, state: State) -> State:
        state = self.expr(node.iter, state)
        outer, self.jumps = self.jumps, Jumps(returns=self.jumps.returns)
        head, after = state, list[Path]()
        for _ in range(PATHS):
            after = self.join(self.block(node.body, self.store(node.target, head)) + self.jumps.continues)
            wider = self.join(head + after)
            if _same(wider, head):
                break
            head = wider
        breaks, self.jumps = self.jumps.breaks, outer
        none = [path for path in state if not self.conditions.is_filled(node.iter, path.facts)]
        return self.join(self.block(node.orelse, self.join(none + after)) + breaks)

    def leave(self, node: ast.Return | ast.Raise, state: State) -> State:
        state = self.parts(node, state)
        if isinstance(node, ast.Return):
            self.jumps.returns.extend(state)
        return []

    def jump_out(self, _: ast.Break, state: State) -> State:
        self.jumps.breaks.extend(state)
        return []

    def jump_on(self, _: ast.Continue, state: State) -> State:
        self.jumps.continues.extend(state)
        return []

    def attempt(self, node: ast.Try | ast.TryStar, state: State) -> State:
        if not node.finalbody:
            return self.handled(node, state)
        outer, self.jumps = self.jumps, Jumps()
        self.raising.append([])
        state = self.handled(node, state)
        raised = self.raising.pop()
        inner, self.jumps = self.jumps, outer
        state = self.block(node.finalbody, state)
        outer.breaks += self.block(node.finalbody, self.join(inner.breaks))
        outer.continues += self.block(node.finalbody, self.join(inner.continues))
        outer.returns += self.block(node.finalbody, self.join(inner.returns))
        self.caught += 1  # an error is on its way already
        self.block(node.finalbody, self.join(raised))
        self.caught -= 1
        return state

    def handled(self, node: ast.Try | ast.TryStar, state: State) -> State:
        caught = catches(node)
        self.caught += caught
        self.raising.append([])
        done = self.block(node.body, state)
        raised = self.join(self.raising.pop())
        self.caught -= caught
        ends = self.block(node.orelse, done)
        for handler in node.handlers:
            entered = self.expr(handler.type, raised) if handler.type else raised
            if handler.name:
                entered = self.bind(handler.name, entered)
            outer = self.jumps
            if handler.name:
                self.jumps = Jumps()
            left = self.block(handler.body, entered)
            if handler.name:
                inner, self.jumps = self.jumps, outer
                left = self.bind(handler.name, left, unbound=True)
                outer.breaks += self.bind(handler.name, inner.breaks, unbound=True)
                outer.continues += self.bind(handler.name, inner.continues, unbound=True)
                outer.returns += inner.returns
            ends = ends + left
        return self.join(ends)

    def within(self, node: ast.With | ast.AsyncWith, state: State) -> State:
        for item in node.items:
            state = self.expr(item.context_expr, state)
            if item.optional_vars:
                state = self.store(item.optional_vars, state)
        if not self.survey.exits:
            return self.block(node.body, state)
        self.caught += 1
        self.raising.append([])
        state = self.block(node.body, state)
        self.caught -= 1
        return self.join(state + self.raising.pop())

    def match(self, node: ast.Match, state: State) -> State:
        state = self.expr(node.subject, state)
        ends: State = []
        for case in node.cases:
            state = self.parts(case.pattern, state)
            taken, left = state, [] if _takes_all(case.pattern) else state
            if condition := self.conditions.of_pattern(node.subject, case.pattern):
                taken, left = self.test(condition, state)
            for part in ast.walk(case.pattern):
                name = getattr(part, "name", None) or getattr(part, "rest", None)
                if isinstance(name, str):
                    taken = self.bind(name, taken)
            refused: State = []
            if case.guard:
                taken, refused = self.test(case.guard, taken)
            ends = ends + self.block(case.body, taken)
            state = self.join(left + refused)
        return self.join(ends + state)

    def define(self, node: ast.FunctionDef | ast.AsyncFunctionDef, state: State) -> State:
        for part in (*node.decorator_list, *_defaults(node.args)):
            state = self.expr(part, state)
        for annotation in () if self.survey.postponed else _annotations(node):
            self.expr(annotation, state)
        if node.name in self.survey.used or _is_dunder(node.name):
            self.nest(node)
        return self.bind(node.name, state)

    def define_class(self, node: ast.ClassDef, state: State) -> State:
        for part in (*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)):
            state = self.expr(part, state)
        outer = self.hidden, self.members
        self.members = self.members | self.survey.scopes[node].bound
        self.hidden = self.hidden | self.members
        state = self.block(node.body, state)
        self.hidden, self.members = outer
        return self.bind(node.name, state)

    def nest(self, node: ast.AST) -> None:
        """What a class binds is not seen by its methods; what a comprehension binds is seen by its lambdas."""
        self.nested.append((node, self.visible | (self.hidden - self.members)))

    def bring(self, node: ast.Import | ast.ImportFrom, state: State) -> State:
        for alias in node.names:
            state = self.bind(alias.asname or alias.name.partition(".")[0], state)
        return state

    # Expressions

    def parts(self, node: ast.AST, state: State) -> State:
        for value in vars(node).values():
            if isinstance(value, ast.AST):
                state = self.expr(value, state)
            elif isinstance(value, list):
                for part in value:
                    if isinstance(part, ast.AST):
                        state = self.expr(part, state)
        return state

    def expr(self, node: ast.AST, state: State) -> State:
        kind = type(node)
        if kind is ast.Name:
            self.load(node, state)  # type: ignore[arg-type]
            return state
        if kind is ast.Constant or kind is ast.Load:
            return state
        walk = _EXPRESSIONS.get(kind)
        return walk(self, node, state) if walk else self.parts(node, state)

    def load(self, node: ast.Name, state: State) -> None:
        name = node.id
        if not state or self.caught or name in self.hidden:
            return
        bit = self.index.get(name, 0) & self.tracked
        if bit:
            bound, unbound = self.seen.get(node, (0, 0))
            for path in state:
                bound |= path.bound & bit
                unbound |= path.unbound & bit
            self.seen[node] = bound, unbound
        elif name not in self.visible and not _is_dunder(name):
            self.never.setdefault(name, node)

    def choose(self, node: ast.BoolOp, state: State) -> State:
        then, otherwise = self.test(node, state)
        return self.join(then + otherwise)

    def choose_between(self, node: ast.IfExp, state: State) -> State:
        then, otherwise = self.test(node.test, state)
        return self.join(self.expr(node.body, then) + self.expr(node.orelse, otherwise))

    def name_value(self, node: ast.NamedExpr, state: State) -> State:
        return self.store(node.target, self.expr(node.value, state), node.value)

    def call(self, node: ast.Call, state: State) -> State:
        function = node.func
        name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        if len(node.args) == 1 and isinstance(node.args[0], ast.GeneratorExp) and name in _CONSUMERS:
            state = self.comprehend(node.args[0], self.expr(function, state))
        else:
            state = self.parts(node, state)
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            state = self.change(function.value.id, state, filled=name in _GROWS)
        return state

    def anonymous(self, node: ast.Lambda, state: State) -> State:
        for part in _defaults(node.args):
            state = self.expr(part, state)
        self.nest(node)
        return state

    def comprehend(self, node: Comprehension, state: State) -> State:
        before, outer = state, self.hidden
        state = self.expr(node.generators[0].iter, state)
        self.hidden = outer | targets(node)
        for number, part in enumerate(node.generators):
            if number:
                state = self.expr(part.iter, state)
            for condition in part.ifs:
                state, _ = self.test(condition, state)
        for value in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            state = self.expr(value, state)
        self.hidden = outer
        return self.join(before + state)

    def generate(self, node: ast.GeneratorExp, state: State) -> State:
        """It runs later, but for its first iterable."""
        self.expr(node.generators[0].iter, state)
        self.caught += 1
        self.comprehend(node, state)
        self.caught -= 1
        return state

    def test(self, node: ast.expr, state: State) -> tuple[State, State]:
        """The paths on which the condition is true, and those on which it is false."""
        match node:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                then, otherwise = self.test(operand, state)
                return otherwise, then
            case ast.BoolOp(op=operator, values=values):
                every = isinstance(operator, ast.And)
                decided: State = []
                for value in values:
                    then, otherwise = self.test(value, state)
                    state, over = (then, otherwise) if every else (otherwise, then)
                    decided = decided + over
                decided = self.join(decided)
                return (state, decided) if every else (decided, state)
            case ast.Constant(value=value):
                return (state, []) if value else ([], state)
        state = self.expr(node, state)
        if not self.apart:
            return state, state
        if isinstance(node, ast.NamedExpr):
            node = node.target
        then, otherwise = [], []
        for path in state:
            known = self.conditions.truth(node, path.facts)
            if known is not False:
                then.append(path._replace(facts=self.conditions.suppose(node, path.facts, value=True)))
            if known is not True:
                otherwise.append(path._replace(facts=self.conditions.suppose(node, path.facts, value=False)))
        return self.join(then), self.join(otherwise)

    # Variables

    def store(self, target: ast.expr, state: State, value: ast.expr | None = None) -> State:
        match target:
            case ast.Name(id=name):
                return self.bind(name, state, value)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                for part in parts:
                    state = self.store(part, state)
                return state
            case ast.Starred(value=inner):
                return self.store(inner, state)
            case ast.Subscript(value=ast.Name(id=name)):
                return self.change(name, self.parts(target, state), filled=True)
        return self.parts(target, state)

    def bind(self, name: str, state: State, value: ast.expr | None = None, *, unbound: bool = False) -> State:
        if name in self.hidden or (name not in self.index and not self.apart):
            return state
        bit = self.index.get(name, 0) & self.tracked
        bound: State = []
        for path in state:
            facts = self.conditions.assigned(name, value, path.facts) if self.apart else path.facts
            if unbound:
                bound.append(Path(path.bound & ~bit, path.unbound | bit, facts))
            else:
                bound.append(Path(path.bound | bit, path.unbound & ~bit, facts))
        return self.join(bound)

    def change(self, name: str, state: State, *, filled: bool) -> State:
        """A method of `name` was called: what was known of it may be over."""
        if not self.apart:
            return state
        facts = [self.conditions.changed(name, path.facts, filled=filled) for path in state]
        return self.join([path._replace(facts=known) for path, known in zip(state, facts, strict=True)])

    def join(self, state: State) -> State:
        if len(state) < 2:
            return state
        if self.apart:
            state = [path for number, path in enumerate(state) if path not in state[:number]]
            if len(state) <= PATHS:
                return state
        bound = unbound = 0
        facts = dict(state[0].facts)
        for path in state:
            bound |= path.bound
            unbound |= path.unbound
            facts = {key: value for key, value in facts.items() if path.facts.get(key, UNKNOWN) == value}
        return [Path(bound, unbound, facts)]


_STATEMENTS: dict[type[ast.AST], Callable[..., State]] = {
    ast.Assign: _Walk.assign,
    ast.AnnAssign: _Walk.ann_assign,
    ast.AugAssign: _Walk.aug_assign,
    ast.Delete: _Walk.delete,
    ast.If: _Walk.branch,
    ast.Assert: _Walk.check,
    ast.While: _Walk.until,
    ast.For: _Walk.each,
    ast.AsyncFor: _Walk.each,
    ast.Return: _Walk.leave,
    ast.Raise: _Walk.leave,
    ast.Break: _Walk.jump_out,
    ast.Continue: _Walk.jump_on,
    ast.Try: _Walk.attempt,
    ast.TryStar: _Walk.attempt,
    ast.With: _Walk.within,
    ast.AsyncWith: _Walk.within,
    ast.Match: _Walk.match,
    ast.FunctionDef: _Walk.define,
    ast.AsyncFunctionDef: _Walk.define,
    ast.ClassDef: _Walk.define_class,
    ast.Import: _Walk.bring,
    ast.ImportFrom: _Walk.bring,
}
_EXPRESSIONS: dict[type[ast.AST], Callable[..., State]] = {
    ast.BoolOp: _Walk.choose,
    ast.IfExp: _Walk.choose_between,
    ast.NamedExpr: _Walk.name_value,
    ast.Call: _Walk.call,
    ast.Lambda: _Walk.anonymous,
    ast.ListComp: _Walk.comprehend,
    ast.SetComp: _Walk.comprehend,
    ast.DictComp: _Walk.comprehend,
    ast.GeneratorExp: _Walk.generate,
}


def _same(state: State, other: State) -> bool:
    return len(state) == len(other) and all(path in other for path in state)


def _is_one_step(statement: ast.stmt) -> bool:
    """Whether it cannot raise once it has bound a name."""
    match statement:
        case ast.Assign(targets=[ast.Name()]) | ast.AugAssign(target=ast.Name()) | ast.Expr():
            return not any(isinstance(part, ast.NamedExpr) for part in ast.walk(statement))
    return False


def _may_raise(statement: ast.stmt) -> bool:
    match statement:
        case ast.Pass() | ast.Break() | ast.Continue() | ast.Global() | ast.Nonlocal():
            return False
        case ast.Import() | ast.ImportFrom() | ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Try():
            return False
        case ast.Assign(targets=[ast.Name()], value=value) | ast.Return(value=value) if value is not None:
            return not all(isinstance(part, _SAFE_VALUES) for part in ast.walk(value))
    return True


def _takes_all(pattern: ast.pattern) -> bool:
    match pattern:
        case ast.MatchAs(pattern=inner):
            return inner is None or _takes_all(inner)
        case ast.MatchOr(patterns=parts):
            return any(map(_takes_all, parts))
    return False


def _defaults(arguments: ast.arguments) -> Iterable[ast.expr]:
    return (part for part in (*arguments.defaults, *arguments.kw_defaults) if part)


def _annotations(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterable[ast.expr]:
    arguments = node.args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
    return (part for part in (*(argument.annotation for argument in every if argument), node.returns) if part)


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")
