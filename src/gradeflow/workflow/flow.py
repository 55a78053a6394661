"""Which variables of a program may be unbound where they are read: definite assignment over the syntax tree.

Each function is walked once with one state, where paths that meet are joined: a variable that is unbound on every
path to a use is certain to break there. What may be unbound on some of them is walked again with the paths kept
apart by what their conditions say, so that `if flag: x = 1` fits a later `if flag: use(x)`. What this cannot follow
counts as bound: closures, which run at an unknown time, uses inside a `try` that would catch the error, dead code.
"""

import ast
import builtins
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

PATHS = 48
"""So many paths are kept apart; beyond that they are joined."""

FUEL = 10_000
"""So many steps are taken; a program that needs more, with loops in loops in loops, is left to its run."""

BUILTINS = frozenset(dir(builtins))
_CATCHING = frozenset({"Exception", "BaseException", "NameError", "UnboundLocalError"})
_OBSERVERS = frozenset({"locals", "vars", "dir", "globals", "eval", "exec"})
_BACKGROUND = frozenset({"create_task", "ensure_future", "wait", "TaskGroup"})
_CONSUMERS = frozenset({"all", "any", "dict", "join", "list", "max", "min", "set", "sorted", "sum", "tuple"})
_GROWS = frozenset({"add", "append", "insert"})
_SAFE_VALUES = (ast.Constant, ast.Name, ast.List, ast.Tuple, ast.Dict, ast.Load)
_NEGATED = {ast.NotEq: ast.Eq, ast.IsNot: ast.Is, ast.NotIn: ast.In, ast.GtE: ast.Lt, ast.LtE: ast.Gt}
_TYPE_PARAMETERS = ("TypeVar", "ParamSpec", "TypeVarTuple")
_UNKNOWN = object()

Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True, slots=True)
class Unbound:
    """A variable that is read where it may be unbound; `local` if its function assigns it somewhere."""

    name: str
    line: int
    scope: ast.AST
    local: bool
    certain: bool


class Path(NamedTuple):
    """What holds on a path: the variables that may be bound and unbound, as bits, and what is known of values."""

    bound: int
    unbound: int
    facts: Mapping[str, object] = {}


State = list[Path]
"""The paths that lead here; none where nothing does."""


@dataclass(slots=True)
class Jumps:
    breaks: State = field(default_factory=list)
    continues: State = field(default_factory=list)
    returns: State = field(default_factory=list)


@dataclass(slots=True)
class Names:
    """What a scope binds; `declared` are those that it says are another's."""

    parameters: set[str] = field(default_factory=set)
    bound: set[str] = field(default_factory=set)
    declared: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Survey:
    """What is asked of the whole program before its functions are walked.

    `catches` says that an error in a function may be survived by its caller, `exits` that a `with` may survive one,
    `observes` that the program may look whether a variable is bound, `postponed` that annotations are not evaluated.
    """

    scopes: dict[ast.AST, Names] = field(default_factory=dict)
    declared: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    catches: bool = False
    exits: bool = False
    observes: bool = False
    star: bool = False
    postponed: bool = False


def find_unbound(tree: ast.Module, entries: Collection[ast.AST]) -> list[Unbound]:
    """The reads that break wherever they are reached, and those that may; `entries` are called from outside."""
    survey = Survey()
    _Surveyor(survey, Names()).scope(tree)
    if survey.observes:
        return []
    found: list[Unbound] = []
    waiting: list[tuple[ast.AST, frozenset[str]]] = [(tree, BUILTINS | survey.declared)]
    for scope, visible in waiting:
        walk = _Walk(survey, scope, visible)
        walk.run()
        if scope is tree or scope in entries or not survey.catches:
            found += walk.findings()
        waiting += walk.nested
    return found


