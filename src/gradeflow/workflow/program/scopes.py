"""What each scope of a program binds, and what may be met anywhere in it: asked before its functions are walked."""

import ast
import builtins
from collections.abc import Callable
from dataclasses import dataclass, field

BUILTINS = frozenset(dir(builtins))
_CATCHING = frozenset({"Exception", "BaseException", "NameError", "UnboundLocalError"})
_OBSERVERS = frozenset({"locals", "vars", "dir", "globals", "eval", "exec"})
_BACKGROUND = frozenset({"create_task", "ensure_future", "wait", "TaskGroup"})
_TYPE_PARAMETERS = ("TypeVar", "ParamSpec", "TypeVarTuple")

Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


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


def survey(tree: ast.Module) -> Survey:
    found = Survey()
    _Surveyor(found).scope(tree)
    return found


class _Surveyor:
    """Collects what each scope binds, and what is used anywhere."""

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        self.names = Names()

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
        outer.bound |= self.names.bound - targets(node)
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
        self.survey.catches |= catches(node)
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


def targets(comprehension: Comprehension) -> set[str]:
    nodes = (node for part in comprehension.generators for node in ast.walk(part.target))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def catches(node: ast.Try | ast.TryStar) -> bool:
    """Whether a NameError in its body may be survived."""
    for handler in node.handlers:
        for kind in handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]:
            if not isinstance(kind, ast.Name | ast.Attribute):
                return True
            if isinstance(kind, ast.Name) and (kind.id in _CATCHING or kind.id not in BUILTINS):
                return True
    inside = (part for statement in node.finalbody for part in ast.walk(statement))
    return any(isinstance(part, ast.Return | ast.Break | ast.Continue) for part in inside)