class _Surveyor:
    """Collects what each scope binds, and what is used anywhere."""

    def __init__(self, survey: Survey, names: Names) -> None:
        self.survey = survey
        self.names = names

    def scope(self, node: ast.AST) -> None:
        outer, self.names = self.names, Names()
        self.survey.scopes[node] = self.names
        self.generic_visit(node)
        self.names = outer

    def generic_visit(self, node: ast.AST) -> None:
        for value in vars(node).values():
            if isinstance(value, ast.AST):
                self.visit(value)
            elif isinstance(value, list):
                for part in value:
                    if isinstance(part, ast.AST):
                        self.visit(part)

    def visit(self, node: ast.AST) -> None:
        visit = _VISITS.get(type(node))
        if visit:
            visit(self, node)
        elif not isinstance(node, ast.Constant | ast.expr_context):
            self.generic_visit(node)

    def visit_name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.use(node.id)
        else:
            self.names.bound.add(node.id)

    def use(self, name: str) -> None:
        self.survey.used.add(name)
        self.survey.observes |= name in _OBSERVERS
        self.survey.catches |= name in _BACKGROUND

    def visit_attribute(self, node: ast.Attribute) -> None:
        self.survey.used.add(node.attr)
        self.survey.catches |= node.attr in _BACKGROUND
        self.visit(node.value)

    def visit_definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self.names.bound.add(node.name)
        if node.name in {"__exit__", "__aexit__"}:
            self.survey.exits = self.survey.catches = True
        self.scope(node)

    def visit_argument(self, node: ast.arg) -> None:
        self.names.parameters.add(node.arg)
        self.generic_visit(node)

    def visit_comprehension(self, node: Comprehension) -> None:
        """Its targets are its own; a walrus in it binds in the scope around it."""
        outer, self.names = self.names, Names()
        self.generic_visit(node)
        outer.bound |= self.names.bound - _targets(node)
        self.names = outer

    def visit_import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            self.survey.star |= alias.name == "*"
            self.survey.postponed |= alias.name == "annotations" and getattr(node, "module", "") == "__future__"
            self.names.bound.add(alias.asname or alias.name.partition(".")[0])

    def visit_declaration(self, node: ast.Global | ast.Nonlocal) -> None:
        self.names.declared.update(node.names)
        self.survey.declared.update(node.names)

    def visit_keyword(self, node: ast.keyword) -> None:
        self.survey.catches |= node.arg == "return_exceptions"
        self.visit(node.value)

    def visit_try(self, node: ast.Try | ast.TryStar) -> None:
        self.survey.catches |= _catches(node)
        self.generic_visit(node)

    def visit_capture(self, node: ast.AST) -> None:
        """`except ... as name`, the captures of a pattern, and type parameters."""
        name = getattr(node, "name", None) or getattr(node, "rest", None)
        if isinstance(name, str):
            self.names.bound.add(name)
        self.generic_visit(node)


_VISITS: dict[type[ast.AST], Callable[..., None]] = {
    ast.Name: _Surveyor.visit_name,
    ast.Attribute: _Surveyor.visit_attribute,
    ast.FunctionDef: _Surveyor.visit_definition,
    ast.AsyncFunctionDef: _Surveyor.visit_definition,
    ast.ClassDef: _Surveyor.visit_definition,
    ast.Lambda: _Surveyor.scope,
    ast.arg: _Surveyor.visit_argument,
    ast.ListComp: _Surveyor.visit_comprehension,
    ast.SetComp: _Surveyor.visit_comprehension,
    ast.DictComp: _Surveyor.visit_comprehension,
    ast.GeneratorExp: _Surveyor.visit_comprehension,
    ast.Import: _Surveyor.visit_import,
    ast.ImportFrom: _Surveyor.visit_import,
    ast.Global: _Surveyor.visit_declaration,
    ast.Nonlocal: _Surveyor.visit_declaration,
    ast.keyword: _Surveyor.visit_keyword,
    ast.Try: _Surveyor.visit_try,
    ast.TryStar: _Surveyor.visit_try,
    ast.ExceptHandler: _Surveyor.visit_capture,
    ast.MatchAs: _Surveyor.visit_capture,
    ast.MatchStar: _Surveyor.visit_capture,
    ast.MatchMapping: _Surveyor.visit_capture,
    **{getattr(ast, name): _Surveyor.visit_capture for name in _TYPE_PARAMETERS if hasattr(ast, name)},
}


def _targets(comprehension: Comprehension) -> set[str]:
    nodes = (node for part in comprehension.generators for node in ast.walk(part.target))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _catches(node: ast.Try | ast.TryStar) -> bool:
    """Whether a NameError in its body may be survived."""
    for handler in node.handlers:
        for kind in handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]:
            if not isinstance(kind, ast.Name | ast.Attribute):
                return True
            if isinstance(kind, ast.Name) and (kind.id in _CATCHING or kind.id not in BUILTINS):
                return True
    inside = (part for statement in node.finalbody for part in ast.walk(statement))
    return any(isinstance(part, ast.Return | ast.Break | ast.Continue) for part in inside)


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


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
        self.asked: Counter[str] = Counter()
        self.texts: dict[ast.expr, str] = {}
        self.mentions: dict[str, frozenset[str]] = {}
        self.conditions: dict[ast.pattern, ast.expr | None] = {}

    def run(self) -> None:
        """Walk it joined; where that finds something, walk it with the paths apart, and keep what both find."""
        try:
            self._walk()
            joined, nested, never = self.seen, self.nested, self.never
            doubted = {self.index[node.id] for node, (_, unbound) in joined.items() if unbound}
            if doubted or never:
                self.tracked, self.apart = sum(doubted), True
                self.seen, self.never, self.fuel = {}, {}, FUEL
                self._note_conditions()
                self._walk()
                self.seen = {node: (joined[node][0], unbound) for node, (_, unbound) in self.seen.items()}
            self.nested = nested
        except _OutOfFuelError:
            self.seen, self.never = {}, {}

    def _note_conditions(self) -> None:
        for part in ast.walk(self.scope):
            if isinstance(part, ast.If | ast.While | ast.IfExp | ast.Assert):
                self._note(part.test)
            elif isinstance(part, ast.For):
                self._note(part.iter)
        for condition in self.conditions.values():
            if condition:
                self._note(condition)

    def _walk(self) -> None:
        self.jumps, self.nested = Jumps(), []
        given = sum(self.index.get(name, 0) for name in self.names.parameters) & self.tracked
        start = [Path(given, self.tracked & ~given)]
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
        none = [path for path in state if not self.is_filled(node.iter, path)]
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
        caught = _catches(node)
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
            if condition := self.as_condition(node.subject, case.pattern):
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

    def as_condition(self, subject: ast.expr, pattern: ast.pattern) -> ast.expr | None:
        if pattern not in self.conditions:
            match pattern:
                case ast.MatchValue(value=value):
                    self.conditions[pattern] = ast.Compare(subject, [ast.Eq()], [value])
                case ast.MatchOr(patterns=parts):
                    each = [self.as_condition(subject, part) for part in parts]
                    known = [condition for condition in each if condition]
                    self.conditions[pattern] = ast.BoolOp(ast.Or(), known) if len(known) == len(each) else None
                case _:
                    self.conditions[pattern] = None
        return self.conditions[pattern]

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
        self.hidden = outer | _targets(node)
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
            known = self.truth(node, path)
            if known is not False:
                then.append(self.suppose(node, path, value=True))
            if known is not True:
                otherwise.append(self.suppose(node, path, value=False))
        return self.join(then), self.join(otherwise)

    # What is known of values

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
            facts = path.facts
            if self.apart:
                facts = self._forget(name, facts)
                if name in self.mentions and value is not None:
                    facts = {**facts, **self._known(name, value, path)}
            if unbound:
                bound.append(Path(path.bound & ~bit, path.unbound | bit, facts))
            else:
                bound.append(Path(path.bound | bit, path.unbound & ~bit, facts))
        return self.join(bound)

    def change(self, name: str, state: State, *, filled: bool) -> State:
        """A method of `name` was called: what was known of it may be over."""
        if not self.apart:
            return state
        changed = []
        for path in state:
            value = path.facts.get(f"={name}", _UNKNOWN)
            facts = path.facts if isinstance(value, str | int | float) else self._forget(name, path.facts)
            changed.append(path._replace(facts={**facts, name: True} if filled and name in self.mentions else facts))
        return self.join(changed)

    def _forget(self, name: str, facts: Mapping[str, object]) -> Mapping[str, object]:
        gone = [key for key in facts if name in self.mentions.get(key.removeprefix("="), ())]
        return {key: value for key, value in facts.items() if key not in gone} if gone else facts

    def _known(self, name: str, value: ast.expr, path: Path) -> dict[str, object]:
        constant = self.constant(value, path)
        if constant is not _UNKNOWN:
            return {f"={name}": constant}
        filled = self.is_filled(value, path)
        empty = isinstance(value, ast.List | ast.Tuple) and not value.elts
        return {name: filled} if filled or empty else {}

    def _note(self, node: ast.expr) -> None:
        """Remember which conditions are asked, and how often: facts about the others are not kept."""
        for part in ast.walk(node):
            if isinstance(part, ast.expr):
                text, _ = self.text(part)
                self.asked[text] += 1

    def text(self, node: ast.expr) -> tuple[str, bool]:
        """A condition in its positive form, and whether that is what was asked."""
        positive = True
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _NEGATED:
            opposite = _NEGATED[type(node.ops[0])]()
            node, positive = ast.Compare(node.left, [opposite], node.comparators), False
            key = ast.unparse(node)
        elif node in self.texts:
            return self.texts[node], True
        else:
            key = self.texts[node] = ast.unparse(node)
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        self.mentions[key] = frozenset(names)
        return key, positive

    def truth(self, node: ast.expr, path: Path) -> bool | None:
        value = self.constant(node, path)
        if value is not _UNKNOWN:
            return bool(value)
        text, positive = self.text(node)
        known = path.facts.get(text)
        return None if known is None else known is positive

    def suppose(self, node: ast.expr, path: Path, *, value: bool) -> Path:
        text, positive = self.text(node)
        facts: dict[str, object] = {}
        if any(isinstance(part, ast.Await) for part in ast.walk(node)):
            return path
        if self.asked[text] > 1:
            facts[text] = value is positive
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[ast.Constant(value=constant)]):
                same = isinstance(operator, ast.Eq | ast.Is) if value else isinstance(operator, ast.NotEq | ast.IsNot)
                asked, _ = self.text(left)
                if same and self.asked[asked] > 1:
                    facts[f"={asked}"] = constant
        return path._replace(facts={**path.facts, **facts}) if facts else path

    def constant(self, node: ast.expr, path: Path) -> object:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in _COMPARE:
                pair = self.constant(left, path), self.constant(right, path)
                if _UNKNOWN in pair:
                    return _UNKNOWN
                try:
                    return _COMPARE[type(operator)](*pair)
                except TypeError:
                    return _UNKNOWN
        return path.facts.get(f"={self.text(node)[0]}", _UNKNOWN) if self.apart else _UNKNOWN

    def is_filled(self, node: ast.expr, path: Path) -> bool:
        """Whether there is something in it to loop over."""
        match node:
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                return any(not isinstance(part, ast.Starred) for part in parts)
            case ast.Dict(keys=keys):
                return any(keys)
            case ast.Constant(value=str() | bytes() as value):
                return bool(value)
            case ast.Name(id=name):
                return path.facts.get(name) is True or bool(path.facts.get(f"={name}"))
            case ast.Call(func=ast.Name(id="range"), args=args, keywords=[]) if "range" not in self.index:
                values = [_integer(self.constant(part, path), part) for part in args]
                return bool(values) and None not in values and _ranges(values)
            case ast.Call(
                func=ast.Name(id="enumerate" | "reversed" | "sorted" | "list" | "tuple" | "set"), args=[part]
            ):
                return self.is_filled(part, path)
            case ast.Call(func=ast.Name(id="zip"), args=args, keywords=[]):
                return bool(args) and all(self.is_filled(part, path) for part in args)
            case ast.ListComp(generators=generators):
                return all(not part.ifs and self.is_filled(part.iter, path) for part in generators)
        return False

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
            facts = {key: value for key, value in facts.items() if path.facts.get(key, _UNKNOWN) == value}
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
_COMPARE: dict[type[ast.cmpop], Callable[..., object]] = {
    ast.Eq: lambda left, right: left == right,
    ast.NotEq: lambda left, right: left != right,
    ast.Lt: lambda left, right: left < right,
    ast.LtE: lambda left, right: left <= right,
    ast.Gt: lambda left, right: left > right,
    ast.GtE: lambda left, right: left >= right,
    ast.Is: lambda left, right: left is right,
    ast.IsNot: lambda left, right: left is not right,
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


def _integer(value: object, node: ast.expr) -> int | None:
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as number)):
            return -number
    return value if isinstance(value, int) else None


def _ranges(values: Collection[int | None]) -> bool:
    numbers = [value for value in values if value is not None]
    return len(numbers) <= 3 and (len(numbers) < 3 or numbers[2] != 0) and bool(range(*numbers))
